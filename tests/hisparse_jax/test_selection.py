# SPDX-License-Identifier: Apache-2.0
"""Quest selection against NumPy.

Keys and queries are small integers, so that every sum is exact in float32: the selections must be equal, ties included.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hisparse_jax.cache.state import begin_step, create
from hisparse_jax.selection import QuestIndex, QuestRule, append_key, page_bounds, quest_index, select_pages
from tests import oracles
from tests.helpers import PLATFORMS, int32, layout, lowered_for, padded, same_bits

PAGE, LAYERS, KV_HEADS, HEADS, CHANNELS = 4, 2, 2, 2, 8
SIZES = layout(request_slots=4, context_tokens=80, record_tokens=PAGE, group_sizes=(1,) * LAYERS, host_pages=20)


@functools.partial(jax.jit, static_argnames="rule")
def select(cache, layer, query, rule):
    return select_pages(cache.index, cache, layer, query, rule, "xla")


def at_tokens(tokens, index) -> object:
    """A cache whose step has begun, with this many tokens a request, the newest included; 0 for an inactive one."""
    tokens = np.asarray(tokens)
    cache = create(SIZES, index)
    cache = cache.replace(tokens=int32(np.maximum(tokens - 1, 0)))
    return begin_step(cache, jnp.asarray(tokens > 0))


def random_case(seed: int):
    """Bounds as integers, of keys or not, and integer queries."""
    rng = np.random.default_rng(seed)
    low = rng.integers(-4, 3, (LAYERS, SIZES.request_slots, SIZES.records, KV_HEADS, CHANNELS))
    high = low + rng.integers(0, 4, low.shape)
    query = rng.integers(-3, 4, (SIZES.request_slots, KV_HEADS, HEADS, CHANNELS))
    index = QuestIndex(jnp.asarray(low, jnp.float32), jnp.asarray(high, jnp.float32))
    return index, low, high, query


# One page, fewer pages than recent ones, all within the budget, one more, many; open and closed newest pages.
TOKENS = [[1, 4, 5, 8], [9, 12, 13, 16], [17, 20, 21, 24], [80, 79, 77, 76], [0, 33, 0, 80]]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("budget", "recent"), [(5, 2), (4, 3), (2, 1)])
def test_shared_rule(tokens, budget, recent):
    for seed in range(3):
        index, low, high, query = random_case(seed)
        layer = seed % LAYERS
        rule = QuestRule("shared", budget, recent, page_tokens=PAGE)
        got = select(at_tokens(tokens, index), jnp.int32(layer), jnp.asarray(query, jnp.float32), rule)
        assert got.head_mask is None
        for r, count in enumerate(tokens):
            pages = -(-count // PAGE)
            heads = query[r].reshape(KV_HEADS * HEADS, CHANNELS)
            scores = oracles.quest_rule_a_scores(heads, low[layer, r], high[layer, r])
            want = oracles.quest_pages(scores, pages, budget, recent)
            same_bits(got.ids[r], padded(want, budget))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("budget", [3, 7])
def test_per_query_head_rule(tokens, budget):
    """The ids are the union over heads, as wide as heads x budget or all pages; the mask gives each head its own."""
    for seed in range(3):
        index, low, high, query = random_case(seed)
        layer = seed % LAYERS
        rule = QuestRule("per_query_head", budget, 1, page_tokens=PAGE)
        got = select(at_tokens(tokens, index), jnp.int32(layer), jnp.asarray(query, jnp.float32), rule)
        width = min(KV_HEADS * HEADS * budget, SIZES.records)
        assert got.ids.shape == (SIZES.request_slots, width)
        for r, count in enumerate(tokens):
            pages = -(-count // PAGE)
            heads = query[r].reshape(KV_HEADS * HEADS, CHANNELS)
            want = oracles.quest_rule_b(heads, low[layer, r], high[layer, r], pages, budget)
            same_bits(got.ids[r], padded(set().union(*want), width))
            mask = np.asarray(got.head_mask[r]).reshape(KV_HEADS * HEADS, width)
            ids = np.asarray(got.ids[r])
            for head, chosen in enumerate(want):
                np.testing.assert_array_equal(ids[mask[head]], sorted(chosen))


def test_random_floats_differ_from_float64_only_at_a_tie():
    rng = np.random.default_rng(9)
    low = rng.standard_normal((LAYERS, SIZES.request_slots, SIZES.records, KV_HEADS, CHANNELS)).astype(np.float32)
    high = low + rng.random(low.shape, np.float32)
    query = rng.standard_normal((SIZES.request_slots, KV_HEADS, HEADS, CHANNELS)).astype(np.float32)
    cache = at_tokens([80] * 4, QuestIndex(jnp.asarray(low), jnp.asarray(high)))
    got = select(cache, jnp.int32(1), jnp.asarray(query), QuestRule("shared", 5, 2, page_tokens=PAGE))
    for r in range(SIZES.request_slots):
        scores = oracles.quest_rule_a_scores(query[r].reshape(-1, CHANNELS), low[1, r], high[1, r])
        border = np.sort(scores[:-2])[-4:-2]
        assert border[1] - border[0] > 1e-4, "the seed has a tie at the border: choose another"
        same_bits(got.ids[r], padded(oracles.quest_pages(scores, 20, 5, 2), 5))


def test_stale_bounds_of_pages_that_do_not_exist_are_never_chosen():
    index, *_, query = random_case(0)
    poison = jnp.arange(SIZES.records)[:, None, None] >= 6
    for bad in (jnp.nan, jnp.inf):
        poisoned = jax.tree.map(lambda x, bad=bad: jnp.where(poison[None, None], bad, x), index)
        for rule in (QuestRule("shared", 4, 1, PAGE), QuestRule("per_query_head", 4, 1, PAGE)):
            clean, got = (
                select(at_tokens([24, 23, 21, 5], i), jnp.int32(0), jnp.asarray(query, jnp.float32), rule)
                for i in (index, poisoned)
            )
            same_bits(got.ids, clean.ids)


@pytest.mark.parametrize("tokens", [0, 1, 4, 6, 19, 20])
def test_page_bounds(tokens):
    keys = np.random.default_rng(tokens).standard_normal((20, KV_HEADS, CHANNELS)).astype(np.float32)
    poisoned = keys.copy()
    poisoned[tokens:] = np.nan
    low, high = page_bounds(jnp.asarray(poisoned), jnp.int32(tokens), PAGE)
    for page in range(5):
        seen = keys[page * PAGE : min((page + 1) * PAGE, tokens)]
        empty = np.zeros((KV_HEADS, CHANNELS), np.float32)
        same_bits(low[page], seen.min(0) if len(seen) else empty)
        same_bits(high[page], seen.max(0) if len(seen) else empty)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bounds_grow_with_the_page_as_if_made_at_once(dtype):
    """Key by key from an index full of another request's leftovers; a request that takes no part keeps its own."""
    rng = np.random.default_rng(1)
    index = quest_index(SIZES, LAYERS, KV_HEADS, CHANNELS, dtype)
    index = jax.tree.map(lambda x: jnp.full_like(x, 77), index)
    cache = create(SIZES, index)
    keys = jnp.asarray(rng.standard_normal((11, SIZES.request_slots, KV_HEADS, CHANNELS)), dtype)

    @jax.jit
    def step(cache, active, key):
        cache = begin_step(cache, active)
        return cache.replace(index=append_key(cache.index, cache, 1, key))

    active = [rng.random(SIZES.request_slots) > 0.3 for _ in keys]
    for key, on in zip(keys, active, strict=True):
        cache = step(cache, jnp.asarray(on), key)
    same_bits(cache.index.key_min[0], np.full_like(index.key_min[0], 77))
    for r in range(SIZES.request_slots):
        own = np.asarray(keys)[[bool(on[r]) for on in active], r]
        pages = -(-len(own) // PAGE)
        assert int(cache.tokens[r]) == len(own)
        for page in range(SIZES.records):
            seen = own[page * PAGE : (page + 1) * PAGE]
            leftover = np.full((KV_HEADS, CHANNELS), 77, own.dtype)
            same_bits(cache.index.key_min[1, r, page], seen.min(0) if page < pages else leftover)
            same_bits(cache.index.key_max[1, r, page], seen.max(0) if page < pages else leftover)


@pytest.mark.parametrize(
    ("rule", "heads", "pages", "width"),
    [
        (QuestRule("shared", 32, 2), 9, 512, 32),
        (QuestRule("shared", 32, 2), 9, 8, 32),
        (QuestRule("per_query_head", 32, 1), 9, 512, 288),
        (QuestRule("per_query_head", 32, 1), 9, 100, 100),
    ],
)
def test_width(rule, heads, pages, width):
    assert rule.width(heads, pages) == width


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("rule", ["shared", "per_query_head"])
def test_lowers_anywhere(platform, rule):
    index, *_, query = random_case(0)
    cache = at_tokens([9, 8, 7, 6], index)
    cache = dataclasses.replace(cache, pool=jnp.zeros((1, 1), jnp.uint32))

    def run(cache, query):
        return select_pages(cache.index, cache, 0, query, QuestRule(rule, 4, 1, PAGE), "xla").ids

    assert "top_k" in lowered_for(run, platform, cache, jnp.asarray(query, jnp.float32))
