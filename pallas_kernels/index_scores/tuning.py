# SPDX-License-Identifier: Apache-2.0
"""How the index-score kernels are launched: derived from sizes; other launches have not been measured yet."""

from __future__ import annotations

from typing import NamedTuple

_PER_MULTIPROCESSOR = 224 * 1024  # bytes of shared memory to fill
_MULTIPROCESSORS = 132


class Tuning(NamedTuple):
    """Launch of the index scores.

    Attributes:
      block: records of a tile, a multiple of 64; of msa_scores the tokens of a block.
      stages: tiles of a program under way.
      parts: programs that share a row's tiles.
    """

    block: int = 128
    stages: int = 4
    parts: int = 1


def tuning(rows: int, records: int, record_bytes: int) -> Tuning:
    """Tiles of about 16 KiB or one of 64 records, 64 KiB of them under way, and programs for every multiprocessor.

    Args:
      rows: independent rows of scores.
      records: of a row.
      record_bytes: read for one record.
    """
    block = 128 if 128 * record_bytes <= 36 * 1024 and records >= 128 else 64
    tile_bytes = block * record_bytes
    stages = min(max(64 * 1024 // tile_bytes, 3), 8)
    programs = max(_PER_MULTIPROCESSOR // (stages * tile_bytes + 12 * 1024), 1) * _MULTIPROCESSORS
    return Tuning(block, stages, max(1, min(-(-records // block), programs // rows)))
