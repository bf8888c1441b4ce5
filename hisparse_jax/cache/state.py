# SPDX-License-Identifier: Apache-2.0
"""The state of a cache as a pytree, and the two ends of a decode step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.memory import host_zeros, sharding, stays_on_host


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Rows, tables and index state of all requests. Functions take a cache and give back a new one.

    Attributes:
      layout: static sizes.
      tokens: int32 `[R]`, tokens of each request, the newest included once its step has begun.
      active: bool `[R]`, which requests take part in the current step.
      page_table: int32 `[R, pages]`, pages of the host pool that each request owns.
      hot_rows: for each position in a selection group, uint32 `[groups, R * slots, words]`.
      slot_ids: int32 `[tables, R, H]`, record held by each hot slot, -1 if none.
      recency: int16 `[tables, R, H]`, slots from the one to replace first to the last.
      pool: uint32 `[spaces * rows, words]` in pinned host memory; no rows when residency is "full".
      index: what the selector scores, any pytree whose leaves start with `[layers, R]`; always on the device.
      counters: int32 `[tables, R, 3]`, hits, ring hits and misses of the current step.
    """

    layout: Layout = dataclasses.field(metadata={"static": True})
    tokens: Array
    active: Array
    page_table: Array
    hot_rows: tuple[Array, ...]
    slot_ids: Array
    recency: Array
    pool: Array
    index: Any
    counters: Array

    @property
    def base(self) -> Array:
        """int32 `[R]`: the first hot slot of each request."""
        return jnp.arange(self.layout.request_slots, dtype=jnp.int32) * self.layout.slots_per_request

    @property
    def length(self) -> Array:
        """int32 `[R]`: records including the newest one; 0 for a request that takes no part in this step."""
        return jnp.where(self.active, -(-self.tokens // self.layout.record_tokens), 0)

    @property
    def newest(self) -> Array:
        """int32 `[R]`: place of the newest record among the hot rows; out of range for an inactive request."""
        layout = self.layout
        record = self.length - 1
        slot = record
        if not layout.is_full:
            in_ring = layout.hot_slots + record % layout.ring_slots
            slot = jnp.where(record < layout.hot_slots, record, in_ring)
        nowhere = layout.request_slots * layout.slots_per_request
        return jnp.where(self.active, self.base + slot, nowhere)

    def replace(self, **changes: Any) -> Cache:
        return dataclasses.replace(self, **changes)


def create(layout: Layout, index: Any = (), pool: Array | None = None) -> Cache:
    """An empty cache. Hot rows and index state go to the device, the pool to pinned host memory.

    Args:
      layout: sizes.
      index: index state of the selector, leaves `[layers, R, ...]`.
      pool: the host pool of a cache that is no longer used; a new one if not given.
    """
    requests, slots = layout.request_slots, layout.request_slots * layout.slots_per_request

    def hot_rows(position: int) -> Array:
        # The same bytes everywhere, so each buffer is its own: donation needs that.
        return jnp.zeros((layout.groups_at(position), slots, layout.words), jnp.uint32)

    return Cache(
        layout=layout,
        tokens=jnp.zeros(requests, jnp.int32),
        active=jnp.zeros(requests, jnp.bool_),
        page_table=jnp.full((requests, layout.pages_per_request), -1, jnp.int32),
        hot_rows=tuple(hot_rows(position) for position in range(max(layout.group_sizes))),
        slot_ids=jnp.full((layout.tables, requests, layout.table_slots), -1, jnp.int32),
        recency=jnp.tile(jnp.arange(layout.table_slots, dtype=jnp.int16), (layout.tables, requests, 1)),
        pool=host_zeros((layout.pool_rows, layout.words), np.uint32) if pool is None else pool,
        index=index,
        counters=jnp.zeros((layout.tables, requests, 3), jnp.int32),
    )


def placements(cache: Cache) -> Cache:
    """The sharding of every leaf: the `out_shardings` that keep the pool in host memory."""
    on_device = jax.tree.map(lambda _: sharding(host=False), cache)
    return on_device.replace(pool=sharding(host=True))


def entering(cache: Cache) -> Cache:
    """To be called first in a jitted function that takes a cache: says where the pool lives."""
    return cache.replace(pool=stays_on_host(cache.pool))


def begin_step(cache: Cache, active: Array) -> Cache:
    """Counts in the token that each active request is about to append.

    Args:
      cache: the cache between two steps.
      active: bool `[R]`.
    """
    tokens = cache.tokens + active.astype(jnp.int32)
    return cache.replace(tokens=tokens, active=active, counters=jnp.zeros_like(cache.counters))
