# SPDX-License-Identifier: Apache-2.0
"""Fetch as a Mosaic GPU kernel: a small persistent grid that replays a plan.

1. every program sums the counts of the requests, so that it knows where each request's rows begin in the whole list;
2. lines of rows are dealt out in turn over all lanes of all programs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import indexed
from pallas_kernels.fetch.tuning import Tuning, tuning
from pallas_kernels.resolve.types import Plan


def fetch(
    pool: Array, hot_rows: Array, plan: Plan, base: Array, space: Array, group: Array, *, rows_per_space: int,
    how: Tuning | None = None,
) -> Array:  # fmt: skip
    """See `pallas_kernels.fetch.fetch`."""
    requests, _ = plan.host_row.shape
    how = how or tuning(pool.shape[1] * 4, requests)
    lanes = how.threads * indexed.LANES
    per_lane = -(-requests // lanes)

    def fetch_kernel(
        host_row_ref: Any, slot_ref: Any, count_ref: Any, base_ref: Any, space_ref: Any, group_ref: Any, pool_ref: Any,
        hot_ref: Any, starts: Any, scratch: Any,
    ) -> None:  # fmt: skip
        program, thread = lax.axis_index("program"), lax.axis_index("thread")
        n = per_lane * indexed.LANES
        request = thread * n + indexed.positions(n)
        request = jnp.where(request < requests, request, -1)
        start, rows = indexed.prefix_sum(scratch, indexed.gather(count_ref, request, 0), threads=how.threads)
        indexed.scatter(starts, request, start)
        indexed.barrier()
        indexed.copy_rows(
            pool_ref, hot_ref.at[group_ref[0]], host_row_ref, slot_ref, rows, program, how.programs,
            threads=how.threads, aligned="source", source_offset=space_ref[0] * rows_per_space,
            in_flight=how.in_flight, starts=starts, base=base_ref,
        )  # fmt: skip

    run = plgpu.kernel(
        fetch_kernel, out_type=(), grid=(how.programs,), grid_names=("program",), num_threads=how.threads,
        thread_name="thread",
        scratch_types=[plgpu.SMEM((requests,), jnp.int32), plgpu.SMEM((indexed.MAX_WARPS,), jnp.int32)],
    )  # fmt: skip
    hot_ref = jax.new_ref(hot_rows)
    run(plan.host_row, plan.slot, plan.count, base, space.reshape(1), group.reshape(1), pool, hot_ref)
    return jax.freeze(hot_ref)


def unsupported(words: int, rows: int) -> str | None:
    """Why the kernel can't take these sizes, or None. `rows`: the most a plan can hold."""
    return indexed.copy_unsupported(words, rows)
