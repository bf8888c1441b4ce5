# SPDX-License-Identifier: Apache-2.0
"""Index scores: how much each record of the history promises to a query."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common import Implementation, check, choose, shared
from pallas_kernels.index_scores import dsa, mosaic_gpu, reference
from pallas_kernels.index_scores.dsa import key_scores

__all__ = ["dsa_scores", "key_scores", "msa_scores", "quest_scores"]


@shared("implementation")
def quest_scores(
    query: Array, key_min: Array, key_max: Array, layer: Array | int, *, implementation: Implementation = "auto"
) -> Array:
    """Upper bounds of `query . key` over the keys of each page (Quest, arXiv:2406.10774, section 3.2).

    `score[r, g, h, p] = sum_c max(query[r, g, h, c] key_min[layer, r, p, g, c], query[...] key_max[...])`

    Args:
      query: `[R, G, heads, C]`, rotated queries by KV head.
      key_min: `[L, R, pages, G, C]`, channel-wise minimum of the rotated keys of each page.
      key_max: `[L, R, pages, G, C]`, the maximum.
      layer: int32 scalar.
      implementation: "auto", "xla" or "mosaic_gpu".
    Returns:
      float32 `[R, G, heads, pages]`; pages that hold nothing yet give values that mean nothing.
    Raises:
      ValueError: an argument of a wrong shape or dtype, or an implementation that can't run here.
    """
    check("quest_scores", "query", query, (None, None, None, None))
    requests, groups, _, channels = query.shape
    check("quest_scores", "key_min", key_min, (None, requests, None, groups, channels))
    check("quest_scores", "key_max", key_max, key_min.shape, key_min.dtype)
    layer = jnp.asarray(layer, jnp.int32)
    if choose(implementation, "quest_scores", mosaic_gpu.quest_unsupported(query, key_min)) == "mosaic_gpu":
        return mosaic_gpu.quest_scores(query, key_min, key_max, layer)
    return reference.quest_scores(query, key_min, key_max, layer)


@shared("scale", "busy", "implementation")
def dsa_scores(
    query: Array, weight: Array, keys: Array, key_scale: Array | None, layer: Array | int, *, scale: float,
    length: Array | None = None, busy: int | None = None, implementation: Implementation = "auto",
) -> Array:  # fmt: skip
    """Scores of the lightning indexer (DeepSeek-V3.2 report, equation 1).

    `score[r, s] = sum_n weight[r, n] relu(scale query[r, n] . keys[layer, r, s])`

    Args:
      query: `[R, N, D]`, rotated.
      weight: float32 `[R, N]`, may be negative.
      keys: `[L, R, S, D]`, float32, bfloat16 or e4m3.
      key_scale: float32 `[L, R, S]`, what e4m3 keys are multiplied by; None for the other types.
      layer: int32 scalar.
      scale: positive factor of the products.
      length: int32 `[R]`, how many keys of each request count, so that the others needn't be read; None: all.
      busy: about how many requests have a length, for the launch; all of them if None.
      implementation: "auto", "xla" or "mosaic_gpu".
    Returns:
      float32 `[R, S]`; keys past a request's length give values that mean nothing.
    Raises:
      ValueError: an argument of a wrong shape or dtype, or an implementation that can't run here.
    """
    check("dsa_scores", "query", query, (None, None, None))
    requests, heads, channels = query.shape
    check("dsa_scores", "weight", weight, (requests, heads), jnp.float32)
    check("dsa_scores", "keys", keys, (None, requests, None, channels))
    if (keys.dtype == jnp.float8_e4m3fn) != (key_scale is not None):
        raise ValueError(f"dsa_scores: key_scale goes with float8_e4m3fn keys and with no others, got {keys.dtype}")
    if key_scale is not None:
        check("dsa_scores", "key_scale", key_scale, keys.shape[:3], jnp.float32)
    if length is not None:
        check("dsa_scores", "length", length, (requests,), jnp.int32)
    layer = jnp.asarray(layer, jnp.int32)
    if choose(implementation, "dsa_scores", mosaic_gpu.dsa_unsupported(query, keys)) == "mosaic_gpu":
        return mosaic_gpu.dsa_scores(query, weight, keys, key_scale, layer, scale=scale, length=length, busy=busy)
    return dsa.dsa_scores(query, weight, keys, key_scale, layer, scale=scale)


@shared("block_tokens", "implementation")
def msa_scores(
    query: Array, keys: Array, layer: Array | int, length: Array, *, block_tokens: int = 128,
    implementation: Implementation = "auto",
) -> Array:  # fmt: skip
    """Scores of blocks of tokens: the largest `query . key` over the visible tokens of each block (MiniMax MSA).

    `score[r, g, b] = max(query[r, g] . keys[layer, r, s] for s in block b if s < length[r])`

    Args:
      query: `[R, G, D]`, rotated, one index head a KV head.
      keys: `[L, R, S, D]`, rotated, one key head for all index heads; what lies past a length may be anything.
      layer: int32 scalar.
      length: int32 `[R]`, visible tokens of each request.
      block_tokens: of a block; the last block may be shorter.
      implementation: "auto", "xla" or "mosaic_gpu".
    Returns:
      float32 `[R, G, ceil(S / block_tokens)]`, -inf for blocks without a visible token. Forcing the newest blocks is
      left to the selection.
    Raises:
      ValueError: an argument of a wrong shape or dtype, or an implementation that can't run here.
    """
    check("msa_scores", "query", query, (None, None, None))
    requests, _, channels = query.shape
    check("msa_scores", "keys", keys, (None, requests, None, channels))
    check("msa_scores", "length", length, (requests,), jnp.int32)
    if block_tokens < 1:
        raise ValueError(f"msa_scores: block_tokens must be at least 1, got {block_tokens}")
    layer = jnp.asarray(layer, jnp.int32)
    if choose(implementation, "msa_scores", mosaic_gpu.msa_unsupported(query, keys, block_tokens)) == "mosaic_gpu":
        return mosaic_gpu.msa_scores(query, keys, layer, length, block_tokens=block_tokens)
    return reference.msa_scores(query, keys, layer, length, block_tokens=block_tokens)
