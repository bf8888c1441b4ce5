# SPDX-License-Identifier: Apache-2.0
"""Projections: of one row as of several."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers import linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs, multiplied", [(40, 2), (10_000_000 // 64, 1)])
def test_one_row(outputs, multiplied, bias):
    """A small kernel multiplies two equal rows, a large one just the one; the result is the row's product."""
    layer = linear(64, outputs, bias=bias, dtype=jnp.float32, rngs=nnx.Rngs(0))
    if bias:
        layer.bias[...] = jax.random.normal(jax.random.key(1), (outputs,))
    x = jax.random.normal(jax.random.key(2), (1, 64))
    text = jax.jit(layer).lower(x).as_text()
    assert f"(tensor<{multiplied}x64xf32>, tensor<64x{outputs}xf32>)" in text
    want = np.asarray(x, np.float64) @ np.asarray(layer.kernel[...], np.float64)
    want += np.asarray(layer.bias[...], np.float64) if bias else 0
    # 64 products of float32, each rounded to 2^-24 of itself, in any order
    np.testing.assert_allclose(layer(x), want, rtol=0, atol=64 * 2**-24 * 8)


@pytest.mark.parametrize("shape", [(3, 64), (1, 5, 64), (2, 5, 64)])
def test_other_shapes_are_multiplied_as_they_are(shape):
    layer = linear(64, 40, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(2), shape)
    assert layer(x).shape == (*shape[:-1], 40)
    np.testing.assert_allclose(
        np.asarray(layer(x)).reshape(-1, 40), np.concatenate([layer(row[None]) for row in x.reshape(-1, 64)]), atol=1e-5
    )
