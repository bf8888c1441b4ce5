# SPDX-License-Identifier: Apache-2.0
"""Definitions of the index scores in `jax.numpy`; also the portable implementation."""

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
