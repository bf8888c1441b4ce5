# SPDX-License-Identifier: Apache-2.0
"""Variants of a decode chunk, timed in one process: all are lowered, then compiled several at a time, then timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jax import Array

from hisparse_jax.simulated import Point, Share
from hisparse_jax.throughput import LoweredPoint, Pool, compile_all, compilers, time_point

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


def times(variants: list[Variant], params: list[Array]) -> Iterator[dict[str, Any]]:
    """Context, requests, mode, label and `KEPT` of every variant, as it is timed; all are compiled before the first."""
    with compilers() as threads:
        compiled = list(compile_all(((variant.point.requests, variant.lowered) for variant in variants), threads))
    pool = Pool()
    for variant, programs in zip(variants, compiled, strict=True):
        record = time_point(variant.share, variant.point, programs.result(), params, pool, Path())
        yield dataclasses.asdict(variant.point) | variant.label | {name: record[name] for name in KEPT}
