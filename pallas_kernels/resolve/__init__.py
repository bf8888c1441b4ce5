# SPDX-License-Identifier: Apache-2.0
"""Resolve: from selected record ids to hot slots, with what is missing and the new tables."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common import Implementation, check, choose
from pallas_kernels.resolve import reference
from pallas_kernels.resolve.types import Plan, Resolved

__all__ = ["Plan", "Resolved", "resolve"]

MAX_HOT_SLOTS = 32767  # recency is int16


def resolve(
    selected: Array, length: Array, slot_ids: Array, recency: Array, page_table: Array, table: Array | int, *,
    ring_slots: int, page_records: int, order: reference.Order = reference.hit_first_lru,
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
      table: int32 scalar, which table to use and to change.
      ring_slots: W, at least 1.
      page_records: records of one host page.
      order: rule of replacement; hit-first LRU if not given.
      implementation: "auto", "xla" or "mosaic_gpu".
    Returns:
      slots, plan, counters and the new tables; see `Resolved`.
    Raises:
      ValueError: an argument of a wrong shape or dtype, or an implementation that can't run here.
    """
    _, requests, hot_slots = slot_ids.shape if slot_ids.ndim == 3 else (0, 0, 0)
    check("resolve", "slot_ids", slot_ids, (None, None, None), jnp.int32)
    check("resolve", "recency", recency, slot_ids.shape, jnp.int16)
    check("resolve", "selected", selected, (requests, None), jnp.int32)
    check("resolve", "length", length, (requests,), jnp.int32)
    check("resolve", "page_table", page_table, (requests, None), jnp.int32)
    if not selected.shape[1] <= hot_slots <= MAX_HOT_SLOTS:
        raise ValueError(
            f"resolve: hot slots must be between K = {selected.shape[1]} and {MAX_HOT_SLOTS}, got {hot_slots}"
        )
    if ring_slots < 1 or page_records < 1:
        raise ValueError(
            f"resolve: ring_slots and page_records must be at least 1, got {ring_slots} and {page_records}"
        )
    choose(implementation, "resolve")
    return reference.resolve(
        selected, length, slot_ids, recency, page_table, jnp.asarray(table, jnp.int32), ring_slots=ring_slots,
        page_records=page_records, order=order,
    )  # fmt: skip
