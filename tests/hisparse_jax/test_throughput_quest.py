# SPDX-License-Identifier: Apache-2.0
"""Throughput of a decoder over Quest pages, a small one on the CPU, and what the synthetic process does to pages."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import hisparse_jax
from hisparse_jax import config as configs
from hisparse_jax import throughput
from hisparse_jax.cache.state import begin_step, create, entering
from hisparse_jax.decode import decode_step
from hisparse_jax.errors import UserError
from hisparse_jax.policies import replay
from hisparse_jax.selection import QuestRule, quest_index, select_pages
from hisparse_jax.synthetic import random_index, state_of
from hisparse_jax.throughput import Point, Share
from hisparse_jax.workload import FITTED, synthetic_scores
from models import sizes
from models.config import GqaConfig
from pallas_kernels.index_topk import index_topk
from tests.helpers import int32, layout, same_bits
from tests.pallas_kernels.kernel_cases import lower_for_cuda

SMALL = GqaConfig(
    vocab=64, hidden=32, layers=4, query_heads=4, kv_heads=2, head_dim=16, mlp_width=48, rope_theta=1e6,
    rope_pairing="halves", norm_eps=1e-6, max_tokens=4096, qk_norm=True,
)  # fmt: skip
PAGE, RECENT = 16, 2
# The last page of a request is never whole; the others are more than the hot slots.
CONTEXT, PAGES, BUDGET, HOT, RING = 1021, 64, 6, 12, 4
SETTINGS = (
    "model.published=small", f"selection.budget_pages={BUDGET}", f"cache.hot_slots={HOT}", f"cache.ring_slots={RING}",
    "cache.page_records=4", "synthetic.first_layer=1", "synthetic.layers=2", f"synthetic.contexts=[{CONTEXT}]",
    "synthetic.concurrency=[1, 3]", "synthetic.warmup_steps=16", "synthetic.steps=16", "synthetic.repeats=2",
    "synthetic.cold_concurrency=[3]", "decode.steps=8",
)  # fmt: skip
DOCS = Path(hisparse_jax.__file__).parents[1] / "docs/workload.md"


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(sizes.PUBLISHED, "small", SMALL)


def load(*more: str) -> configs.Config:
    return configs.load("qwen3_quest", [*SETTINGS, *more])


@functools.partial(jax.jit, static_argnames=("tables", "requests", "steps", "pages", "budget", "workload", "clocked"))
def trace(tables, requests, steps, pages, budget, first, workload=FITTED, clocked=True):
    """Selected pages `[steps, tables * requests, budget]` and lengths, one token a step from `first` tokens on."""

    def step(tokens, _):
        length = jnp.full(requests, -(-tokens // PAGE))
        clock = jnp.full(requests, tokens) if clocked else None
        zeros = jnp.zeros((requests, pages))
        scores = jax.vmap(lambda table: synthetic_scores(zeros, length, table, workload, clock=clock))(
            jnp.arange(tables)
        )
        lengths = jnp.tile(length, tables)
        return tokens + 1, (index_topk(scores.reshape(-1, pages), lengths, budget, newest=RECENT), lengths)

    return jax.lax.scan(step, first, length=steps)[1]


def test_a_run(tmp_path):
    """Full and sync emit the same tokens, no_io misses what sync does: what the process followed by hand does."""
    folder = throughput.run(load(f"runs={tmp_path}"), Console(quiet=True))
    result = json.loads((folder / "result.json").read_text())
    assert result["simulated"] == "layers 1 to 2 of 4 of small, one rank of 1" and "synthetic" in result["label"]
    assert all(entry["same_tokens"] for entry in result["summary"] if "requests" in entry)
    points = {(p["requests"], p["mode"]): p for p in result["points"]}
    assert len(points) == 6 and not any("error" in point for point in points.values())
    share = Share(load())
    assert share.workload == replace(FITTED, first_table=1)
    for requests in (1, 3):
        full, sync, no_io = (points[requests, mode] for mode in ("full", "sync", "no_io"))
        assert full["tokens"] == sync["tokens"] and full["miss_rate"] == 0
        before = 1 + 16 if requests == 3 else 16  # the first on its own, where it is timed
        begin = int32(CONTEXT - share.steps + 1)
        selected, length = trace(2, requests, before + 32, PAGES, BUDGET, begin, share.workload)
        missed = np.asarray(replay(selected, length, hot_slots=HOT, ring_slots=RING))[..., 2]
        want = missed[before:].reshape(32, 2, requests).mean(axis=(0, 2)).tolist()
        assert sync["misses_per_table_and_request"] == no_io["misses_per_table_and_request"] == pytest.approx(want)
        assert min(want) > 0
        assert sync["fetched_bytes_per_step"] == pytest.approx(sum(want) * requests * PAGE * 128)
        assert full["fetched_bytes_per_step"] == no_io["fetched_bytes_per_step"] == 0
        beside = share.layout(Point(CONTEXT, requests, "full")).device_bytes()
        beside = sum(size for name, size in beside.items() if "rows" not in name) // requests
        assert full["request_bytes"] == 2 * PAGES * (PAGE + 1) * 128 + beside  # rows and bounds of two layers
    assert all(misses >= BUDGET - RING for misses in points[3, "sync"]["first_step_misses"]), "only the ring is there"


def test_a_profile(tmp_path):
    small = load(f"runs={tmp_path}", "synthetic.modes=[sync]", "synthetic.concurrency=[3]", "synthetic.layers=1")
    folder = throughput.run(small, Console(quiet=True), profile=True)
    (point,) = json.loads((folder / "result.json").read_text())["points"]
    assert sum(point["stage_us"].values()) > 0
    assert point["outside_kernels"] == pytest.approx(1 - sum(point["stage_us"].values()) / 1e3 / point["step_ms"])
    assert {"index_scores", "resolve", "attention", "mlp"} <= set(point["stage_us"])
    assert point["idle_share"] is None or 0 <= point["idle_share"] < 1  # None on a CPU
    for trace in ("stages", "graphs"):
        assert any((folder / f"profile/{CONTEXT}_tokens_3_requests_sync/{trace}").rglob("*.xplane.pb"))


def test_the_layout_counts_pages():
    share = Share(configs.load("qwen3_quest"))
    found = share.layout(Point(32768, 4, "sync"))
    assert (found.record_tokens, found.row_bytes, found.records) == (16, 16 * 2 * 8 * 128 * 2, 2048)
    assert (found.selected, found.hot_slots, found.ring_slots) == (128, 256, 4)
    assert found.pages_per_request == 128 and found.host_pages == 128 * max(
        share.setting.concurrency
    )  # for the most of any point
    assert found.group_sizes == (1,) * 8
    full = share.request_bytes(Point(32768, 4, "full"))
    assert full == pytest.approx(8 * 2048 * (65536 + 4096), rel=1e-4)  # rows and two bounds
    rule = share.cache_budget()
    assert rule["rank_weight_bytes_of_the_whole_model"] == 2 * 8_190_735_360
    assert (rule["simulated_layers"], rule["all_layers"]) == (8, 36)


def test_hot_slots_never_exceed_the_history():
    share = Share(load("cache.hot_slots=500"))
    assert share.layout(Point(1021, 1, "sync")).hot_slots == 64
    share = Share(load("cache.hot_slots=500", "selection.budget_pages=20"))
    assert share.layout(Point(157, 1, "sync")).hot_slots == 20  # 10 pages, but a selection is as wide as ever


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["selection.rule=per_query_head"], "selection.rule: synthetic pages are the same for all heads; give shared"),
        (["selection={kind: dsa}"], "selection.kind: dsa is for models with an indexer of their own; expected quest"),
        (["model.index_keys=fp8"], "model.index_keys: fp8 is a format of DSA families; small has page bounds"),
        (["synthetic.ranks=8"], "synthetic: a decoder over Quest pages is not divided; expected 1 rank, got 8"),
        (["synthetic.first_layer=3"], r"synthetic: layers 3\.\.4 are not all among the model's 4"),
        (["model.published=GLM-5.2", "synthetic.first_layer=6", "synthetic.ranks=8"],
         r"selection.kind: GLM-5.2 has an indexer of its own; expected dsa, got quest"),
        (["model.published=Qwen4"], "model.published: 'Qwen4' is not known; known: .*Qwen3-8B"),
    ],
)  # fmt: skip
def test_what_can_not_be_run(changes, says):
    with pytest.raises(UserError, match=says):
        Share(load(*changes))


def test_a_context_shorter_than_the_run():
    steps = Share(load()).steps
    assert steps == 1 + 16 + 2 * 16 + 2 * 8
    with pytest.raises(UserError, match=r"synthetic\.contexts: 65 tokens are no more than the 65 of all steps"):
        Share(load()).layout(Point(steps, 1, "full"))
    Share(load()).layout(Point(steps + 1, 1, "full"))


LAYOUT = layout(request_slots=3, context_tokens=80 * PAGE, record_tokens=PAGE, group_sizes=(1, 1), host_pages=60)


@functools.partial(jax.jit, static_argnames=("workload", "budget"))
def select(tokens, query, layer, workload=FITTED, budget=10):
    index = random_index_of(LAYOUT)
    cache = begin_step(create(LAYOUT, index).replace(tokens=tokens - 1), tokens > 0)
    return select_pages(index, cache, layer, query, QuestRule("shared", budget, RECENT, PAGE), "xla", workload).ids


def random_index_of(sizes_):
    return jax.tree.map(lambda x: x + 1, quest_index(sizes_, 2, 2, 8, jnp.float32))


def test_the_process_chooses_pages_and_the_newest_stay():
    """Whatever the query; for every layer and in every step others, though the number of pages is the same."""
    tokens = int32([80 * PAGE, 79 * PAGE - 9, 0])
    query = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 2, 8)), jnp.float32)
    got = np.asarray(select(tokens, query, jnp.int32(1)))
    same_bits(select(tokens, 5 - query, jnp.int32(1)), got)
    scores = synthetic_scores(jnp.zeros((3, 80)), int32([80, 79, 0]), 1, FITTED, clock=tokens)
    for row, pages in ((0, 80), (1, 79)):
        best = np.argsort(-np.asarray(scores[row, : pages - RECENT]), kind="stable")[: 10 - RECENT]
        assert got[row].tolist() == sorted([*best.tolist(), pages - 2, pages - 1])
    assert (got[2] == -1).all()
    assert not np.array_equal(select(tokens, query, jnp.int32(0))[0], got[0])
    later = [np.asarray(select(tokens - step, query, jnp.int32(1)))[0] for step in range(1, 6)]
    assert all((page != got[0]).any() for page in later), "pages change within a page"
    alone = np.asarray(select(tokens, query, jnp.int32(1), None))
    assert alone[0].tolist() != got[0].tolist()


def test_scores_that_are_not_numbers_stay():
    """So the bounds are scored: a query of NaN leaves nothing that the process could choose among."""
    tokens, query = int32([80 * PAGE] * 3), jnp.full((3, 2, 2, 8), jnp.nan)
    real = select(tokens, query, jnp.int32(0), None)
    same_bits(select(tokens, query, jnp.int32(0)), real)


def test_heads_of_their_own_have_no_process():
    index = random_index_of(LAYOUT)
    cache = begin_step(create(LAYOUT, index), jnp.ones(3, bool))
    with pytest.raises(ValueError, match="a synthetic workload takes the rule 'shared', got 'per_query_head'"):
        rule = QuestRule("per_query_head", 10, RECENT, PAGE)
        select_pages(index, cache, 0, jnp.zeros((3, 2, 2, 8)), rule, "xla", FITTED)


def test_misses_of_pages_are_those_of_the_docs():
    """K, H and W of the preset, 21 tables; hot slots as in the fit."""
    first = 32768 - 470
    selected, length = trace(21, 1, 470, 2048, 128, int32(first))
    rates = []
    for hot_slots in (128, 256, 512):
        missed = np.asarray(replay(selected, length, hot_slots=hot_slots, ring_slots=4))[150:, :, 2]
        rates.append(100 * missed.mean() / 128)
    assert f"| 2,048 (32,768) | {' | '.join(f'{rate:.1f}' for rate in rates)} |" in DOCS.read_text()
    np.testing.assert_allclose(rates, [30.0, 13.4, 6.7], atol=1.0)  # of the trace, K = 2048 tokens
    selected, length = trace(21, 1, 470, 2048, 128, int32(first), clocked=False)
    assert np.asarray(replay(selected, length, hot_slots=256, ring_slots=4))[150:, :, 2].mean() < 0.01 * 128


@pytest.mark.parametrize("mode", ["full", "sync", "no_io"])
def test_a_decode_step_of_the_preset_lowers_for_cuda(mode):
    """A layer at its true width: every stage has its kernel, none falls back."""
    share = Share(configs.load("qwen3_quest", ["synthetic.layers=1"]))
    model, found = share.models[mode], share.layout(Point(32768, 8, mode))
    params = jax.tree.leaves(jax.eval_shape(share.parameters))

    def initial():
        pool = jnp.zeros((found.pool_rows, found.words), jnp.uint32)
        return state_of(found, create(found, random_index(model.new_index(found)), pool), share.shape.vocab, 1)

    def step(params, state):
        return decode_step(model, params, replace(state, cache=entering(state.cache)), draws=False)

    text = lower_for_cuda(step, params, jax.eval_shape(initial))
    kernels = {"full": 3, "sync": 5, "no_io": 4}  # scores, top-k, attention; resolve; backup
    assert text.count("@mosaic_gpu_v2") == kernels[mode]
