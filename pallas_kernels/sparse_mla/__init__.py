# SPDX-License-Identifier: Apache-2.0
"""Decode attention of all heads over selected records: latents (MLA in absorbed form), and compressed entries with a
sliding window (DeepSeek-V4)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.common import Implementation, check, choose, shared
from pallas_kernels.row_format import RecordType, RowFormat
from pallas_kernels.sparse_mla import mosaic_gpu, reference
from pallas_kernels.sparse_mla.reference import entry_bytes, read_entries, read_rows

__all__ = ["RowFormat", "entry_bytes", "read_entries", "read_rows", "sparse_entries", "sparse_mla"]


@shared("row", "scale", "out_dtype", "implementation")
def sparse_mla(
    query: Array, hot_rows: Array, group: Array | int, place: Array, *, row: RowFormat, scale: float,
    out_dtype: DTypeLike = jnp.float32, implementation: Implementation = "auto",
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
      out_dtype: that the float32 result is rounded to.
      implementation: "auto", "xla" or "mosaic_gpu". The kernel has bfloat16 and fp8 records of 512 + 64 numbers.
    Returns:
      `[R, N, latent]` of `out_dtype`, zero where nothing is attended, and the log-sum-exp of the logits, float32
      `[R, N]`, -inf there.
    Raises:
      ValueError: an argument of a wrong shape or dtype, or an implementation that can't run here.
    """
    check("sparse_mla", "query", query, (None, None, row.width))
    check("sparse_mla", "hot_rows", hot_rows, (None, None, row.words), jnp.uint32)
    check("sparse_mla", "place", place, (query.shape[0], None), jnp.int32)
    reason = mosaic_gpu.unsupported(query, place, row)
    run = mosaic_gpu if choose(implementation, "sparse_mla", reason) == "mosaic_gpu" else reference
    return run.sparse_mla(
        query, hot_rows, jnp.asarray(group, jnp.int32), place, row=row, scale=scale, out_dtype=out_dtype
    )


@shared("record", "scale", "implementation")
def sparse_entries(
    query: Array, hot_rows: Array, group: Array | int, place: Array, window_rows: Array, window_group: Array | int,
    window_place: Array, sink: Array, *, record: RecordType, scale: float, implementation: Implementation = "auto",
) -> tuple[Array, Array]:  # fmt: skip
    """Softmax attention of every head over selected entries, a window of tokens and a sink, read where they lie.

    Entries and tokens alike are `width` numbers that are key and value at once, and all heads share them:
    `out[r, n] = sum_k p[k] record[r, k]`, `p = softmax([scale query[r, n] . record[r, k] for k..., sink[n]])`. A sink
    has no value, and is -inf for a head that has none. Places of -1 contribute nothing, whatever bytes lie there; there
    may be no entries or no window, `[R, 0]`.

    Args:
      query: `[R, N, width]`.
      hot_rows: uint32 `[groups, slots, words]`, the entries.
      group: int32 scalar, which group of `hot_rows` to read.
      place: int32 `[R, K]`, slot of each selected entry in `hot_rows`, or -1.
      window_rows, window_group, window_place: the tokens of the window, likewise.
      sink: float32 `[N]`, a logit for each head.
      record: how a record is stored; see `read_entries`. Products are of float32 or bfloat16, sums are float32.
      scale: factor of the logits of records.
      implementation: "auto", "xla" or "mosaic_gpu". The kernel has bfloat16 records of 512 numbers.
    Returns:
      float32 `[R, N, width]`, zero where nothing is attended, and the log-sum-exp of the logits and the sink, float32
      `[R, N]`.
    Raises:
      ValueError: an argument of a wrong shape or dtype, or an implementation that can't run here.
    """
    check("sparse_entries", "query", query, (None, None, None))
    requests, heads, width = query.shape
    if record == "fp8" and (width <= reference.ENTRY_ROPE or width % reference.ENTRY_TILE):
        raise ValueError(f"sparse_entries: fp8 entries have a multiple of 64 numbers and at least 128, got {width}")
    words = entry_bytes(width, record) // 4
    check("sparse_entries", "hot_rows", hot_rows, (None, None, words), jnp.uint32)
    check("sparse_entries", "place", place, (requests, None), jnp.int32)
    check("sparse_entries", "window_rows", window_rows, (None, None, words), jnp.uint32)
    check("sparse_entries", "window_place", window_place, (requests, None), jnp.int32)
    check("sparse_entries", "sink", sink, (heads,), jnp.float32)
    reason = mosaic_gpu.unsupported_entries(query, place, window_place, record)
    run = mosaic_gpu if choose(implementation, "sparse_entries", reason) == "mosaic_gpu" else reference
    group, window_group = jnp.asarray(group, jnp.int32), jnp.asarray(window_group, jnp.int32)
    return run.sparse_entries(
        query, hot_rows, group, place, window_rows, window_group, window_place, sink, record=record, scale=scale
    )
