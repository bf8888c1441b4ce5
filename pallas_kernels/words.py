# SPDX-License-Identifier: Apache-2.0
"""Rows as uint32 words: the cache moves bytes and never looks at them; operations that compute read them as numbers."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike


def from_words(words: Array, dtype: DTypeLike) -> Array:
    """uint32 `[..., n]` as `dtype` `[..., n * 4 / itemsize]`: the same bytes."""
    values = lax.bitcast_convert_type(words, dtype)
    return values.reshape(*words.shape[:-1], -1)


def to_words(values: Array) -> Array:
    """`[..., n]` of 1, 2 or 4-byte numbers as uint32 `[..., n * itemsize / 4]`: the same bytes."""
    per_word = 4 // jnp.dtype(values.dtype).itemsize
    if per_word > 1:
        values = values.reshape(*values.shape[:-1], -1, per_word)
    return lax.bitcast_convert_type(values, jnp.uint32)
