# SPDX-License-Identifier: Apache-2.0
"""How a program of a kernel covers an array in rounds, and puts rows of a wide pool into address order.

Random rows of a wide pool cost address translations. All programs of the grid start together, so when each takes its
rows in address order, all of them sweep the pool in one direction and what is under way at a time lies close together
(docs/kernels.md has figures).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import indexed

MAX_PER_LANE = 4


class Program(NamedTuple):
    """A program's threads, and which of them this one is."""

    threads: int
    thread: Any

    def chunk(self, total: int) -> tuple[int, int]:
        """Elements a thread holds in a round, and the number of rounds, that cover `total` elements."""
        lanes = self.threads * indexed.LANES
        per_lane = 1
        while per_lane < MAX_PER_LANE and per_lane * lanes < total:
            per_lane *= 2
        return per_lane * indexed.LANES, -(-total // (per_lane * lanes))

    def one_round(self, total: int) -> bool:
        return self.chunk(total)[1] == 1

    def places(self, total: int, number: Any) -> Array:
        """int32 `[n]`: which of `total` elements this thread holds in a round, -1 past the end."""
        n, _ = self.chunk(total)
        at = (number * self.threads + self.thread) * n + indexed.positions(n)
        return jnp.where(at < total, at, -1)

    def rounds(self, total: int, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        """`carry = step(number, carry)` over all rounds."""
        if self.one_round(total):
            return step(0, carry)
        return lax.fori_loop(0, self.chunk(total)[1], step, carry)


class Lists(NamedTuple):
    """Shared memory of `in_address_order`: source and target rows of the copy, counters of the buckets, scratch."""

    from_rows: Any
    to_rows: Any
    counts: Any
    scratch: Any

    @staticmethod
    def types(rows: int, buckets: int) -> list[Any]:
        """Scratch types for so many rows."""
        return [
            plgpu.SMEM((rows,), jnp.int32),
            plgpu.SMEM((rows,), jnp.int32),
            plgpu.SMEM((max(buckets, 1),), jnp.int32),
            plgpu.SMEM((indexed.MAX_WARPS,), jnp.int32),
        ]


def in_address_order(
    program: Program, lists: Lists, rows: int, row_at: Callable[[Array], tuple[Array, Array]], *, buckets: int,
    rows_per_space: int,
) -> None:  # fmt: skip
    """Lists the rows of a program by bucket of their address: a histogram, its prefix sum, and places taken from it.

    Args:
      rows: the most there can be.
      row_at: source and target row of place `at` (int32 `[n]`), both -1 where there is none. The ones that exist must
        be the first; which comes first inside a bucket is not determined.
      buckets: how many; 0 keeps the order.
      rows_per_space: source rows are below this.
    """
    held = row_at(program.places(rows, 0)) if program.one_round(rows) else None

    def of(number):
        return held or row_at(program.places(rows, number))

    nothing = jnp.int32(0)

    if not buckets:

        def keep(number: Any, _: Any) -> Any:
            at, (source, target) = program.places(rows, number), of(number)
            indexed.scatter(lists.from_rows, at, source)
            indexed.scatter(lists.to_rows, at, target)
            return _

        program.rounds(rows, keep, nothing)
        indexed.barrier()
        return

    bucket_rows = -(-rows_per_space // buckets)

    def bucket_of(source):
        return jnp.where(source >= 0, lax.div(jnp.maximum(source, 0), jnp.int32(bucket_rows)), -1)

    def count(number: Any, _: Any) -> Any:
        indexed.take(lists.counts, bucket_of(of(number)[0]))
        return _

    def deal(number: Any, _: Any) -> Any:
        source, target = of(number)
        turn = indexed.take(lists.counts, bucket_of(source))
        indexed.scatter(lists.from_rows, turn, source)
        indexed.scatter(lists.to_rows, turn, target)
        return _

    indexed.fill(lists.counts, 0, program.threads)
    indexed.barrier()
    program.rounds(rows, count, nothing)
    indexed.barrier()
    bucket = program.places(buckets, 0)
    start, _ = indexed.prefix_sum(lists.scratch, indexed.gather(lists.counts, bucket, 0), threads=program.threads)
    indexed.scatter(lists.counts, bucket, start)
    indexed.barrier()
    program.rounds(rows, deal, nothing)
    indexed.barrier()
