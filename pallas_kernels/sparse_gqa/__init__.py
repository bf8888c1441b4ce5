# SPDX-License-Identifier: Apache-2.0
"""Decode attention of grouped query heads over selected pages of keys and values."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.common import Implementation, check, choose, shared
from pallas_kernels.sparse_gqa import mosaic_gpu, reference

__all__ = ["sparse_gqa"]


@shared("scale", "dtype", "out_dtype", "implementation")
def sparse_gqa(
    query: Array, hot_rows: Array, group: Array | int, place: Array, visible: Array, head_mask: Array | None = None, *,
    scale: float, dtype: DTypeLike, out_dtype: DTypeLike = jnp.float32, implementation: Implementation = "auto",
) -> tuple[Array, Array]:  # fmt: skip
    """Softmax attention over the tokens of the selected records, read where they lie.

    A record holds its tokens one after the other, each as `[key, value]` of all KV heads: `[tokens, 2, G, C]` of
    `dtype`. Places of -1 and tokens from `visible` on contribute nothing, whatever bytes lie there. Where each KV head
    selects records of its own (blocks of MSA), a record is that of one head and a row is a pair (request, KV head):
    `query.reshape(R * G, 1, heads, C)`, and places and visible tokens alike.

    Args:
      query: `[R, G, heads, C]`, rotated queries by KV head.
      hot_rows: uint32 `[groups, slots, words]`.
      group: int32 scalar, which group of `hot_rows` to read.
      place: int32 `[R, K]`, slot of each selected record in `hot_rows`, or -1.
      visible: int32 `[R, K]`, how many tokens of each record the query may see.
      head_mask: bool `[R, G, heads, K]`, the records each query head attends to; all of them if not given.
      scale: factor of the logits.
      dtype: type of the stored keys and values.
      out_dtype: that the float32 result is rounded to.
      implementation: "auto", "xla" or "mosaic_gpu". The kernel has bfloat16 records and heads of 128 channels.
    Returns:
      `[R, G, heads, C]` of `out_dtype`, zero where nothing is attended, and the log-sum-exp of the logits, float32
      `[R, G, heads]`, -inf there.
    Raises:
      ValueError: an argument of a wrong shape or dtype, or an implementation that can't run here.
    """
    check("sparse_gqa", "query", query, (None, None, None, None))
    check("sparse_gqa", "hot_rows", hot_rows, (None, None, None), jnp.uint32)
    requests, kv_heads, heads, channels = query.shape
    check("sparse_gqa", "place", place, (requests, None), jnp.int32)
    check("sparse_gqa", "visible", visible, place.shape, jnp.int32)
    if head_mask is not None:
        check("sparse_gqa", "head_mask", head_mask, (requests, kv_heads, heads, place.shape[1]), jnp.bool_)
    token_bytes = 2 * kv_heads * channels * jnp.dtype(dtype).itemsize
    if hot_rows.shape[2] * 4 % token_bytes:
        raise ValueError(
            f"sparse_gqa: a record of hot_rows has {hot_rows.shape[2] * 4} bytes, not a multiple of the {token_bytes} "
            f"bytes of one token (2 x {kv_heads} KV heads x {channels} channels of {jnp.dtype(dtype)})"
        )
    reason = mosaic_gpu.unsupported(query, hot_rows, place, jnp.dtype(dtype), masked=head_mask is not None)
    args = query, hot_rows, jnp.asarray(group, jnp.int32), place, visible, head_mask
    if choose(implementation, "sparse_gqa", reason) == "mosaic_gpu":
        return mosaic_gpu.sparse_gqa(*args, scale=scale, out_dtype=out_dtype)
    return reference.sparse_gqa(*args, scale=scale, dtype=jnp.dtype(dtype), out_dtype=out_dtype)
