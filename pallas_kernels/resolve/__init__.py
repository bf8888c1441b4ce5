# SPDX-License-Identifier: Apache-2.0
"""Resolve: from selected record ids to places among the hot rows, with what is missing and the new tables."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common import Implementation, check, choose, shared
from pallas_kernels.fetch import reference as fetch_reference
from pallas_kernels.resolve import mosaic_gpu, reference
from pallas_kernels.resolve.types import Plan, Resolved

__all__ = ["Plan", "Resolved", "resolve", "resolve_and_fetch"]

MAX_HOT_SLOTS = 32767  # recency is int16


@shared("ring_slots", "page_records", "order", "implementation")
def resolve(
    selected: Array, length: Array, slot_ids: Array, recency: Array, page_table: Array, base: Array,
    table: Array | int, *, ring_slots: int, page_records: int, order: reference.Order = reference.hit_first_lru,
    implementation: Implementation = "auto",
) -> Resolved:  # fmt: skip
    """Finds the hot slot of every selected record and gives the missing ones a slot.

    Per request: inactive (length 0) gives -1 everywhere; a history that fits (`length <= H`) has slot = id; otherwise
    ids of the newest W records are in the ring at `H + id % W`, ids in the table are hits, and the m-th other id takes
    the m-th slot of the recency order that was not hit. Tables of the first two kinds stay as they are.

    Args:
      selected: int32 `[R, K]`, ids ascending and unique, all below `length`, padded with -1 at the end. K <= H.
      length: int32 `[R]`, records including the newest one; 0 for an inactive request.
      slot_ids: int32 `[tables, R, H]`, the record each slot holds, -1 if none.
      recency: int16 `[tables, R, H]`, a permutation of the slots, the one to replace first in front.
      page_table: int32 `[R, pages]`, host page of every `page_records` records.
      base: int32 `[R]`, row of a hot buffer where a request's slots begin.
      table: int32 scalar, which table to use and to change.
      ring_slots: W, at least 1.
      page_records: records of one host page.
      order: rule of replacement; hit-first LRU if not given.
      implementation: "auto", "xla" or "mosaic_gpu".
    Returns:
      places, plan, counters and the new tables; see `Resolved`.
    Raises:
      ValueError: an argument of a wrong shape or dtype, or an implementation that can't run here.
    """
    chosen = _choose(
        "resolve", implementation, selected, length, slot_ids, recency, page_table, base, ring_slots, page_records,
        order,
    )  # fmt: skip
    args = (selected, length, slot_ids, recency, page_table, base, jnp.asarray(table, jnp.int32))
    if chosen == "mosaic_gpu":
        return mosaic_gpu.resolve(*args, ring_slots=ring_slots, page_records=page_records)[0]
    return reference.resolve(*args, ring_slots=ring_slots, page_records=page_records, order=order)


@shared("rows_per_space", "ring_slots", "page_records", "busy", "order", "implementation")
def resolve_and_fetch(
    pool: Array, hot_rows: Array, selected: Array, length: Array, slot_ids: Array, recency: Array, page_table: Array,
    base: Array, table: Array | int, space: Array | int, group: Array | int, *, rows_per_space: int, ring_slots: int,
    page_records: int, busy: int | None = None, order: reference.Order = reference.hit_first_lru,
    implementation: Implementation = "auto",
) -> tuple[Resolved, Array]:  # fmt: skip
    """Resolve, and the fetch of its plan, in one kernel where there is one.

    ```
    resolved = resolve(selected, length, slot_ids, recency, page_table, base, table, ...)
    return resolved, fetch(pool, hot_rows, resolved.plan, base, space, group, rows_per_space=rows_per_space)
    ```

    Args, shapes and errors: see `resolve` and `pallas_kernels.fetch.fetch`; `busy` is about how many requests have a
    length, for the launch; all of them if None.
    Returns:
      What resolve gives, and the new `hot_rows`.
    """
    check("resolve_and_fetch", "hot_rows", hot_rows, (None, None, None), jnp.uint32)
    check("resolve_and_fetch", "pool", pool, (None, hot_rows.shape[2]), jnp.uint32)
    chosen = _choose(
        "resolve_and_fetch", implementation, selected, length, slot_ids, recency, page_table, base, ring_slots,
        page_records, order, words=hot_rows.shape[2],
    )  # fmt: skip
    table, space, group = (jnp.asarray(x, jnp.int32) for x in (table, space, group))
    args = (selected, length, slot_ids, recency, page_table, base, table)
    if chosen == "mosaic_gpu":
        rows = (pool, hot_rows, space, group)
        return mosaic_gpu.resolve(
            *args, ring_slots=ring_slots, page_records=page_records, rows=rows, rows_per_space=rows_per_space,
            busy=busy,
        )  # fmt: skip
    resolved = reference.resolve(*args, ring_slots=ring_slots, page_records=page_records, order=order)
    return resolved, fetch_reference.fetch(
        pool, hot_rows, resolved.plan, base, space, group, rows_per_space=rows_per_space
    )


def _choose(
    operation: str, implementation: str, selected: Array, length: Array, slot_ids: Array, recency: Array,
    page_table: Array, base: Array, ring_slots: int, page_records: int, order: reference.Order, words: int = 0,
) -> str:  # fmt: skip
    """Checks the arguments and gives back the implementation to run."""
    _, requests, hot_slots = slot_ids.shape if slot_ids.ndim == 3 else (0, 0, 0)
    check(operation, "slot_ids", slot_ids, (None, None, None), jnp.int32)
    check(operation, "recency", recency, slot_ids.shape, jnp.int16)
    check(operation, "selected", selected, (requests, None), jnp.int32)
    check(operation, "length", length, (requests,), jnp.int32)
    check(operation, "page_table", page_table, (requests, None), jnp.int32)
    check(operation, "base", base, (requests,), jnp.int32)
    if not selected.shape[1] <= hot_slots <= MAX_HOT_SLOTS:
        raise ValueError(
            f"{operation}: hot slots must be between K = {selected.shape[1]} and {MAX_HOT_SLOTS}, got {hot_slots}"
        )
    if ring_slots < 1 or page_records < 1:
        raise ValueError(
            f"{operation}: ring_slots and page_records must be at least 1, got {ring_slots} and {page_records}"
        )
    context = page_table.shape[1] * page_records
    reason = mosaic_gpu.unsupported(selected.shape[1], hot_slots, context, words)
    if order is not reference.hit_first_lru:
        reason = "the kernel has one order of replacement, hit-first LRU"
    return choose(implementation, operation, reason)
