# SPDX-License-Identifier: Apache-2.0
"""Index scores: how much each record of the history promises to a query."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common import Implementation, check, choose
from pallas_kernels.index_scores import reference

__all__ = ["quest_scores"]


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
    choose(implementation, "quest_scores")
    return reference.quest_scores(query, key_min, key_max, jnp.asarray(layer, jnp.int32))
