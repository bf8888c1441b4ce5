# SPDX-License-Identifier: Apache-2.0
"""How the page attention kernel is launched: a function of shapes alone, so that the order of its sums is too."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.online_softmax import Split, split


class Tuning(NamedTuple):
    """A launch.

    Attributes:
      split: parts of the tokens of all records, and tiles of 64 tokens of a part.
      consumers: KV heads of a program, each with a warpgroup of its own; must divide G.
      stages: tiles in shared memory at a time; each takes 32 KiB for each consumer.
      consumer_registers, producer_registers: of a lane, multiples of 8; see `pallas_kernels.sparse_mla.tuning`.
    """

    split: Split
    consumers: int = 2
    stages: int = 3
    consumer_registers: int = 208
    producer_registers: int = 40


def tuning(requests: int, kv_heads: int, tokens: int, masked: bool) -> Tuning:
    """The launch for R, G and so many tokens in the records of a request.

    Stages fill shared memory: 6 for one consumer, 3 for two, 2 where words of masks take the room of a third.
    """
    consumers = 1 if kv_heads % 2 else 2
    stages = 6 if consumers == 1 else 2 if masked else 3
    return Tuning(split(requests * kv_heads // consumers, tokens), consumers, stages)
