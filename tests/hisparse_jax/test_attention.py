# SPDX-License-Identifier: Apache-2.0
"""From tokens to attention at the level of the state: append, select, resolve, attend, against float64.

Keys and values are known in full, so the float64 reference attends over the history itself, page by page; the cache
has it in slots, ring and pool. Page bounds come from keys that are small integers, so that selections are exact.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hisparse_jax.attention import attend_pages, visible_tokens
from hisparse_jax.cache.admission import admit
from hisparse_jax.cache.append import append
from hisparse_jax.cache.backup import end_step
from hisparse_jax.cache.layout import Address
from hisparse_jax.cache.state import begin_step, create, entering
from hisparse_jax.resolve import resolve
from hisparse_jax.selection import QuestIndex, QuestRule, append_key, page_bounds, quest_index, select_pages
from tests import oracles
from tests.helpers import NAN_WORD, int32, layout, padded, same_bits, to_words

PAGE, KV_HEADS, HEADS, CHANNELS, CONTEXT, REQUESTS = 4, 2, 2, 8, 80, 3
RULES = {"shared": QuestRule("shared", 4, 2, PAGE), "per_query_head": QuestRule("per_query_head", 2, 1, PAGE)}
SCALE = CHANNELS**-0.5
LAYER = Address(space=0, table=0, position=0, group=0)


def sizes(residency: str, rule: QuestRule):
    selected = rule.width(KV_HEADS * HEADS, CONTEXT // PAGE)
    return layout(
        residency=residency, context_tokens=CONTEXT, record_tokens=PAGE, group_sizes=(1,), selected=selected,
        row_bytes=PAGE * 2 * KV_HEADS * CHANNELS * 4, hot_slots=selected + 1, host_pages=16,
    )  # fmt: skip


def layer(cache, address, key, value, query, rule):
    """One layer of a step that has begun: the cache, and what the query attends to."""
    token = jax.lax.bitcast_convert_type(jnp.stack([key, value], axis=1).reshape(len(key), -1), jnp.uint32)
    cache = append(cache, address, token)
    cache = cache.replace(index=append_key(cache.index, cache, address.table, key))
    selection = select_pages(cache.index, cache, address.table, query, rule, "xla")
    resolution, cache = resolve(cache, address, selection.ids, "xla")
    out = attend_pages(
        cache, address, resolution, query, selection.head_mask, scale=SCALE, dtype=jnp.float32, out_dtype=jnp.float32,
        implementation="xla",
    )  # fmt: skip
    return cache, out


@functools.partial(jax.jit, static_argnames="rule")
def step(cache, key, value, query, rule):
    cache = begin_step(entering(cache), jnp.asarray([True, True, False]))
    cache, out = layer(cache, LAYER, key, value, query, rule)
    return end_step(cache, "xla"), out


def admitted(residency: str, rule: QuestRule, kv: np.ndarray, lengths):
    """Requests whose rows are NaN past their last token, in a cache whose hot rows are NaN where nothing is."""
    cache = create(sizes(residency, rule), quest_index(sizes(residency, rule), 1, KV_HEADS, CHANNELS, jnp.float32))
    poison = tuple(jnp.full_like(rows, NAN_WORD) for rows in cache.hot_rows)
    cache = cache.replace(hot_rows=poison)
    pages = cache.page_table.shape[1]
    for slot, length in enumerate(lengths):
        rows = to_words(kv[slot].reshape(CONTEXT, -1)).copy()
        rows[length:] = NAN_WORD
        rows = jnp.asarray(rows.reshape(CONTEXT // PAGE, -1))
        low, high = page_bounds(jnp.asarray(kv[slot, :, 0]), jnp.int32(length), PAGE)
        index = QuestIndex(low[None], high[None])
        own = int32(slot * pages + np.arange(pages))
        commit = jax.jit(lambda cache, slot, own, length, rows, index: admit(
            entering(cache), slot, own, length, lambda space: rows, index, "xla"
        ))  # fmt: skip
        cache = commit(cache, jnp.int32(slot), own, jnp.int32(length), rows, index)
    return cache


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_attention_over_the_selected_pages(rule):
    """Pages of both residencies, short, long and with the ring wrapped, give float64's output; and the same bits."""
    rng = np.random.default_rng(0)
    kv = rng.integers(-2, 3, (REQUESTS, CONTEXT, 2, KV_HEADS, CHANNELS)).astype(np.float32)
    lengths = [sizes("hisparse", rule).hot_slots * PAGE - 2, 50, 9]
    full, sparse = (admitted(residency, rule, kv, lengths) for residency in ("full", "hisparse"))
    misses = 0
    for number in range(14):
        query = rng.integers(-2, 3, (REQUESTS, KV_HEADS, HEADS, CHANNELS)).astype(np.float32)
        now = [min(length + number, CONTEXT - 1) for length in lengths]
        key, value = (np.stack([kv[r, now[r], part] for r in range(REQUESTS)]) for part in (0, 1))
        token = jnp.asarray(key), jnp.asarray(value), jnp.asarray(query)
        (full, want), (sparse, got) = (step(cache, *token, rule) for cache in (full, sparse))
        same_bits(got[:2], want[:2])
        misses += int(sparse.counters[0, :, 2].sum())
        for r in (0, 1):
            tokens = now[r] + 1
            heads = query[r].reshape(-1, CHANNELS)
            pages = -(-tokens // PAGE)
            seen = np.where((np.arange(CONTEXT) < tokens)[:, None, None], kv[r, :, 0], np.nan)
            by_page = seen.reshape(-1, PAGE, KV_HEADS, CHANNELS)[:pages]
            low, high = np.nanmin(by_page, axis=1), np.nanmax(by_page, axis=1)
            if rule.rule == "shared":
                scores = oracles.quest_rule_a_scores(heads, low, high)
                chosen = [oracles.quest_pages(scores, pages, rule.budget_pages, rule.recent_pages)] * len(heads)
            else:
                chosen = oracles.quest_rule_b(heads, low, high, pages, rule.budget_pages)
            for head, of_head in enumerate(chosen):
                kv_head = head // HEADS
                keys, values = (kv[r, :, part, kv_head : kv_head + 1] for part in (0, 1))
                exact = oracles.page_attention(heads[head][None], keys, values, of_head, PAGE, tokens, SCALE)
                # Dot products of 8 and sums over at most 16 tokens of values up to 2, in float32.
                np.testing.assert_allclose(got[r, kv_head, head % HEADS], exact[0], rtol=0, atol=1e-5)
    assert misses > 0, "nothing was read from the pool"


def test_visible_tokens():
    """All tokens of a closed record, what there is of the newest, none of padding."""
    cache = create(layout(record_tokens=4, context_tokens=80, host_pages=60))
    cache = cache.replace(tokens=int32([9, 12, 1]), active=jnp.ones(3, jnp.bool_))
    selected = np.stack([padded([0, 2], 3), padded([0, 1, 2], 3), padded([0], 3)])
    same_bits(visible_tokens(cache, int32(selected)), np.array([[4, 1, 0], [4, 4, 4], [1, 0, 0]], np.int32))


def test_append_refuses_a_token_of_the_wrong_size():
    cache = create(layout())
    with pytest.raises(ValueError, match=r"append: token must have shape \[3, 2\], got \[3, 4\]"):
        append(cache, LAYER, jnp.zeros((3, 4), jnp.uint32))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the portable path on a CPU")
@pytest.mark.parametrize("residency", ["full", "hisparse"])
def test_one_request_appends_without_a_copy_of_all_rows(residency):
    """Several layers, each of which reads what it appended: temporaries are smaller than rows or bounds of all."""
    layers, rule = 6, RULES["shared"]
    found = layout(
        residency=residency, request_slots=1, context_tokens=4096, record_tokens=PAGE, group_sizes=(1,) * layers,
        selected=4, row_bytes=PAGE * 2 * KV_HEADS * CHANNELS * 4, hot_slots=256, host_pages=256,
    )  # fmt: skip
    cache = create(found, quest_index(found, layers, KV_HEADS, CHANNELS, jnp.float32))

    def decode(cache, query):
        cache = begin_step(entering(cache), jnp.asarray([True]))
        for number in range(layers):
            address, key = Address(space=number, table=number, position=0, group=number), query[:, :, 0]
            cache, query = layer(cache, address, key, 2 * key, query, rule)
        return end_step(cache, "xla"), query

    query = jnp.ones((1, KV_HEADS, HEADS, CHANNELS))
    memory = jax.jit(decode, donate_argnums=0).lower(cache, query).compile().memory_analysis()
    assert memory.temp_size_in_bytes < min(cache.hot_rows[0].nbytes, cache.index.key_min.nbytes)
