# SPDX-License-Identifier: Apache-2.0
"""Admission: a prefilled request takes a slot; release: a finished one leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from hisparse_jax.cache.append import with_rows
from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.state import Cache
from pallas_kernels.backup import backup
from pallas_kernels.common import Implementation

_ROWS_AT_ONCE = 256


def resident_records(layout: Layout, length: Array) -> Array:
    """int32 `[slots]`: the record that each slot of a request just admitted holds, -1 for none.

    A history that fits is in place, one that doesn't is cold: only the ring is filled.
    """
    if layout.is_full:
        record = jnp.arange(layout.records, dtype=jnp.int32)
        return jnp.where(record < length, record, -1)
    hot, ring = layout.hot_slots, layout.ring_slots
    in_table = jnp.arange(hot, dtype=jnp.int32)
    in_table = jnp.where((in_table < length) & (length <= hot), in_table, -1)
    # The newest record at most length - 1 whose number is the ring slot's, modulo W.
    place = jnp.arange(ring, dtype=jnp.int32)
    in_ring = length - 1 - (length - 1 - place) % ring
    in_ring = jnp.where((in_ring >= hot) & (length > hot), in_ring, -1)
    return jnp.concatenate([in_table, in_ring])


def admit(
    cache: Cache, slot: Array, pages: Array, tokens: Array, rows_of: Callable[[Array], Array], index: Any,
    implementation: Implementation = "auto",
) -> Cache:  # fmt: skip
    """Commits a prefilled history to the cache.

    Args:
      cache: the cache between two steps.
      slot: int32 scalar, which request slot.
      pages: int32 `[pages]`, host pages of the request, -1 padded.
      tokens: int32 scalar, tokens of the history.
      rows_of: gives the rows of a space, uint32 `[S, words]`; those past the history may hold anything.
      index: index state of this request, leaves `[layers, ...]` of the cache's `[layers, R, ...]`.
      implementation: of backup.
    """
    layout = cache.layout
    length = -(-tokens // layout.record_tokens)
    closed = tokens // layout.record_tokens
    resident = resident_records(layout, length)
    first = slot * layout.slots_per_request
    pool = cache.pool

    for position in range(len(cache.hot_rows)):
        spaces = jnp.asarray(layout.spaces_at(position), jnp.int32)

        def one(group: Array, carry: tuple[Array, Array], spaces: Array = spaces) -> tuple[Array, Array]:
            hot_rows, pool = carry
            rows = rows_of(spaces[group])
            block = rows.at[resident].get(mode="fill", fill_value=0, wrap_negative_indices=False)
            hot_rows = lax.dynamic_update_slice(hot_rows, block[None], (group, first, jnp.int32(0)))
            if layout.residency == "hisparse":
                start = spaces[group] * layout.rows_per_space
                pool = _back_up(pool, rows, start, pages, closed, layout, implementation)
            return hot_rows, pool

        groups = layout.groups_at(position)
        hot_rows, pool = lax.fori_loop(0, groups, one, (cache.hot_rows[position], pool))
        cache = with_rows(cache, position, hot_rows)

    index = jax.tree.map(lambda all_, one: all_.at[:, slot].set(one), cache.index, index)
    cache = cache.replace(pool=pool, index=index, tokens=cache.tokens.at[slot].set(tokens))
    if layout.is_full:
        return cache
    table = resident[: layout.hot_slots]
    in_place = jnp.where(length <= layout.hot_slots, jnp.arange(layout.hot_slots, dtype=jnp.int32), table)
    return cache.replace(
        page_table=cache.page_table.at[slot].set(pages),
        slot_ids=cache.slot_ids.at[:, slot].set(in_place),
        recency=cache.recency.at[:, slot].set(jnp.arange(layout.hot_slots, dtype=jnp.int16)),
    )


def _back_up(
    pool: Array, rows: Array, start: Array, pages: Array, closed: Array, layout: Layout, implementation: Implementation
) -> Array:
    """Copies the closed records of one space to its pages, a block of rows at a time."""

    def some(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        done, pool = carry
        record = done + jnp.arange(_ROWS_AT_ONCE, dtype=jnp.int32)
        page = pages.at[record // layout.page_records].get(mode="clip")
        target = start + page * layout.page_records + record % layout.page_records
        block = rows.at[record].get(mode="clip")
        target = jnp.where((record < closed) & (page >= 0), target, -1)
        return done + _ROWS_AT_ONCE, backup(pool, block, target, implementation=implementation)

    return lax.while_loop(lambda carry: carry[0] < closed, some, (jnp.int32(0), pool))[1]


def release(cache: Cache, slot: Array) -> Cache:
    """Empties a request slot: no tokens, no pages, no records. Its rows are overwritten by the next admission."""
    return cache.replace(
        tokens=cache.tokens.at[slot].set(0),
        active=cache.active.at[slot].set(False),
        page_table=cache.page_table.at[slot].set(-1),
        slot_ids=cache.slot_ids.at[:, slot].set(-1),
    )
