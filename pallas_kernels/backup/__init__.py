# SPDX-License-Identifier: Apache-2.0
"""Backup: device rows to their places in the host pool."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.backup import mosaic_gpu, reference
from pallas_kernels.common import Implementation, check, choose, shared

__all__ = ["backup"]


@shared("implementation")
def backup(pool: Array, rows: Array, host_row: Array, *, implementation: Implementation = "auto") -> Array:
    """Copies rows to the host pool: `pool[host_row[n]] = rows[n]`; `host_row` -1 writes nothing.

    Args:
      pool: uint32 `[pool rows, words]` in pinned host memory.
      rows: uint32 `[N, words]` on the device.
      host_row: int32 `[N]`, unique rows of the pool (space included), or -1.
      implementation: "auto", "xla" or "mosaic_gpu".
    Returns:
      The new pool, in pinned host memory.
    Raises:
      ValueError: an argument of a wrong shape or dtype, or an implementation that can't run here.
    """
    check("backup", "pool", pool, (None, None), jnp.uint32)
    check("backup", "rows", rows, (None, pool.shape[1]), jnp.uint32)
    check("backup", "host_row", host_row, (rows.shape[0],), jnp.int32)
    chosen = choose(implementation, "backup", mosaic_gpu.unsupported(*reversed(rows.shape)))
    return (mosaic_gpu if chosen == "mosaic_gpu" else reference).backup(pool, rows, host_row)
