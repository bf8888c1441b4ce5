# SPDX-License-Identifier: Apache-2.0
"""Placement changes nothing: `hisparse` gives the bits of `full`, and the pool stays where it is.

A tiny random decoder with Quest selection decodes ragged batches in both residencies: the same prefill, slots, steps
and compiler, as the contract defines the comparison. Equal means every bit of every logit.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hisparse_jax.cache.admission import admit, release
from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.state import create, entering, placements
from hisparse_jax.decode import DecodeState, Steps, compile_decode, place
from hisparse_jax.sampling import greedy
from hisparse_jax.selection import QuestRule
from models.config import GqaConfig
from models.decoder import QuestDecoder
from models.functional import Functional
from tests.helpers import PLATFORMS, int32, same_bits

REQUESTS, CONTEXT, PAGE, CHUNK, STEPS = 3, 96, 4, 32, 8
CONFIG = GqaConfig(
    vocab=64, hidden=32, layers=2, query_heads=4, kv_heads=2, head_dim=8, mlp_width=48, rope_theta=1e4,
    rope_pairing="halves", norm_eps=1e-6, max_tokens=CONTEXT, tied_head=True, qk_norm=True,
)  # fmt: skip
SHARED = QuestRule("shared", budget_pages=5, recent_pages=2, page_tokens=PAGE)
PER_HEAD = QuestRule("per_query_head", budget_pages=3, recent_pages=1, page_tokens=PAGE)


@functools.cache
def model(rule: QuestRule, dtype) -> tuple[Functional, list[jax.Array]]:
    module = QuestDecoder(CONFIG, rule, dtype=dtype, rngs=nnx.Rngs(0), implementation="xla")
    return Functional(module), Functional.parameters(module)


def sizes(residency: str, rule: QuestRule, dtype, hot_slots: int = 0, ring_slots: int = 2, **changes) -> Layout:
    decoder, _ = model(rule, dtype)
    given = {"page_records": 3, "host_pages": 8 * REQUESTS} | changes
    return Layout(
        residency=residency, request_slots=REQUESTS, context_tokens=CONTEXT, hot_slots=hot_slots,
        ring_slots=ring_slots, **given, **decoder.records(CONTEXT)._asdict(),
    )  # fmt: skip


@functools.cache
def prefilled(rule: QuestRule, dtype, length: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """What a random prompt leaves behind, and its first token: one program whatever the residency."""
    decoder, params = model(rule, dtype)
    prompt = np.random.default_rng(seed).integers(0, CONFIG.vocab, length)
    prompt = int32(np.pad(prompt, (0, -length % CHUNK)))
    scratch = decoder.new_scratch(sizes("full", rule, dtype), CHUNK)
    for start in range(0, len(prompt), CHUNK):
        hidden, scratch = prefill(rule, dtype)(params, prompt[start : start + CHUNK], jnp.int32(start), scratch)
    logits = decoder.logits(params, hidden[(length - 1) % CHUNK])
    return scratch, jnp.argmax(logits).astype(jnp.int32)


@functools.cache
def prefill(rule: QuestRule, dtype):
    return jax.jit(model(rule, dtype)[0].prefill)


class Runner:
    """One layout's admission and decode loop, compiled once and used by many batches."""

    def __init__(self, layout: Layout, rule: QuestRule, dtype):
        self.layout, self.rule, self.dtype = layout, rule, dtype
        self.decoder, self.params = model(rule, dtype)
        state = self.empty()
        where = placements(state.cache)

        def commit(cache, slot, pages, tokens, scratch):
            cache = entering(cache)
            index = self.decoder.index_of(scratch, tokens, layout)
            rows = functools.partial(self.decoder.rows, scratch, layout=layout)
            return admit(cache, slot, pages, tokens, rows, index, "xla")

        self.commit = jax.jit(commit, out_shardings=where)
        self.decode = compile_decode(
            self.decoder, state, steps=STEPS, keep_logits=True, draws=False, implementation="xla"
        )

    def empty(self) -> DecodeState:
        nobody = jnp.zeros(REQUESTS, jnp.int32)
        cache = create(self.layout, self.decoder.new_index(self.layout))
        return place(DecodeState(cache, nobody, nobody, greedy(REQUESTS, CONFIG.vocab)))

    def admit(self, state: DecodeState, slot: int, pages, length: int, count: int, seed: int) -> DecodeState:
        """A random prompt of this length into a slot, to decode so many tokens."""
        scratch, token = prefilled(self.rule, self.dtype, length, seed)
        pages = int32(pages[: state.cache.page_table.shape[1]])
        cache = self.commit(state.cache, jnp.int32(slot), pages, jnp.int32(length), scratch)
        return place(
            replace(
                state,
                cache=cache,
                token=state.token.at[slot].set(token),
                remaining=state.remaining.at[slot].set(count),
            )
        )

    def pages(self, seed: int) -> np.ndarray:
        """Host pages of each slot, in random order."""
        each = self.layout.pages_per_request
        pages = np.random.default_rng(seed).permutation(self.layout.host_pages)[: REQUESTS * each]
        return pages.reshape(REQUESTS, each)

    def admitted(self, lengths, new_tokens, slots, seed: int) -> DecodeState:
        state, pages = self.empty(), self.pages(seed)
        for number, (length, count, slot) in enumerate(zip(lengths, new_tokens, slots, strict=True)):
            state = self.admit(state, slot, pages[slot], length, count, seed + number)
        return state

    def run(self, lengths, new_tokens, slots, seed: int) -> tuple[DecodeState, Steps]:
        state, outs = self.admitted(lengths, new_tokens, slots, seed), []
        for _ in range(-(-max(new_tokens) // STEPS)):
            state, out = self.decode(self.params, state)
            outs.append(out)
        return state, jax.tree.map(lambda *parts: np.concatenate([np.asarray(part) for part in parts]), *outs)


@functools.cache
def runner(residency: str, rule: QuestRule, dtype, hot_slots: int = 0, ring_slots: int = 2) -> Runner:
    return Runner(sizes(residency, rule, dtype, hot_slots, ring_slots), rule, dtype)


def compare(full: Runner, sparse: Runner, lengths, new_tokens, slots, seed: int) -> np.ndarray:
    """Decodes a batch both ways, asserts equal bits, and gives back the counters of `hisparse`, summed over steps."""
    (full_state, want), (state, got) = (one.run(lengths, new_tokens, slots, seed) for one in (full, sparse))
    same_bits(got.token, want.token)
    took_part = want.token >= 0
    assert took_part.sum() == sum(new_tokens)
    assert np.isfinite(want.logits[took_part]).all()
    same_bits(got.logits[took_part], want.logits[took_part])
    same_bits(state.cache.tokens, full_state.cache.tokens)
    for ours, theirs in zip(jax.tree.leaves(state.cache.index), jax.tree.leaves(full_state.cache.index), strict=True):
        same_bits(ours, theirs)
    np.testing.assert_array_equal(got.counters[..., 0] + got.counters[..., 2], want.counters[..., 0])
    assert not want.counters[..., 1:].any()
    return got.counters.sum(axis=(0, 1))


def random_batch(rng: np.random.Generator):
    """Lengths from one token to nearly the whole context, tokens to decode, and which slot each request gets."""
    new_tokens = rng.integers(1, 25, REQUESTS)
    lengths = [int(rng.integers(1, CONTEXT - count + 1)) for count in new_tokens]
    return lengths, new_tokens.tolist(), rng.permutation(REQUESTS).tolist()


@pytest.mark.parametrize(("hot_slots", "ring_slots"), [(5, 2), (6, 3), (9, 2), (24, 2)])
def test_random_lengths_and_slots(hot_slots, ring_slots):
    """H from K itself to a whole context, which never misses."""
    full = runner("full", SHARED, jnp.float32)
    sparse = runner("hisparse", SHARED, jnp.float32, hot_slots, ring_slots)
    rng, counters = np.random.default_rng(hot_slots), 0
    for seed in range(4):
        counters += compare(full, sparse, *random_batch(rng), 100 * seed)
    assert (counters[:, 2] > 0).all() == (hot_slots < 24)
    assert (counters[:, 1] > 0).all() == (hot_slots < 24)


@pytest.mark.parametrize(("rule", "dtype"), [(PER_HEAD, jnp.bfloat16)])
def test_per_query_head_rule_in_bfloat16(rule, dtype):
    full, sparse = runner("full", rule, dtype), runner("hisparse", rule, dtype, 12)
    rng, counters = np.random.default_rng(1), 0
    for seed in range(3):
        counters += compare(full, sparse, *random_batch(rng), 100 * seed)
    assert counters[:, 2].sum() > 0


HOT, RING = 6, 3


@pytest.mark.parametrize(
    "lengths",
    [
        # The last token of page H - 1, the step that opens page H, and one page further.
        [HOT * PAGE - 1, HOT * PAGE, HOT * PAGE + 1],
        # Admitted exactly full, one token into the ring, and with the ring's first page complete.
        [HOT * PAGE, (HOT + 1) * PAGE - 1, (HOT + 1) * PAGE],
        # The ring about to wrap, wrapping, and wrapped.
        [(HOT + RING) * PAGE - 1, (HOT + RING) * PAGE, (HOT + RING) * PAGE + 1],
        [1, PAGE, PAGE + 1],
    ],
)
def test_boundaries(lengths):
    """Decoded far enough for every request to cross H, leave the ring's first slot and wrap it."""
    full, sparse = runner("full", SHARED, jnp.float32), runner("hisparse", SHARED, jnp.float32, HOT, RING)
    counters = compare(full, sparse, lengths, [32, 31, 30], [2, 0, 1], seed=7)
    if min(lengths) > PAGE + 1:
        assert (counters[:, 1] > 0).all(), "every request has read the ring"


def test_a_neighbour_that_ends_early_changes_nothing():
    """A slot that has nothing to do and one that stops in the middle of a chunk."""
    full, sparse = runner("full", SHARED, jnp.float32), runner("hisparse", SHARED, jnp.float32, HOT, RING)
    compare(full, sparse, [60, 40, 50], [24, 3, 0], [1, 2, 0], seed=9)


def test_a_slot_and_pages_used_again():
    """A request ends, another takes its slot and the pages of both are mixed anew: still the bits of `full`."""
    logits = []
    for residency in ("full", "hisparse"):
        one = runner(residency, SHARED, jnp.float32, *((HOT, RING) if residency == "hisparse" else ()))
        state = one.admitted([70, 40, 50], [STEPS, 3 * STEPS, STEPS], [0, 1, 2], seed=13)
        state, _ = one.decode(one.params, state)
        for slot in (0, 2):
            state = place(replace(state, cache=release(state.cache, jnp.int32(slot))))
        freed = one.pages(13)[[0, 2]]
        for slot, length, pages in (
            (2, 33, freed.T.ravel()[: freed.shape[1]]),
            (0, 80, freed.T.ravel()[freed.shape[1] :]),
        ):
            state = one.admit(state, slot, pages, length, STEPS, 20 + slot)
        state, out = one.decode(one.params, state)
        assert (np.asarray(out.token) >= 0).all()
        logits.append(out.logits)
        if residency == "hisparse":
            assert (np.asarray(out.counters)[..., 2].sum((0, 1)) > 0).all()
    same_bits(logits[1], logits[0])


def test_compiled_once_while_lengths_grow():
    """The model is traced once and the loop compiled once, for chunks before and after H and H + W."""
    sparse = Runner(sizes("hisparse", SHARED, jnp.float32, HOT, RING), SHARED, jnp.float32)

    class Once:
        decode = staticmethod(chex.assert_max_traces(sparse.decoder.decode, n=1))

    state = sparse.admitted([HOT * PAGE - 3, 2, 60], [30, 30, 30], [0, 1, 2], seed=3)
    decode = compile_decode(Once, state, steps=2, implementation="xla")
    for _ in range(15):
        state, _ = decode(sparse.params, state)
    assert np.asarray(state.cache.length).tolist() == [13, 8, 23]
    assert decode._cache_size() == 1


# The pool -----------------------------------------------------------------------------------------------------------


@functools.cache
def with_a_large_pool() -> Runner:
    """Host pages for far more than anything else here is large: a copy of the pool can't hide."""
    layout = sizes("hisparse", SHARED, jnp.float32, HOT, RING, host_pages=4096)
    assert layout.host_bytes() > 8 * sum(layout.device_bytes().values())
    return Runner(layout, SHARED, jnp.float32)


BATCH = [60, 30, 24], [20, 20, 20], [0, 1, 2]


def test_the_pool_stays_in_pinned_host_memory_and_is_never_copied():
    one = with_a_large_pool()
    state, layout = one.admitted(*BATCH, seed=5), one.layout
    built = one.decode.lower(one.params, state).compile()

    memory = built.memory_analysis()
    assert memory.temp_size_in_bytes + memory.host_temp_size_in_bytes < layout.host_bytes() // 8
    aliased = memory.alias_size_in_bytes + memory.host_alias_size_in_bytes
    assert aliased >= layout.host_bytes(), "donated, and given back in place"
    # Everything that has the shape of the pool is the pool, or the scatter that backup writes it with.
    made = re.findall(rf"= u32\[{layout.pool_rows},{layout.words}\]\S* ([\w-]+)\(", built.as_text())
    assert {"parameter", "scatter"} <= set(made) <= {"parameter", "get-tuple-element", "scatter", "fusion"}
    assert made.count("fusion") <= made.count("scatter") == 1

    pool = state.cache.pool
    address, before = pool.unsafe_buffer_pointer(), np.array(pool)
    for _ in range(2):
        state, _ = built(one.params, state)
        assert state.cache.pool.unsafe_buffer_pointer() == address
        assert state.cache.pool.sharding.memory_kind == "pinned_host"
    assert pool.is_deleted()
    changed = (np.asarray(state.cache.pool) != before).any(axis=1).sum()
    closed = sum((n + 2 * STEPS) // PAGE - n // PAGE for n in BATCH[0])
    assert changed == closed * layout.spaces, "the pages that closed, and no other row"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_whole_decode_step_lowers_anywhere(platform):
    one = with_a_large_pool()
    state = one.admitted(*BATCH, seed=5)
    text = one.decode.trace(one.params, state).lower(lowering_platforms=(platform,)).as_text()
    assert '_xla_compute_type = "host"' in text and '"pinned_host"' in text
    assert "mosaic" not in text.lower()


def test_no_io_moves_nothing_and_keeps_the_books():
    """Its first step selects what hisparse selects, so tables and counters agree; rows and pool do not move."""
    sparse = runner("hisparse", SHARED, jnp.float32, HOT, RING)
    idle = runner("no_io", SHARED, jnp.float32, HOT, RING)
    batch = [60, 40, 50], [1, 1, 1], [0, 1, 2]
    (want, want_out), (got, got_out) = (one.run(*batch, 11) for one in (sparse, idle))
    # Layer 0 alone: what it reads is wrong already, so later layers select other pages.
    same_bits(got_out.counters[0, 0], want_out.counters[0, 0])
    same_bits(got.cache.slot_ids[0], want.cache.slot_ids[0])
    same_bits(got.cache.recency[0], want.cache.recency[0])
    assert want_out.counters[0, 0, :, 2].min() > 0
    assert not np.asarray(got.cache.pool).any() and np.asarray(want.cache.pool).any()
