# SPDX-License-Identifier: Apache-2.0
"""Fetch: planned rows of the host pool into hot slots."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common import Implementation, check, choose, shared
from pallas_kernels.fetch import mosaic_gpu, reference
from pallas_kernels.fetch.tuning import tuning
from pallas_kernels.resolve.types import Plan

__all__ = ["fetch"]


@shared("rows_per_space", "beside", "programs", "implementation")
def fetch(
    pool: Array, hot_rows: Array, plan: Plan, base: Array, space: Array | int, group: Array | int, *,
    rows_per_space: int, beside: bool = False, programs: int | None = None, implementation: Implementation = "auto",
) -> tuple[Array, Plan]:  # fmt: skip
    """Copies every planned row from the host pool to its hot slot.

    `hot_rows[group, base[r] + plan.slot[r, m]] = pool[space * rows_per_space + plan.host_row[r, m]]` for
    `m < plan.count[r]`.

    Args:
      pool: uint32 `[spaces * rows_per_space, words]` in pinned host memory.
      hot_rows: uint32 `[groups, slots, words]` on the device.
      plan: what to copy, from `resolve`.
      base: int32 `[R]`, first slot of each request.
      space: int32 scalar, which space of the pool to read.
      group: int32 scalar, which group of `hot_rows` to write.
      rows_per_space: rows of one space.
      beside: whether the kernel is to run beside compute: then its launch is one that leaves the multiprocessors to
        it, and as few loads are under way as the link needs.
      programs: size of the kernel's persistent grid; the tuned one if not given.
      implementation: "auto", "xla" or "mosaic_gpu".
    Returns:
      The new `hot_rows`, and the plan again, whose `count` exists when all rows are there: a fetch that is given this
      one begins after this fetch, so that two of them don't share the link.
    Raises:
      ValueError: an argument of a wrong shape or dtype, or an implementation that can't run here.
    """
    requests, width = plan.host_row.shape
    check("fetch", "hot_rows", hot_rows, (None, None, None), jnp.uint32)
    check("fetch", "pool", pool, (None, hot_rows.shape[2]), jnp.uint32)
    check("fetch", "plan.host_row", plan.host_row, (None, None), jnp.int32)
    check("fetch", "plan.slot", plan.slot, (requests, width), jnp.int32)
    check("fetch", "plan.count", plan.count, (requests,), jnp.int32)
    check("fetch", "base", base, (requests,), jnp.int32)
    reason = mosaic_gpu.unsupported(hot_rows.shape[2], requests * width)
    chosen = choose(implementation, "fetch", reason)
    args = (pool, hot_rows, plan, base, jnp.asarray(space, jnp.int32), jnp.asarray(group, jnp.int32))
    if chosen == "mosaic_gpu":
        span_bytes = rows_per_space * pool.shape[1] * 4
        how = tuning(requests, span_bytes, beside=beside)
        how = how if programs is None else how._replace(programs=programs)
        rows, count = mosaic_gpu.fetch(*args, rows_per_space=rows_per_space, how=how)
        return rows, plan._replace(count=count)
    return reference.fetch(*args, rows_per_space=rows_per_space), plan
