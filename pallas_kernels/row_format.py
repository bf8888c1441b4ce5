# SPDX-License-Identifier: Apache-2.0
"""Bytes of one multi-head latent attention (MLA) record. Imports no JAX, so that planning needs none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

RecordType = Literal["float32", "bfloat16", "fp8"]

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1}
_TILE = 128  # values that share one scale in an fp8 record
_ALIGNMENT = 8  # bytes; rows of the cache are a multiple of it


@dataclass(frozen=True)
class RowFormat:
    """How the latent and the rotated key of one token lie in a row.

    "float32" and "bfloat16" rows hold `[latent | rope]` in that type. An "fp8" row holds the latent in e4m3, one
    float32 scale for each tile of it, then the rotated key in bfloat16: 512 + 16 + 128 = 656 bytes at the published
    size. Rows are zero-padded to a multiple of 8 bytes, which changes no published size.

    Attributes:
      latent: values of the latent, which is also what attention sums; a multiple of 4.
      rope: values of the rotated key, a multiple of 2.
      record: type of the stored values.
    """

    latent: int
    rope: int
    record: RecordType

    def __post_init__(self) -> None:
        if self.record not in get_args(RecordType):
            raise ValueError(f"record must be one of {', '.join(get_args(RecordType))}, got {self.record!r}")
        if self.latent < 4 or self.latent % 4 or self.rope < 2 or self.rope % 2:
            raise ValueError(
                f"latent must be a multiple of 4 and rope a multiple of 2, got {self.latent} and {self.rope}"
            )

    @property
    def width(self) -> int:
        """Values of a record: latent and rotated key."""
        return self.latent + self.rope

    @property
    def tile(self) -> int:
        """Values that share one scale: 128, or the whole latent where 128 doesn't divide it."""
        return _TILE if self.latent % _TILE == 0 else self.latent

    @property
    def tiles(self) -> int:
        return self.latent // self.tile

    @property
    def dtype(self) -> str:
        """The type that attention computes with."""
        return "float32" if self.record == "float32" else "bfloat16"

    @property
    def row_bytes(self) -> int:
        if self.record == "fp8":
            count = self.latent + 4 * self.tiles + 2 * self.rope
        else:
            count = self.width * _ITEM_BYTES[self.record]
        return -(-count // _ALIGNMENT) * _ALIGNMENT

    @property
    def words(self) -> int:
        """Words of 4 bytes in a row."""
        return self.row_bytes // 4


def index_key_bytes(width: int, record: RecordType) -> int:
    """Bytes of one index key of `width` values; an fp8 key has one float32 scale beside it."""
    return width * _ITEM_BYTES[record] + (4 if record == "fp8" else 0)
