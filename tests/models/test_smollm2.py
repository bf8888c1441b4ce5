# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct, the real model, against a NumPy float32 forward pass of the same file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.state import Cache
from hisparse_jax.checkpoint.gguf import GgufFile
from hisparse_jax.engine.engine import Engine
from hisparse_jax.engine.requests import Request
from hisparse_jax.selection import QuestRule, Selection, select_pages
from hisparse_jax.tokenizer import Tokenizer, from_gguf
from models.gguf_models import open_gguf, read_config
from models.opened import Opened

LOGITS_LIMIT = 2e-3  # stated with the reference: two float32 programs that sum in another order


@pytest.fixture(scope="module")
def file(smollm2_file: Path) -> GgufFile:
    return GgufFile(smollm2_file)


@pytest.fixture(scope="module")
def tokenizer(file: GgufFile) -> Tokenizer:
    return from_gguf(file)


@pytest.fixture(scope="module")
def params(file: GgufFile) -> list:
    return open_gguf(file, QuestRule("shared", 16, 1)).load()


def test_shape(file: GgufFile) -> None:
    config = read_config(file)
    assert (config.layers, config.hidden, config.query_heads, config.kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.mlp_width, config.vocab, config.max_tokens, config.rope_theta) == (1536, 49152, 8192, 1e5)
    assert config.rope_pairing == "pairs" and config.tied_head


def test_tokenizer(tokenizer: Tokenizer, data: Path) -> None:
    cases = json.loads((data / "smollm2/tokenizer.json").read_text())
    assert set(cases) == {"chat", "numbers", "code"}
    for case in cases.values():
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"], keep_control=True) == case["text"]
    assert tokenizer.decode(cases["chat"]["ids"]) == "user\nWhat is the capital of France?\nassistant\n"
    assert tokenizer.stop_tokens == (tokenizer.encode("<|im_end|>")[0],)


def decode(opened: Opened, params: list, case: dict, residency: str, **sizes: int) -> Engine:
    prompt, new = tuple(case["input_ids"].tolist()), len(case["generated_ids"])
    context = -(-(len(prompt) + new) // 256) * 256
    records = opened.model.records(context)
    layout = Layout(
        residency=residency, request_slots=1, context_tokens=context, page_records=16,
        host_pages=-(-context // 256), **records._asdict(), **sizes,
    )  # fmt: skip
    engine = Engine(
        opened.model, params, layout, vocab=opened.config.vocab, steps=8, prefill_chunk=256, keep_logits=True
    )
    engine.submit(Request(prompt, new))
    engine.run()
    return engine


def check_logits(engine: Engine, case: dict) -> None:
    [done] = engine.completions
    assert done.tokens == case["generated_ids"].tolist()
    for ours, ids, want, total in zip(done.logits, case["top_ids"], case["top_logits"], case["logsumexp"], strict=True):
        assert np.abs(ours[ids] - want).max() < LOGITS_LIMIT
        assert abs(np.logaddexp.reduce(ours.astype(np.float64)) - total) < LOGITS_LIMIT


@pytest.mark.parametrize("name", ["chat", "dense_600"])
def test_dense(file: GgufFile, params: list, data: Path, name: str) -> None:
    """With a budget of all pages Quest is dense attention; few enough hot slots are all there is."""
    case = dict(np.load(data / f"smollm2/{name}.npz"))
    opened = open_gguf(file, QuestRule("shared", 48, 1))
    check_logits(decode(opened, params, case, "hisparse", hot_slots=48, ring_slots=1), case)


@pytest.mark.parametrize("name", ["quest_1500", "quest_3000"])
def test_quest(file: GgufFile, params: list, data: Path, name: str) -> None:
    """Tokens, logits, pages, and both residencies to the last bit, with few hot slots so that pages are missed."""
    case = dict(np.load(data / f"smollm2/{name}.npz"))
    rule = QuestRule("shared", int(case["budget_pages"]), int(case["recent_pages"]))
    opened = open_gguf(file, rule)
    hot = {"hot_slots": rule.budget_pages + 4, "ring_slots": rule.recent_pages}
    with recorded_selections() as selections:
        engine = decode(opened, params, case, "hisparse", **hot)
    check_logits(engine, case)
    assert (engine.metrics.misses_by_table() > 0).all()

    length = len(case["input_ids"]) + 1
    different = [
        (step, layer)
        for step, layers in enumerate(case["selected_pages"])
        for layer, pages in enumerate(layers)
        if not np.array_equal(selections[length + step, layer], pages)
    ]
    assert not different

    full = decode(opened, params, case, "full", **hot)
    for a, b in zip(engine.completions[0].logits, full.completions[0].logits, strict=True):
        assert a.tobytes() == b.tobytes()


@contextlib.contextmanager
def recorded_selections() -> Generator[dict[tuple[int, int], np.ndarray]]:
    """The ids of every selection made by one request while the block runs, by length and layer."""
    seen: dict[tuple[int, int], np.ndarray] = {}

    def keep(tokens: np.ndarray, layer: np.ndarray, ids: np.ndarray) -> None:
        seen[int(tokens[0]), int(layer)] = np.asarray(ids[0])

    def record(index: object, cache: Cache, layer: object, *rest: object) -> Selection:
        selection = select_pages(index, cache, layer, *rest)
        jax.debug.callback(keep, cache.tokens, layer, selection.ids)
        return selection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.gqa.select_pages", record)
        yield seen


def test_bfloat16_runs_and_is_close(file: GgufFile, data: Path) -> None:
    """The same text for a short prompt, and logits as close as rounding lets them be.

    Two additions and four inputs of products a layer each round, by up to 2^-9 of what they hold, so with a deviation
    of 2^-9 / sqrt(3). Errors that don't depend on each other add up to sqrt(6 layers) times that, 1.5 % for 30 layers;
    three deviations are hardly ever passed. How much is seen depends on how a processor multiplies bfloat16 numbers.
    """
    case = dict(np.load(data / "smollm2/chat.npz"))
    opened = open_gguf(file, QuestRule("shared", 16, 1), jnp.bfloat16)
    engine = decode(opened, opened.load(), case, "hisparse", hot_slots=16, ring_slots=1)
    assert engine.completions[0].tokens[:6] == case["generated_ids"].tolist()[:6]
    want = case["top_logits"][0]
    difference = np.abs(engine.completions[0].logits[0][case["top_ids"][0]] - want).max()
    assert difference < 3 * np.sqrt(6 * opened.config.layers / 3) * 2.0**-9 * np.abs(want).max()
