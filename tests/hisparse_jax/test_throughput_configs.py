# SPDX-License-Identifier: Apache-2.0
"""Presets that time shapes without followers: read, laid out and planned as published, run in small."""

from __future__ import annotations

import dataclasses
import json

import pytest
from rich.console import Console

from hisparse_jax import config as configs
from hisparse_jax import presets, simulated, throughput
from hisparse_jax.simulated import Point, Share, points
from models import sizes

PRESETS = ("dsv32_decode", "qwen3_quest")
SMALL = {
    "dsv32_decode": dict(
        vocab=64, hidden=32, heads=4, query_latent=16, latent=16, nope=8, rope=4, value=8, index_heads=4, index_dim=8,
        selected=16, mlp_width=32, expert_width=16, experts=16, experts_used=2, shared_experts=1, yarn=None,
    ),
    "qwen3_quest": dict(vocab=64, hidden=32, query_heads=4, kv_heads=2, head_dim=8, mlp_width=32),
}  # fmt: skip
SMALLER = (
    "synthetic.layers=2", "synthetic.contexts=[200]", "synthetic.concurrency=[2]", "synthetic.modes=[full, sync]",
    "synthetic.warmup_steps=8", "synthetic.steps=8", "synthetic.repeats=1", "cache.hot_slots=24", "cache.ring_slots=4",
    "cache.page_records=16",
)  # fmt: skip
PAGES = ("selection.page_tokens=4", "selection.budget_pages=16", "selection.recent_pages=2")


@pytest.mark.parametrize("name", PRESETS)
def test_as_published(name):
    """Every point has a layout; all of them together have no mode that is another's program."""
    config = configs.load(name)
    share, setting = Share(config), config.synthetic
    assert setting is not None and setting.modes == ("full", "sync", "no_io")
    assert share.shape.layers == 8 and set(share.shape.group_sizes) == {1}
    for context in setting.contexts:
        layouts = [share.layout(point) for point in points(setting, context)]
        assert len(layouts) == 3 * len(setting.concurrency)
        assert len({found.pool_rows for found in layouts if not found.is_full}) == 1
        assert layouts[0].host_bytes() == 0  # full
        assert max(found.host_bytes() for found in layouts) < 100e9, "what docs/throughput.md asks the allocator for"


@pytest.mark.parametrize(
    ("name", "context", "full", "hisparse"),
    [("dsv32_decode", 32768, 11, 53), ("dsv32_decode", 131072, 2, 21), ("qwen3_quest", 32768, 21, 121)],
)
def test_what_fits_by_the_rule(name, context, full, hisparse, monkeypatch):
    """On an H200, as the presets and docs/throughput.md say; the peak of either is among what a preset times."""
    monkeypatch.setattr(simulated, "device_bytes", lambda: 150_110_492_939)
    share = Share(configs.load(name))
    budget = share.cache_budget()["cache_bytes"]
    fit = {mode: budget // share.request_bytes(Point(context, 8, mode)) for mode in ("full", "sync")}
    assert fit == {"full": full, "sync": hisparse}
    assert full in share.setting.concurrency


def test_deepseeks_layers():
    share = Share(configs.load("dsv32_decode")).shape
    assert share.dense == (False,) * 8 and share.experts == 32, "no dense layer, one rank of eight"


@pytest.mark.parametrize("name", PRESETS)
def test_plans_take_all_layers(name):
    planned = presets.plan_config(configs.load(name), context_tokens=32768)
    layers = {"dsv32_decode": 61, "qwen3_quest": 36}[name]
    assert planned.sizes.group_sizes == (1,) * layers and planned.recommended_hot_slots is not None


def test_plan_of_qwen3():
    """Bytes of all layers by hand: rows of 16 keys and values of 8 heads of 128 bfloat16 numbers, and two bounds."""
    found = presets.plan_config(configs.load("qwen3_quest"), context_tokens=32768)
    row, pages = 16 * 2 * 8 * 128 * 2, 2048
    assert found.full.device["rows"] == 36 * pages * row
    assert found.full.device["index keys"] == found.hisparse.device["index keys"] == 36 * pages * 2 * 8 * 128 * 2
    assert found.hisparse.device["hot rows"] == 36 * 256 * row and found.hisparse.host == 36 * pages * row
    assert found.sizes.parameter_bytes == 2 * 8_190_735_360 and found.sizes.selected == 128
    assert found.scratch_bytes == 36 * 32768 * 2 * 8 * 128 * 2, "bounds are made at admission"
    whole = presets.plan_config(configs.load("qwen3_quest"))
    assert whole.full.device["rows"] == 36 * 40960 // 16 * row


@pytest.mark.parametrize("name", PRESETS)
def test_in_small_both_residencies_emit_the_same_tokens(name, tmp_path, monkeypatch):
    shape = sizes.PUBLISHED[str(configs.load(name).model.published)]
    monkeypatch.setitem(sizes.PUBLISHED, "small", dataclasses.replace(shape, **SMALL[name]))
    more = PAGES if name == "qwen3_quest" else ()
    config = configs.load(name, ["model.published=small", f"runs={tmp_path}", *SMALLER, *more])
    result = json.loads((throughput.run(config, Console(quiet=True)) / "result.json").read_text())
    full, sync = result["points"]
    assert full["tokens"] == sync["tokens"] and full["miss_rate"] == 0 < sync["miss_rate"]
    assert sync["fetched_bytes_per_step"] > 0
