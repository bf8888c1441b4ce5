# SPDX-License-Identifier: Apache-2.0
"""What resolve gives back."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array


class Plan(NamedTuple):
    """Which host rows go to which hot slots, in miss order. A follower replays its anchor's plan on its own rows.

    Attributes:
      host_row: int32 `[R, K]`, row inside one space of the host pool, -1 padded.
      slot: int32 `[R, K]`, hot slot relative to the request's first, -1 padded.
      count: int32 `[R]`, number of misses.
    """

    host_row: Array
    slot: Array
    count: Array


class Resolved(NamedTuple):
    """Result of resolve.

    Attributes:
      place: int32 `[R, K]`, in the order of `selected`, the row of a hot buffer (first of the request plus slot);
        -1 where nothing is.
      plan: what has to be fetched.
      counters: int32 `[R, 3]`: hits (ring included), ring hits, misses. Hits and misses add up to the selected.
      slot_ids: int32 `[tables, R, H]`, the new tables.
      recency: int16 `[tables, R, H]`, the new orders.
    """

    place: Array
    plan: Plan
    counters: Array
    slot_ids: Array
    recency: Array
