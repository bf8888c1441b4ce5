# SPDX-License-Identifier: Apache-2.0
"""Definition of the lightning indexer's scores in `jax.numpy`; also the portable implementation."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def key_scores(query: Array, weight: Array, keys: Array, key_scale: Array | None, *, scale: float) -> Array:
    """Scores of some keys for some queries that see the same keys.

    Args:
      query: `[B..., N, D]`, rotated.
      weight: float32 `[B..., N]`.
      keys: `[B..., S, D]`, or `[S, D]`, the same for all queries.
      key_scale: float32 `[B..., S]` or `[S]` for e4m3 keys, else None.
      scale: positive factor of the products.
    Returns:
      float32 `[B..., S]`.
    """
    # e4m3 values are exact in either type of query.
    query, keys = (query, keys.astype(query.dtype)) if key_scale is not None else (query.astype(keys.dtype), keys)
    compute = {"preferred_element_type": jnp.float32, "precision": lax.Precision.HIGHEST}
    product = jnp.maximum(jnp.einsum("...nd,...sd->...ns", query, keys, **compute) * scale, 0)
    score = jnp.einsum("...n,...ns->...s", weight, product, **compute)
    return score if key_scale is None else score * jnp.broadcast_to(key_scale, score.shape)


def dsa_scores(
    query: Array, weight: Array, keys: Array, key_scale: Array | None, layer: Array, *, scale: float
) -> Array:
    """See `pallas_kernels.index_scores.dsa_scores`."""
    return key_scores(query, weight, keys[layer], None if key_scale is None else key_scale[layer], scale=scale)
