# SPDX-License-Identifier: Apache-2.0
"""Definitions of the scores of pages and blocks in `jax.numpy`; also the portable implementations."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def quest_scores(query: Array, key_min: Array, key_max: Array, layer: Array) -> Array:
    """See `pallas_kernels.index_scores.quest_scores`."""
    low, high = (x[layer].astype(jnp.float32) for x in (key_min, key_max))
    query = query.astype(jnp.float32)
    # max(q lo, q hi) = relu(q) hi - relu(-q) lo, so the bound is two matrix products.
    up, down = jnp.maximum(query, 0), jnp.minimum(query, 0)
    highest = lax.Precision.HIGHEST
    return jnp.einsum("rghc,rpgc->rghp", up, high, precision=highest) + jnp.einsum(
        "rghc,rpgc->rghp", down, low, precision=highest
    )


def msa_scores(query: Array, keys: Array, layer: Array, length: Array, *, block_tokens: int) -> Array:
    """See `pallas_kernels.index_scores.msa_scores`."""
    keys = keys[layer]
    compute = {"preferred_element_type": jnp.float32, "precision": lax.Precision.HIGHEST}
    score = jnp.einsum("rgd,rsd->rgs", query.astype(keys.dtype), keys, **compute)
    visible = jnp.arange(keys.shape[1])[None] < length[:, None]
    score = jnp.where(visible[:, None], score, -jnp.inf)
    score = jnp.pad(score, ((0, 0), (0, 0), (0, -keys.shape[1] % block_tokens)), constant_values=-jnp.inf)
    return jnp.max(score.reshape(*score.shape[:2], -1, block_tokens), axis=3)
