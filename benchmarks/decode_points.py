# SPDX-License-Identifier: Apache-2.0
"""Variants of a decode chunk, timed in one process: all are lowered, then compiled several at a time, then timed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jax import Array

from hisparse_jax.simulated import Point, Share
from hisparse_jax.throughput import LoweredPoint, Pool, Programs, time_point

KEPT = ("step_ms", "step_ms_samples", "miss_rate", "tokens")


class Variant(NamedTuple):
    """One program to time.

    Attributes:
      label: what tells it from the others, for its record.
      share: of a model.
      point: what is decoded.
      lowered: its program.
    """

    label: dict[str, Any]
    share: Share
    point: Point
    lowered: LoweredPoint


def times(variants: list[Variant], params: list[Array]) -> list[dict[str, Any]]:
    """Label, requests, mode and `KEPT` of every variant; the first of a concurrency is compiled before the others."""
    first: dict[int, Future[Programs]] = {}
    compiled = []
    with ThreadPoolExecutor(8) as compilers:
        for variant in variants:
            compiled.append(compilers.submit(variant.lowered.compile, first.get(variant.point.requests)))
            first.setdefault(variant.point.requests, compiled[-1])
    pool, records = Pool(), []
    for variant, programs in zip(variants, compiled, strict=True):
        record = time_point(variant.share, variant.point, programs.result(), params, pool, Path())
        who = {"requests": variant.point.requests, "mode": variant.point.mode}
        records.append(who | variant.label | {name: record[name] for name in KEPT})
    return records
