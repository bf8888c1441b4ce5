# SPDX-License-Identifier: Apache-2.0
"""Belady's bound: the fewest misses that any rule of replacement could have on a trace it knows in advance."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import ArrayLike


def belady_misses(
    selected: ArrayLike, length: ArrayLike, *, hot_slots: int, ring_slots: int, in_place: bool = False
) -> np.ndarray:
    """Misses of every step of one stream when the slot whose record is needed last is replaced first.

    A step needs all its records at once, so none of them is replaced in it; what the ring holds needs no slot.

    Args:
      selected: int32 `[steps, K]`, ids ascending and unique, below `length`, padded with -1. K <= H.
      length: int32 `[steps]`, records including the newest one; 0 where the stream takes no part.
      hot_slots: H.
      ring_slots: W.
      in_place: the stream was admitted with at most H records, which are in place; otherwise it starts cold.
    Returns:
      int64 `[steps]`.
    """
    needs = [
        [int(i) for i in ids if 0 <= i < max(hot_slots, count - ring_slots)] if count > hot_slots else []
        for ids, count in zip(np.asarray(selected), np.asarray(length), strict=True)
    ]
    never = len(needs)
    next_use = [[never] * len(ids) for ids in needs]
    latest: dict[int, int] = {}
    for step in range(len(needs) - 1, -1, -1):
        next_use[step] = [latest.get(record, never) for record in needs[step]]
        latest.update(dict.fromkeys(needs[step], step))

    # `held` maps a record to its next use; the heap gives the farthest, and an entry that `held` contradicts is stale.
    held = {record: latest.get(record, never) for record in range(hot_slots)} if in_place else {}
    farthest = [(-use, record) for record, use in held.items()]
    heapq.heapify(farthest)
    misses = np.zeros(len(needs), np.int64)
    for step, ids in enumerate(needs):
        missing = [record for record in ids if record not in held]
        for record, use in zip(ids, next_use[step], strict=True):
            if record in held:
                held[record] = use
                heapq.heappush(farthest, (-use, record))
        needed = set(ids)
        set_aside = []
        for _ in range(len(missing) - (hot_slots - len(held))):
            while True:
                use, record = heapq.heappop(farthest)
                if held.get(record) != -use:
                    continue
                if record not in needed:
                    break
                set_aside.append((use, record))
            del held[record]
        for entry in set_aside:
            heapq.heappush(farthest, entry)
        for record, use in zip(ids, next_use[step], strict=True):
            if record not in held:
                held[record] = use
                heapq.heappush(farthest, (-use, record))
        misses[step] = len(missing)
    return misses
