# SPDX-License-Identifier: Apache-2.0
"""Selection: index state to record ids. Quest (arXiv:2406.10774): bounds of the keys of each page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from hisparse_jax.cache.append import write_each
from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.state import Cache
from hisparse_jax.workload import Locality, synthetic_scores
from pallas_kernels.common import Implementation
from pallas_kernels.index_scores import quest_scores
from pallas_kernels.index_topk import index_topk

_NEVER = jnp.iinfo(jnp.int32).max


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuestIndex:
    """Channel-wise bounds of the rotated keys of every page.

    Attributes:
      key_min: `[L, R, pages, G, C]`, in the stored type, so that the bounds are exact.
      key_max: the same.
    """

    key_min: Array
    key_max: Array


@dataclass(frozen=True)
class QuestRule:
    """How pages are chosen.

    Attributes:
      rule: "shared": one list of pages for all heads, by the mean query of each KV head. "per_query_head": a list for
        each query head; what is resolved is their union.
      budget_pages: pages attended to, the recent ones included.
      recent_pages: newest pages that are always attended to, at least one.
      page_tokens: tokens of a page.
    """

    rule: Literal["shared", "per_query_head"]
    budget_pages: int
    recent_pages: int
    page_tokens: int = 16

    def width(self, query_heads: int, pages: int) -> int:
        """K: how many pages a selection can hold."""
        if self.rule == "shared":
            return self.budget_pages
        return min(query_heads * self.budget_pages, pages)


class Selection(NamedTuple):
    """Record ids, and which query heads attend to which of them.

    Attributes:
      ids: int32 `[R, K]`, ascending and unique, -1 padded.
      head_mask: bool `[R, G, heads, K]`, or None when all heads attend to all of them.
    """

    ids: Array
    head_mask: Array | None


def quest_index(layout: Layout, layers: int, kv_heads: int, channels: int, dtype: DTypeLike) -> QuestIndex:
    """Empty bounds."""
    shape = (layers, layout.request_slots, layout.records, kv_heads, channels)
    return QuestIndex(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def page_bounds(keys: Array, tokens: Array, page_tokens: int) -> tuple[Array, Array]:
    """Bounds of the pages of one request's first `tokens` keys.

    Args:
      keys: `[T, G, C]` with T a multiple of `page_tokens`.
      tokens: int32 scalar.
      page_tokens: tokens of a page.
    Returns:
      minimum and maximum, `[T / page_tokens, G, C]`; zero for pages that hold nothing.
    """
    exists = (jnp.arange(keys.shape[0]) < tokens)[:, None, None]
    by_page = (keys.shape[0] // page_tokens, page_tokens, *keys.shape[1:])
    low = jnp.where(exists, keys, jnp.inf).reshape(by_page).min(1)
    high = jnp.where(exists, keys, -jnp.inf).reshape(by_page).max(1)
    empty = jnp.isinf(low) & jnp.isinf(high)
    return jnp.where(empty, 0, low), jnp.where(empty, 0, high)


def append_key(index: QuestIndex, cache: Cache, layer: Array | int, key: Array) -> QuestIndex:
    """Widens the bounds of each active request's newest page by its newest key, `[R, G, C]`."""
    requests = jnp.arange(cache.layout.request_slots)
    page = jnp.where(cache.active, cache.length - 1, cache.layout.records)
    opens = ((cache.tokens - 1) % cache.layout.record_tokens == 0)[:, None, None]

    def widen(bounds: Array, choose: Callable[[Array, Array], Array]) -> Array:
        old = bounds.at[layer, requests, page].get(mode="clip")
        new = jnp.where(opens, key, choose(old, key)).astype(bounds.dtype)
        return write_each(bounds, layer, (requests, page), new)

    return QuestIndex(widen(index.key_min, jnp.minimum), widen(index.key_max, jnp.maximum))


def select_pages(
    index: QuestIndex, cache: Cache, layer: Array | int, query: Array, rule: QuestRule,
    implementation: Implementation = "auto", workload: Locality | None = None,
) -> Selection:  # fmt: skip
    """The pages that each request attends to in this step.

    The newest `recent_pages` always, and of the others those with the largest bounds, up to the budget. The newest
    page may be open; with at least one recent page an open page is never scored.

    Args:
      index: bounds of all pages.
      cache: the cache of a step that has begun.
      layer: int32 scalar, which layer of the index.
      query: `[R, G, heads, C]`, rotated.
      rule: how many, and shared or not.
      implementation: of the kernels.
      workload: a synthetic process whose scores stand for those just computed; for the shared rule.
    Raises:
      ValueError: a synthetic process for the lists of heads: how they overlap is not known.
    """
    with jax.named_scope("selection"):
        if rule.rule == "shared":
            return _shared(index, cache, layer, query, rule, implementation, workload)
        if workload is not None:
            raise ValueError("select_pages: a synthetic workload takes the rule 'shared', got 'per_query_head'")
        return _per_query_head(index, cache, layer, query, rule, implementation)


def _shared(
    index: QuestIndex, cache: Cache, layer: Array | int, query: Array, rule: QuestRule, implementation: Implementation,
    workload: Locality | None,
) -> Selection:  # fmt: skip
    # In the type of the query: the kernel multiplies bfloat16 bounds with bfloat16 queries only.
    mean = jnp.mean(query.astype(jnp.float32), axis=2, keepdims=True).astype(query.dtype)
    with jax.named_scope("index_scores"):
        scores = quest_scores(mean, index.key_min, index.key_max, layer, implementation=implementation)
    scores = jnp.sum(scores, axis=(1, 2))
    if workload is not None:
        scores = synthetic_scores(scores, cache.length, layer, workload, clock=cache.tokens)
    ids = index_topk(scores, cache.length, rule.budget_pages, newest=rule.recent_pages, implementation=implementation)
    return Selection(ids, None)


def _per_query_head(
    index: QuestIndex, cache: Cache, layer: Array | int, query: Array, rule: QuestRule, implementation: Implementation
) -> Selection:
    requests, groups, heads, _ = query.shape
    lists, pages = groups * heads, cache.layout.records
    with jax.named_scope("index_scores"):
        scores = quest_scores(query, index.key_min, index.key_max, layer, implementation=implementation)
    flat, length = scores.reshape(requests * lists, -1), jnp.repeat(cache.length, lists)
    chosen = index_topk(flat, length, rule.budget_pages, newest=rule.recent_pages, implementation=implementation)
    chosen = chosen.reshape(requests, lists, -1)

    rows, columns = jnp.arange(requests)[:, None, None], jnp.arange(lists)[None, :, None]
    attended = jnp.zeros((requests, lists, pages), jnp.bool_)
    attended = attended.at[rows, columns, jnp.where(chosen >= 0, chosen, pages)].set(True, mode="drop")

    union = jnp.where(jnp.any(attended, axis=1), jnp.arange(pages)[None], -1)
    ids = _ascending(union)[:, : rule.width(lists, pages)]
    mask = jnp.take_along_axis(attended, jnp.maximum(ids, 0)[:, None], axis=2) & (ids >= 0)[:, None]
    return Selection(ids, mask.reshape(requests, groups, heads, -1))


def _ascending(ids: Array) -> Array:
    """Sorted, with -1 moved behind the rest."""
    ordered = jnp.sort(jnp.where(ids >= 0, ids, _NEVER), axis=1)
    return jnp.where(ordered == _NEVER, -1, ordered)
