# SPDX-License-Identifier: Apache-2.0
"""How the latent attention kernel is launched: a function of shapes alone, so that the order of its sums is too."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.online_softmax import HEADS, TOKENS, Split, split


class Tuning(NamedTuple):
    """A launch.

    Attributes:
      split: parts of K, and tiles of 64 records of a part.
      stages: tiles in shared memory at a time; each takes 72 KiB, so 2 is what fits.
      handed_on: whether one consumer computes the weights for both.
      consumer_registers, producer_registers: of a lane, multiples of 8. A lane starts with 168, so consumers take no
        fewer (the hardware refuses to take 160 as a gain) and the producer no more; together they must not exceed 504,
        or a consumer waits for registers for ever.
    """

    split: Split
    stages: int = 2
    handed_on: bool = True
    consumer_registers: tuple[int, int] = (240, 176)
    producer_registers: int = 88


def head_tiles(heads: int) -> int:
    """Programs that share the heads of a request."""
    return -(-heads // HEADS)


def tiles_of(selected: int) -> int:
    """Tiles of so many records."""
    return -(-selected // TOKENS)


def tuning(requests: int, heads: int, selected: int, *, window: int = 0) -> Tuning:
    """The launch for R, N, K, and rows of a window that has tiles of its own."""
    tokens = TOKENS * (tiles_of(selected) + tiles_of(window)) if window else selected
    return Tuning(split(requests * head_tiles(heads), tokens))
