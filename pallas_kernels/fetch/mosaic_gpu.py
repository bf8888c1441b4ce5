# SPDX-License-Identifier: Apache-2.0
"""Fetch as a Mosaic GPU kernel: a small persistent grid that replays a plan.

1. every program sums the counts of the requests, so that it knows where each request's rows begin in the whole list;
2. program p takes the rows m = p modulo the grid, so many at a time that their list fits in shared memory;
3. the lanes of the program copy the lines of the listed rows, in address order where the pool is wide.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import indexed
from pallas_kernels.fetch.tuning import Tuning, tuning
from pallas_kernels.program import Lists, Program, in_address_order
from pallas_kernels.resolve.types import Plan

LISTED = 2048  # rows in one list


def fetch(
    pool: Array, hot_rows: Array, plan: Plan, base: Array, space: Array, group: Array, *, rows_per_space: int,
    how: Tuning | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """See `pallas_kernels.fetch.fetch`; the counts of the plan instead of the plan."""
    requests, width = plan.host_row.shape
    how = how or tuning(requests, rows_per_space * pool.shape[1] * 4)
    programs = how.programs

    def fetch_kernel(
        host_row_ref: Any, slot_ref: Any, count_ref: Any, base_ref: Any, space_ref: Any, group_ref: Any, pool_ref: Any,
        hot_ref: Any, done_ref: Any, starts: Any, *lists: Any,
    ) -> None:  # fmt: skip
        number, program = lax.axis_index("program"), Program(how.threads, lax.axis_index("thread"))
        lists = Lists(*lists)

        def sum_counts(chunk: Any, before: Array) -> Array:
            request = program.places(requests, chunk)
            count = indexed.gather(count_ref, request, 0)
            start, total = indexed.prefix_sum(lists.scratch, count, threads=how.threads)
            indexed.scatter(starts, request, before + start)

            @pl.when(number == 0)
            def _done() -> None:
                indexed.scatter(done_ref, request, count)

            indexed.barrier()
            return before + total

        rows = program.rounds(requests, sum_counts, jnp.int32(0))
        share = lax.div(rows - number + (programs - 1), jnp.int32(programs))

        def copy(turn: Array, _: Array) -> Array:
            def row_at(at: Array) -> tuple[Array, Array]:
                at = turn * LISTED + at
                m = jnp.where((at >= turn * LISTED) & (at < share), at * programs + number, -1)
                request = indexed.search_last(starts, m)
                place = request * width + m - indexed.gather(starts, request, 0)
                place = jnp.where(m >= 0, place, -1)
                slot = indexed.gather(slot_ref, place)
                return indexed.gather(host_row_ref, place), slot + indexed.gather(base_ref, request, 0)

            in_address_order(program, lists, LISTED, row_at, buckets=how.buckets, rows_per_space=rows_per_space)
            indexed.copy_rows(
                pool_ref, hot_ref.at[group_ref[0]], lists.from_rows, lists.to_rows,
                jnp.minimum(share - turn * LISTED, LISTED), threads=how.threads, aligned="source",
                source_offset=space_ref[0] * rows_per_space, in_flight=how.in_flight,
            )  # fmt: skip
            indexed.barrier()
            return _

        lax.fori_loop(0, lax.div(share + (LISTED - 1), jnp.int32(LISTED)), copy, jnp.int32(0))

    run = plgpu.kernel(
        fetch_kernel, out_type=jax.ShapeDtypeStruct((requests,), jnp.int32), grid=(programs,), grid_names=("program",),
        num_threads=how.threads, thread_name="thread",
        scratch_types=[plgpu.SMEM((requests,), jnp.int32), *Lists.types(LISTED, how.buckets)],
    )  # fmt: skip
    hot_ref = jax.new_ref(hot_rows)
    flat = plan.host_row.reshape(-1), plan.slot.reshape(-1), plan.count
    done = run(*flat, base, space.reshape(1), group.reshape(1), pool, hot_ref)
    return jax.freeze(hot_ref), done


def unsupported(words: int, rows: int) -> str | None:
    """Why the kernel can't take these sizes, or None. `rows`: the most a plan can hold."""
    return indexed.copy_unsupported(words, rows)
