# SPDX-License-Identifier: Apache-2.0
"""Definition of resolve in `jax.numpy`; also the portable implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.resolve.types import Plan, Resolved

_NEVER = jnp.iinfo(jnp.int32).max


class Order(Protocol):
    """A rule of replacement: where each slot of the recency order goes next.

    The order runs from the slot to replace first to the one to replace last.

    Args:
      hit: bool `[H]`, by place in the order: its record was selected.
      loaded: bool `[H]`, by place in the order: it is overwritten in this step.
    Returns:
      int32 `[H]`: the new place of each, a permutation.
    """

    def __call__(self, hit: Array, loaded: Array) -> Array: ...


def _stable_partition(rank: Array) -> Array:
    """New places that sort by `rank` (small integers), keeping the order inside a rank."""
    return jnp.argsort(jnp.argsort(rank, stable=True)).astype(jnp.int32)


def hit_first_lru(hit: Array, loaded: Array) -> Array:
    """Kept, then newly loaded, then hit: a hit outranks what was just loaded."""
    return _stable_partition(jnp.where(hit, 2, jnp.where(loaded, 1, 0)))


def plain_lru(hit: Array, loaded: Array) -> Array:
    """Kept, then used: what a step hit and what it loaded are equally recent, and the old order decides."""
    return _stable_partition(jnp.where(hit | loaded, 1, 0))


def fifo(hit: Array, loaded: Array) -> Array:
    """Only loading moves a slot: the slot that was filled first is replaced first, unless this step hits it."""
    return _stable_partition(jnp.where(loaded, 1, 0))


ORDERS: Mapping[str, Order] = {"hit_first_lru": hit_first_lru, "plain_lru": plain_lru, "fifo": fifo}


def resolve_row(
    selected: Array, length: Array, slot_ids: Array, recency: Array, pages: Array, *, ring_slots: int,
    page_records: int, order: Order,
) -> tuple[Array, Plan, Array, Array, Array]:  # fmt: skip
    """Resolve for one request: `selected` [K], `length` [], `slot_ids` and `recency` [H], `pages` [pages]."""
    (hot_slots,), (width,) = slot_ids.shape, selected.shape
    is_selected = (selected >= 0) & (length > 0)
    is_short = length <= hot_slots

    in_ring = is_selected & (selected >= jnp.maximum(hot_slots, length - ring_slots))
    ring_slot = hot_slots + selected % ring_slots

    # Table hits: each slot looks its record up among the selected, which are ascending.
    ascending = jnp.where(selected >= 0, selected, _NEVER)
    place = jnp.searchsorted(ascending, slot_ids).astype(jnp.int32)
    found = (slot_ids >= 0) & (ascending[jnp.minimum(place, width - 1)] == slot_ids)
    slot_of_place = jnp.full(width, -1, jnp.int32)
    slot_of_place = slot_of_place.at[jnp.where(found, place, width)].set(jnp.arange(hot_slots), mode="drop")

    miss = is_selected & ~in_ring & (slot_of_place < 0) & ~is_short
    misses = jnp.sum(miss, dtype=jnp.int32)
    miss_rank = jnp.cumsum(miss, dtype=jnp.int32) - 1

    # Victims: the m-th miss takes the m-th slot of the recency order that was not hit.
    by_age = recency.astype(jnp.int32)
    hit = found[by_age]
    evictable_rank = jnp.cumsum(~hit, dtype=jnp.int32) - 1
    loaded = ~hit & (evictable_rank < misses)
    victim = jnp.zeros(hot_slots, jnp.int32).at[jnp.where(loaded, evictable_rank, hot_slots)].set(by_age, mode="drop")

    miss_slot = victim[jnp.clip(miss_rank, 0)]
    slots = jnp.where(in_ring, ring_slot, jnp.where(miss, miss_slot, slot_of_place))
    slots = jnp.where(is_short, selected, slots)
    slots = jnp.where(is_selected, slots, -1)

    rank = jnp.where(miss, miss_rank, width)
    nothing = jnp.full(width, -1, jnp.int32)
    row = pages[jnp.clip(selected, 0) // page_records] * page_records + selected % page_records
    plan = Plan(
        host_row=nothing.at[rank].set(row, mode="drop"), slot=nothing.at[rank].set(miss_slot, mode="drop"), count=misses
    )

    new_recency = jnp.zeros_like(recency).at[order(hit, loaded)].set(recency)
    new_slot_ids = slot_ids.at[jnp.where(miss, miss_slot, hot_slots)].set(selected, mode="drop")
    ring_hits = jnp.sum(in_ring & ~is_short, dtype=jnp.int32)
    hits = jnp.sum(is_selected, dtype=jnp.int32) - misses
    return (
        slots,
        plan,
        jnp.stack([hits, ring_hits, misses]),
        jnp.where(is_short, slot_ids, new_slot_ids),
        jnp.where(is_short, recency, new_recency),
    )


def resolve(
    selected: Array, length: Array, slot_ids: Array, recency: Array, page_table: Array, base: Array, table: Array, *,
    ring_slots: int, page_records: int, order: Order = hit_first_lru,
) -> Resolved:  # fmt: skip
    """See `pallas_kernels.resolve.resolve`."""

    def row(*args: Array) -> tuple[Array, Plan, Array, Array, Array]:
        return resolve_row(*args, ring_slots=ring_slots, page_records=page_records, order=order)

    slots, plan, counters, ids, ages = jax.vmap(row)(selected, length, slot_ids[table], recency[table], page_table)
    place = jnp.where(slots >= 0, base[:, None] + slots, -1)
    return Resolved(place, plan, counters, slot_ids.at[table].set(ids), recency.at[table].set(ages))
