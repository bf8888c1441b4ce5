# SPDX-License-Identifier: Apache-2.0
"""Definition of decode attention over selected pages in `jax.numpy`; also the portable implementation."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.words import from_words


def sparse_gqa(
    query: Array, hot_rows: Array, group: Array, place: Array, visible: Array, head_mask: Array | None, *, scale: float,
    dtype: jnp.dtype, out_dtype: DTypeLike = jnp.float32,
) -> tuple[Array, Array]:  # fmt: skip
    """See `pallas_kernels.sparse_gqa.sparse_gqa`."""
    requests, kv_heads, _, channels = query.shape
    records = place.shape[1]
    # The barriers make the program on either side the same whatever the shape of the hot rows, so that two
    # residencies agree to the last bit.
    hot_rows, query = lax.optimization_barrier((hot_rows, query))
    rows = hot_rows.at[group, jnp.maximum(place, 0)].get(mode="clip")
    rows = lax.optimization_barrier(rows)

    kv = from_words(rows, dtype).reshape(requests, records, -1, 2, kv_heads, channels)
    tokens = kv.shape[2]
    shown = (jnp.arange(tokens)[None, None] < visible[..., None]) & (place >= 0)[..., None]
    # Zeroed, not only masked: a weight of zero times a stale NaN would be NaN.
    kv = jnp.where(shown[..., None, None, None], kv, 0)
    key, value = kv[:, :, :, 0], kv[:, :, :, 1]

    shown = shown[:, None, None] if head_mask is None else shown[:, None, None] & head_mask[..., None]
    compute = {"preferred_element_type": jnp.float32, "precision": lax.Precision.HIGHEST}
    logits = jnp.einsum("rghc,rktgc->rghkt", query.astype(dtype), key, **compute) * scale
    logits = jnp.where(shown, logits, -jnp.inf)
    top = jnp.max(logits, axis=(-2, -1), keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weight = jnp.exp(logits - top)
    total = jnp.sum(weight, axis=(-2, -1), keepdims=True)
    weight = weight / jnp.where(total > 0, total, 1)
    out = jnp.einsum("rghkt,rktgc->rghc", weight.astype(dtype), value, **compute)
    return out.astype(out_dtype), (jnp.log(total) + top)[..., 0, 0]
