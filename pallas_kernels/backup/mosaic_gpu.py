# SPDX-License-Identifier: Apache-2.0
"""Backup as a Mosaic GPU kernel. The host ref is the only thing it writes: with another output, XLA's host offloader
moves the buffer (or the compute) instead of aliasing it, so this stays a kernel of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import indexed
from pallas_kernels.backup.tuning import Tuning, tuning
from pallas_kernels.common import HOST


def backup(pool: Array, rows: Array, host_row: Array, *, how: Tuning | None = None) -> Array:
    """See `pallas_kernels.backup.backup`."""
    how = how or tuning()

    def backup_kernel(rows_ref: Any, host_row_ref: Any, pool_ref: Any) -> None:
        program = lax.axis_index("program")
        indexed.copy_rows(
            rows_ref, pool_ref, None, host_row_ref, jnp.int32(rows.shape[0]), program, how.programs,
            threads=how.threads, aligned="target", in_flight=how.in_flight,
        )  # fmt: skip

    run = plgpu.kernel(
        backup_kernel,
        out_type=(),
        grid=(how.programs,),
        grid_names=("program",),
        num_threads=how.threads,
        thread_name="thread",
    )
    on_host = jax.typeof(pool).memory_space == HOST  # the interpreter has no host memory
    ref = jax.new_ref(pool, memory_space=HOST) if on_host else jax.new_ref(pool)
    run(rows, host_row, ref)
    new = jax.freeze(ref)
    return jax.device_put(new, HOST) if on_host else new


def unsupported(words: int, rows: int) -> str | None:
    """Why the kernel can't take these sizes, or None."""
    return indexed.copy_unsupported(words, rows)
