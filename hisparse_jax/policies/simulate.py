# SPDX-License-Identifier: Apache-2.0
"""A recorded trace of selections, replayed through a rule of replacement. No rows move."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from pallas_kernels.resolve import resolve
from pallas_kernels.resolve.reference import Order, hit_first_lru


@partial(jax.jit, static_argnames=("hot_slots", "ring_slots", "order", "in_place"))
def replay(
    selected: ArrayLike, length: ArrayLike, *, hot_slots: int, ring_slots: int, order: Order = hit_first_lru,
    in_place: bool = False,
) -> Array:  # fmt: skip
    """Hits and misses of every step of independent streams: requests, or layers of one.

    Args:
      selected: int32 `[steps, streams, K]`, ids ascending and unique, below `length`, padded with -1. K <= H.
      length: int32 `[steps, streams]`, records including the newest one; 0 where a stream takes no part.
      hot_slots: H.
      ring_slots: W.
      order: the rule.
      in_place: the streams were admitted with at most H records, which are in place; otherwise they start cold.
    Returns:
      int32 `[steps, streams, 3]`: hits (ring included), ring hits, misses.
    Raises:
      ValueError: see `pallas_kernels.resolve.resolve`.
    """
    selected, length = jnp.asarray(selected, jnp.int32), jnp.asarray(length, jnp.int32)
    streams = selected.shape[1]
    slots = jnp.arange(hot_slots, dtype=jnp.int32)
    ids = jnp.broadcast_to(slots if in_place else jnp.full_like(slots, -1), (1, streams, hot_slots))
    recency = jnp.broadcast_to(slots.astype(jnp.int16), (1, streams, hot_slots))
    no_pages, base = jnp.zeros((streams, 1), jnp.int32), jnp.zeros(streams, jnp.int32)

    def step(tables: tuple[Array, Array], one: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        found = resolve(
            *one, *tables, no_pages, base, 0, ring_slots=ring_slots, page_records=2**30, order=order,
            implementation="xla",
        )  # fmt: skip
        return (found.slot_ids, found.recency), found.counters

    return lax.scan(step, (ids, recency), (selected, length))[1]
