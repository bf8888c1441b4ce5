# SPDX-License-Identifier: Apache-2.0
"""Definition of the exact top-k in `jax.numpy`; also the portable implementation."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

_NEVER = jnp.iinfo(jnp.int32).max


def index_topk(scores: Array, length: Array, k: int) -> Array:
    """See `pallas_kernels.index_topk.index_topk`."""
    position = jnp.arange(scores.shape[1], dtype=jnp.int32)[None]
    # top_k orders -0.0 below +0.0; adding +0.0 would mend that, but XLA simplifies the addition away. What isn't
    # visible lies behind what is, so that among scores of -inf the visible ones come first.
    scores = jnp.where(scores == 0, 0.0, scores)
    visible = jnp.where(position < length[:, None], scores, -jnp.inf)
    _, best = lax.top_k(visible, min(k, scores.shape[1]))
    best = jnp.sort(jnp.where(best < length[:, None], best, _NEVER), axis=-1)
    best = jnp.where(best == _NEVER, -1, best)
    return jnp.pad(best, ((0, 0), (0, k - best.shape[1])), constant_values=-1)
