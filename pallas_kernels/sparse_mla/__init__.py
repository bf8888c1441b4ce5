# SPDX-License-Identifier: Apache-2.0
"""Decode attention of all heads over selected latent records (MLA in absorbed form)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common import Implementation, check, choose
from pallas_kernels.row_format import RowFormat
from pallas_kernels.sparse_mla import mosaic_gpu, reference
from pallas_kernels.sparse_mla.reference import read_rows

__all__ = ["RowFormat", "read_rows", "sparse_mla"]


def sparse_mla(
    query: Array, hot_rows: Array, group: Array | int, place: Array, *, row: RowFormat, scale: float,
    implementation: Implementation = "auto",
) -> tuple[Array, Array]:  # fmt: skip
    """Softmax attention of every head over the same selected records, read where they lie.

    `logit[r, n, k] = scale query[r, n] . record[r, k]` and `out[r, n] = sum_k softmax(logit)[k] latent[r, k]`, where
    the latent is the first part of the record. Places of -1 contribute nothing, whatever bytes lie there.

    Args:
      query: `[R, N, latent + rope]`: the query times the key part of the up-projection, then its rotated part.
      hot_rows: uint32 `[groups, slots, words]`.
      group: int32 scalar, which group of `hot_rows` to read.
      place: int32 `[R, K]`, slot of each selected record in `hot_rows`, or -1.
      row: how a record is stored; products are of `row.dtype`, sums are float32.
      scale: factor of the logits.
      implementation: "auto", "xla" or "mosaic_gpu". The kernel has bfloat16 and fp8 records of 512 + 64 numbers.
    Returns:
      float32 `[R, N, latent]`, zero where nothing is attended, and the log-sum-exp of the logits, float32 `[R, N]`,
      -inf there.
    Raises:
      ValueError: an argument of a wrong shape or dtype, or an implementation that can't run here.
    """
    check("sparse_mla", "query", query, (None, None, row.width))
    check("sparse_mla", "hot_rows", hot_rows, (None, None, row.words), jnp.uint32)
    check("sparse_mla", "place", place, (query.shape[0], None), jnp.int32)
    reason = mosaic_gpu.unsupported(query, place, row)
    run = mosaic_gpu if choose(implementation, "sparse_mla", reason) == "mosaic_gpu" else reference
    return run.sparse_mla(query, hot_rows, jnp.asarray(group, jnp.int32), place, row=row, scale=scale)
