# SPDX-License-Identifier: Apache-2.0
"""Definition of decode attention over selected records in `jax.numpy`; also the portable implementation."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.row_format import RecordType, RowFormat
from pallas_kernels.words import from_words

ENTRY_ROPE, ENTRY_TILE = 64, 64  # of an fp8 entry: numbers that stay bfloat16, and values that share a scale


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


def entry_bytes(width: int, record: RecordType) -> int:
    """Bytes of a compressed entry of `width` numbers: key and value at once; see `read_entries`."""
    if record != "fp8":
        return width * (4 if record == "float32" else 2)
    values = width - ENTRY_ROPE
    return values + 2 * ENTRY_ROPE + -(-values // ENTRY_TILE // 8) * 8


def read_entries(words: Array, width: int, record: RecordType) -> Array:
    """Entries as numbers: uint32 `[..., words]` to `[..., width]`, float32 or (fp8 too) bfloat16.

    An fp8 entry holds all but the last 64 numbers in e4m3, those 64 in bfloat16, and an e8m0 scale for each 64 values,
    zero-padded to a multiple of 8 bytes: 448 + 128 + 8 = 584 bytes at the published width of 512.
    """
    if record != "fp8":
        return from_words(words, jnp.dtype(record))
    values = width - ENTRY_ROPE
    value_words, rope_words, scale_words = jnp.split(words, [values // 4, values // 4 + ENTRY_ROPE // 2], axis=-1)
    exponent = from_words(scale_words, jnp.uint8)[..., : values // ENTRY_TILE].astype(jnp.uint32)
    # 2 ** (exponent - 127) by its bits; the smallest is no normal number, and 255 is no number.
    bits = jnp.where(exponent == 0, jnp.uint32(1 << 22), exponent << 23)
    scale = lax.bitcast_convert_type(jnp.where(exponent == 255, jnp.uint32(0x7FC00000), bits), jnp.float32)
    numbers = from_words(value_words, jnp.float8_e4m3fn).astype(jnp.float32) * jnp.repeat(scale, ENTRY_TILE, axis=-1)
    return jnp.concatenate([numbers.astype(jnp.bfloat16), from_words(rope_words, jnp.bfloat16)], axis=-1)


def sparse_mla(
    query: Array, hot_rows: Array, group: Array, place: Array, *, row: RowFormat, scale: float,
    out_dtype: DTypeLike = jnp.float32,
) -> tuple[Array, Array]:  # fmt: skip
    """See `pallas_kernels.sparse_mla.sparse_mla`."""
    # The barriers make the program on either side the same whatever the shape of the hot rows, so that two
    # residencies agree to the last bit.
    hot_rows, query = lax.optimization_barrier((hot_rows, query))
    rows = lax.optimization_barrier(_rows_at(hot_rows, group, place))
    out, total = _attend(query, read_rows(rows, row), place >= 0, None, latent=row.latent, scale=scale)
    return out.astype(out_dtype), total


def sparse_entries(
    query: Array, hot_rows: Array, group: Array, place: Array, window_rows: Array, window_group: Array,
    window_place: Array, sink: Array, *, record: RecordType, scale: float,
) -> tuple[Array, Array]:  # fmt: skip
    """See `pallas_kernels.sparse_mla.sparse_entries`."""
    hot_rows, window_rows, query = lax.optimization_barrier((hot_rows, window_rows, query))
    both = _rows_at(hot_rows, group, place), _rows_at(window_rows, window_group, window_place)
    rows = jnp.concatenate(lax.optimization_barrier(both), axis=1)
    shown = jnp.concatenate([place, window_place], axis=1) >= 0
    width = query.shape[2]
    return _attend(query, read_entries(rows, width, record), shown, sink, latent=width, scale=scale)


def _rows_at(hot_rows: Array, group: Array, place: Array) -> Array:
    return hot_rows.at[group, jnp.maximum(place, 0)].get(mode="clip")


def _attend(
    query: Array, record: Array, shown: Array, sink: Array | None, *, latent: int, scale: float
) -> tuple[Array, Array]:
    # Zeroed, not only masked: a weight of zero times a stale NaN would be NaN.
    record = jnp.where(shown[..., None], record, 0)
    compute = {"preferred_element_type": jnp.float32, "precision": lax.Precision.HIGHEST}
    logits = jnp.einsum("rnc,rkc->rnk", query.astype(record.dtype), record, **compute) * scale
    logits = jnp.where(shown[:, None], logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    if sink is not None:
        top = jnp.maximum(top, sink[None, :, None])
    top = jnp.where(jnp.isfinite(top), top, 0)
    weight = jnp.exp(logits - top)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink[None, :, None] - top)
    weight = weight / jnp.where(total > 0, total, 1)
    out = jnp.einsum("rnk,rkc->rnc", weight.astype(record.dtype), record[..., :latent], **compute)
    return out, (jnp.log(total) + top)[..., 0]
