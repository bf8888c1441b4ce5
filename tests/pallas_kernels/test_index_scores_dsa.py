# SPDX-License-Identifier: Apache-2.0
"""Scores of the lightning indexer against float64 NumPy, and the selection at ties, zeros and -0.0."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from hisparse_jax.records import quantise_keys
from pallas_kernels.index_scores import dsa_scores
from pallas_kernels.index_topk import index_topk

LAYERS, REQUESTS, HEADS, CHANNELS, RECORDS = 2, 3, 8, 16, 20
SCALE = CHANNELS**-0.5


def inputs(kind: str):
    rng = np.random.default_rng(1)
    query, weight = rng.normal(size=(REQUESTS, HEADS, CHANNELS)), rng.normal(size=(REQUESTS, HEADS))
    keys = jnp.asarray(rng.normal(size=(LAYERS, REQUESTS, RECORDS, CHANNELS)), jnp.float32)
    scales = None
    if kind == "fp8":
        keys, scales = quantise_keys(keys)
    else:
        keys = keys.astype(kind)
    return jnp.asarray(query, jnp.float32), jnp.asarray(weight, jnp.float32), keys, scales


# float32 rounding of 16 products and 8 heads; in bfloat16 the query is rounded too, which the oracle does as well.
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
def test_against_float64(kind):
    query, weight, keys, scales = inputs(kind)
    got = dsa_scores(query, weight, keys, scales, 1, scale=SCALE)
    stored = np.asarray(keys).astype(np.float64)[1] * (1 if scales is None else np.asarray(scales)[1][..., None])
    asked = np.asarray(query if kind == "fp8" else query.astype(keys.dtype)).astype(np.float64)
    product = np.maximum(SCALE * np.einsum("rnd,rsd->rns", asked, stored), 0)
    want = np.einsum("rn,rns->rs", np.asarray(weight, np.float64), product)
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-6)
    assert got.dtype == jnp.float32


def test_zeros_and_negative_zeros_tie():
    """Negative weights on a relu of zero make -0.0, which has to equal +0.0: the lower id wins."""
    query = jnp.ones((1, 1, 4))
    keys = jnp.asarray([[[[-1.0] * 4, [-1.0] * 4, [1.0] * 4, [-1.0] * 4, [0.0] * 4]]], jnp.float32)
    for weight, want in ((-1.0, [0, 1, 3]), (1.0, [0, 1, 2])):
        scores = dsa_scores(query, jnp.full((1, 1), weight), keys, None, 0, scale=0.5)
        assert np.asarray(scores)[0].tolist() == [0, 0, weight * 2, 0, 0]
        assert np.asarray(index_topk(scores, jnp.array([5]), 3))[0].tolist() == want
    negative = jnp.array([[0.0, -0.0, 0.0, -0.0]])
    assert np.asarray(index_topk(negative[:, ::-1], jnp.array([4]), 2))[0].tolist() == [0, 1]


def test_scales_go_with_fp8_only():
    query, weight, keys, scales = inputs("fp8")
    with pytest.raises(ValueError, match="key_scale goes with float8_e4m3fn keys"):
        dsa_scores(query, weight, keys, None, 0, scale=SCALE)
    with pytest.raises(ValueError, match="key_scale goes with float8_e4m3fn keys"):
        dsa_scores(query, weight, keys.astype(jnp.float32), scales, 0, scale=SCALE)
    with pytest.raises(ValueError, match="weight must be float32, got bfloat16"):
        dsa_scores(query, weight.astype(jnp.bfloat16), keys, scales, 0, scale=SCALE)
