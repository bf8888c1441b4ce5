# SPDX-License-Identifier: Apache-2.0
"""How the top-k kernel is launched: derived from sizes.

The launches that come of it are measured at the benchmark's shapes (docs/kernels_selection.md), no others.
"""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.common import SHARED_BYTES

SHARE = 128  # positions of a program are a multiple of this, so that its bitmaps begin with a whole word
RESIDENT_BYTES = 128 * 1024  # of keys that a program keeps in shared memory
_MULTIPROCESSORS = 132


class Tuning(NamedTuple):
    """Launch of index_topk.

    Attributes:
      programs: of a row (a cluster: at most 8).
      threads: warpgroups of a program, at most 8.
      in_flight: loads of 16 bytes a lane has under way.
      resident: whether the keys of a program are kept in shared memory.
    """

    programs: int = 1
    threads: int = 8
    in_flight: int = 4
    resident: bool = True


def share_of(context: int, programs: int) -> int:
    """Positions that a program covers at most."""
    return -(-context // (programs * SHARE)) * SHARE


def shared_bytes(share: int, *, resident: bool) -> int:
    """Shared memory of a program: histograms, two bitmaps, keys if they are kept, scratch."""
    return 5 * 4096 + share // 4 + 4 * share * resident + 4096


def tuning(rows: int, context: int) -> Tuning:
    """The largest cluster with which all programs run at once; keys are kept where they fit.

    A second wave of programs would cost more than reading the keys again, most likely out of the L2 cache.
    """
    programs = 1
    while programs < 8 and (
        shared_bytes(share_of(context, programs), resident=False) > SHARED_BYTES
        or (2 * rows * programs <= _MULTIPROCESSORS and context >= 8192 * programs)
    ):
        programs *= 2
    return Tuning(programs=programs, resident=4 * share_of(context, programs) <= RESIDENT_BYTES)
