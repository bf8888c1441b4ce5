# SPDX-License-Identifier: Apache-2.0
"""When each layer's missing rows are fetched: a schedule as data, from the sharing pattern alone. Imports no JAX.

Followers attend to what their anchor selected, so their misses are known as soon as the anchor has resolved: one, two
and three layers ahead in groups of four. Nothing is guessed, so what is fetched ahead is exactly what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Prefetch = Literal["off", "exact"]  # see `schedule`


class Fetch(NamedTuple):
    """One layer's fetch.

    Attributes:
      layer: whose rows.
      position: its place in its selection group; 0 is the anchor.
      anchor: the layer whose plan it replays; its own for an anchor.
      issued: the layer during which it is issued, behind that layer's resolve and own fetch.
    """

    layer: int
    position: int
    anchor: int
    issued: int

    @property
    def layers_ahead(self) -> int:
        """How many layers of work hide it."""
        return self.layer - self.issued


def schedule(group_sizes: Sequence[int], *, prefetch: Prefetch = "exact") -> tuple[Fetch, ...]:
    """The fetches of one decode step, in the order they are issued.

    Args:
      group_sizes: layers of each selection group, the anchor first.
      prefetch: "exact" issues the followers' fetches with their anchor's, "off" each just before it is read.
    """
    fetches, anchor = [], 0
    for size in group_sizes:
        for position in range(size):
            issued = anchor if prefetch == "exact" else anchor + position
            fetches.append(Fetch(anchor + position, position, anchor, issued))
        anchor += size
    return tuple(fetches)


def followers_issued(size: int, *, prefetch: Prefetch) -> tuple[tuple[int, ...], ...]:
    """For each position of a group of `size` layers, the followers whose fetch is issued during that layer."""
    fetches = [fetch for fetch in schedule([size], prefetch=prefetch) if fetch.position > 0]
    return tuple(tuple(fetch.position for fetch in fetches if fetch.issued == layer) for layer in range(size))
