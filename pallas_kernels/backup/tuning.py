# SPDX-License-Identifier: Apache-2.0
"""How the backup kernel is launched; measured choices come from `pallas_kernels/tuned`."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.common import tuned


class Tuning(NamedTuple):
    """Launch of backup.

    Attributes:
      programs: persistent grid. A small one leaves the multiprocessors to what runs beside it.
      threads: warpgroups of a program, at most 8.
      in_flight: loads of 16 bytes a lane has under way.
    """

    programs: int = 16
    threads: int = 8
    in_flight: int = 4


def tuning() -> Tuning:
    """The launch for any size."""
    return Tuning(**tuned("backup"))
