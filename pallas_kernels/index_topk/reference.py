# SPDX-License-Identifier: Apache-2.0
"""Definition of the exact top-k in `jax.numpy`; also the portable implementation."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

_NEVER = jnp.iinfo(jnp.int32).max


def index_topk(scores: Array, length: Array, k: int, *, newest: int = 0) -> Array:
    """See `pallas_kernels.index_topk.index_topk`."""
    context = scores.shape[1]
    position = jnp.arange(context, dtype=jnp.int32)[None]
    length = jnp.minimum(length, context)[:, None]
    others = jnp.maximum(length - newest, 0)
    # top_k orders -0.0 below +0.0; adding +0.0 would mend that, but XLA simplifies the addition away. What isn't
    # visible lies behind what is, so that among scores of -inf the visible ones come first.
    scores = jnp.where(scores == 0, 0.0, scores)
    visible = jnp.where(position < others, scores, -jnp.inf)
    _, best = lax.top_k(visible, min(k - newest, context))
    last = others + jnp.arange(newest, dtype=jnp.int32)[None]
    ids = jnp.concatenate([jnp.where(best < others, best, _NEVER), jnp.where(last < length, last, _NEVER)], axis=-1)
    ids = jnp.sort(ids, axis=-1)
    ids = jnp.where(ids == _NEVER, -1, ids)
    return jnp.pad(ids, ((0, 0), (0, k - ids.shape[1])), constant_values=-1)
