# SPDX-License-Identifier: Apache-2.0
"""How the fetch kernel is launched; measured choices come from `pallas_kernels/tuned`."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.common import tuned


class Tuning(NamedTuple):
    """Launch of fetch.

    Attributes:
      programs: persistent grid. A small one leaves the multiprocessors to what runs beside it.
      threads: warpgroups of a program, at most 8.
      in_flight: loads of 16 bytes a lane has under way.
      buckets: of host rows, to fetch in address order; 0: in the order of the plan.
    """

    programs: int = 16
    threads: int = 8
    in_flight: int = 4
    buckets: int = 0


def tuning(requests: int, span_bytes: int, *, beside: bool = False) -> Tuning:
    """The launch for so many requests and rows in a space of so many bytes; `beside`: one that runs beside compute."""
    return Tuning(**tuned("fetch_beside" if beside else "fetch", requests=requests, span_bytes=span_bytes))
