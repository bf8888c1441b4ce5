# SPDX-License-Identifier: Apache-2.0
"""How the resolve kernel is launched; measured choices come from `pallas_kernels/tuned`."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.common import tuned


class Tuning(NamedTuple):
    """Launch of resolve.

    Attributes:
      programs: of a request (a cluster: at most 8).
      threads: warpgroups of a program, at most 8.
      in_flight: loads of 16 bytes a lane has under way.
      buckets: of host rows, to fetch in address order; 0: in miss order.
      copiers: threads of a program that copy; 0: all.
    """

    programs: int = 1
    threads: int = 8
    in_flight: int = 4
    buckets: int = 0
    copiers: int = 0


def tuning(requests: int, span_bytes: int) -> Tuning:
    """The launch for so many requests, whose rows lie in a space of so many bytes (0 if nothing is fetched)."""
    return Tuning(**tuned("resolve", requests=requests, span_bytes=span_bytes))
