# SPDX-License-Identifier: Apache-2.0
"""Records of multi-head latent attention as bytes: what is written is what both residencies attend to."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.row_format import RowFormat
from pallas_kernels.sparse_mla import read_rows
from pallas_kernels.words import to_words

__all__ = ["RowFormat", "quantise_keys", "quantise_latent", "read_rows", "write_rows"]

_SMALLEST_LATENT_EXPONENT = -13  # ceil(log2(1e-4)), the floor of a latent's scale
_SMALLEST_KEY = 1e-4  # the floor of an index key's largest value


def scale_exponent(largest: Array) -> Array:
    """`ceil(log2(largest / 448))` as int32, from the bits of the float32 number.

    448 = 1.75 * 2^8 is the largest e4m3 number. Exact, where `exp2(ceil(log2(x)))` isn't under jit.
    """
    bits = lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.int32)
    exponent, mantissa = (bits >> 23) - 127, bits & 0x7FFFFF
    return exponent - 8 + (mantissa > 0x600000).astype(jnp.int32)


def _power_of_two(exponent: Array) -> Array:
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def quantise_latent(latent: Array, tile: int) -> tuple[Array, Array]:
    """e4m3 values `[..., C]` and their power-of-two scales, float32 `[..., C / tile]`."""
    tiles = latent.astype(jnp.float32).reshape(*latent.shape[:-1], -1, tile)
    exponent = scale_exponent(jnp.max(jnp.abs(tiles), axis=-1))
    scale = _power_of_two(jnp.maximum(exponent, _SMALLEST_LATENT_EXPONENT))
    values = (tiles / scale[..., None]).astype(jnp.float8_e4m3fn)
    return values.reshape(latent.shape), scale


def quantise_keys(keys: Array) -> tuple[Array, Array]:
    """Index keys `[..., D]` as e4m3 and one power-of-two scale each, float32 `[...]`."""
    keys = keys.astype(jnp.float32)
    scale = _power_of_two(scale_exponent(jnp.maximum(jnp.max(jnp.abs(keys), axis=-1), _SMALLEST_KEY)))
    return (keys / scale[..., None]).astype(jnp.float8_e4m3fn), scale


def write_rows(latent: Array, rope: Array, row: RowFormat) -> Array:
    """Rows of a latent `[..., C]` and a rotated key `[..., P]`: uint32 `[..., words]`."""
    if row.record == "fp8":
        values, scale = quantise_latent(latent, row.tile)
        parts = [to_words(values), to_words(scale), to_words(rope.astype(jnp.bfloat16))]
    else:
        parts = [to_words(jnp.concatenate([latent, rope], axis=-1).astype(row.dtype))]
    words = jnp.concatenate(parts, axis=-1)
    padding = [(0, 0)] * (words.ndim - 1) + [(0, row.words - words.shape[-1])]
    return jnp.pad(words, padding)
