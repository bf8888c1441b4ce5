# SPDX-License-Identifier: Apache-2.0
"""Definition of decode attention over selected latent records in `jax.numpy`; also the portable implementation."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.row_format import RowFormat
from pallas_kernels.words import from_words


def read_rows(words: Array, row: RowFormat) -> Array:
    """Rows as numbers: uint32 `[..., words]` to `[..., latent + rope]` of `row.dtype`.

    An fp8 latent is `value * scale` in float32, then rounded to bfloat16.
    """
    if row.record != "fp8":
        return from_words(words, jnp.dtype(row.dtype))[..., : row.width]
    split = [row.latent // 4, row.latent // 4 + row.tiles]
    values, scales, rest = jnp.split(words, split, axis=-1)
    values = from_words(values, jnp.float8_e4m3fn).astype(jnp.float32)
    scales = jnp.repeat(from_words(scales, jnp.float32), row.tile, axis=-1)
    rope = from_words(rest[..., : row.rope // 2], jnp.bfloat16)
    return jnp.concatenate([(values * scales).astype(jnp.bfloat16), rope], axis=-1)


def sparse_mla(
    query: Array, hot_rows: Array, group: Array, place: Array, *, row: RowFormat, scale: float
) -> tuple[Array, Array]:
    """See `pallas_kernels.sparse_mla.sparse_mla`."""
    # The barriers make the program on either side the same whatever the shape of the hot rows, so that two
    # residencies agree to the last bit.
    hot_rows, query = lax.optimization_barrier((hot_rows, query))
    rows = hot_rows.at[group, jnp.maximum(place, 0)].get(mode="clip")
    rows = lax.optimization_barrier(rows)

    shown = place >= 0
    # Zeroed, not only masked: a weight of zero times a stale NaN would be NaN.
    record = jnp.where(shown[..., None], read_rows(rows, row), 0)
    compute = {"preferred_element_type": jnp.float32, "precision": lax.Precision.HIGHEST}
    logits = jnp.einsum("rnc,rkc->rnk", query.astype(record.dtype), record, **compute) * scale
    logits = jnp.where(shown[:, None], logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weight = jnp.exp(logits - top)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    weight = weight / jnp.where(total > 0, total, 1)
    out = jnp.einsum("rnk,rkc->rnc", weight.astype(record.dtype), record[..., : row.latent], **compute)
    return out, (jnp.log(total) + top)[..., 0]
