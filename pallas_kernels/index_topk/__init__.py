# SPDX-License-Identifier: Apache-2.0
"""Exact top-k of index scores, as ascending ids."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common import Implementation, check, choose, shared
from pallas_kernels.index_topk import mosaic_gpu, reference

__all__ = ["index_topk"]


@shared("k", "newest", "busy", "implementation")
def index_topk(
    scores: Array, length: Array, k: int, *, newest: int = 0, busy: int | None = None,
    implementation: Implementation = "auto",
) -> Array:  # fmt: skip
    """The ids of the k largest scores of each row, ascending, padded with -1.

    Exact; equal scores go to the lower id, and -0.0 equals +0.0. A row shorter than k gives all its ids.

    Args:
      scores: float32 `[R, S]`, no NaN among the first `length - newest` of a row.
      length: int32 `[R]`, how many scores of each row count.
      k: how many to choose, at least 1.
      newest: how many of the k are the last ids below `length`, whatever their scores; fewer than k.
      busy: about how many rows have a length, for the launch; all of them if None.
      implementation: "auto", "xla" or "mosaic_gpu".
    Returns:
      int32 `[R, k]`.
    Raises:
      ValueError: an argument of a wrong shape or dtype, or an implementation that can't run here.
    """
    check("index_topk", "scores", scores, (None, None), jnp.float32)
    check("index_topk", "length", length, (scores.shape[0],), jnp.int32)
    if k < 1:
        raise ValueError(f"index_topk: k must be at least 1, got {k}")
    if not 0 <= newest < k:
        raise ValueError(f"index_topk: newest must be at least 0 and less than k = {k}, got {newest}")
    reason = mosaic_gpu.unsupported(scores.shape[1])
    if choose(implementation, "index_topk", reason) == "mosaic_gpu":
        return mosaic_gpu.index_topk(scores, length, k, newest=newest, busy=busy)
    return reference.index_topk(scores, length, k, newest=newest)
