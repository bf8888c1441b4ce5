# SPDX-License-Identifier: Apache-2.0
"""Decode attention over latent records against float64 NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hisparse_jax.records import quantise_latent, read_rows, write_rows
from pallas_kernels.row_format import RowFormat
from pallas_kernels.sparse_mla import sparse_mla

REQUESTS, HEADS, GROUPS, SLOTS, WIDTH = 3, 4, 2, 24, 6
LATENT, ROPE, SCALE = 32, 8, 0.25
# Sums of 40 products of unit normals and a softmax over 6; bfloat16 rounds query and weights to 8 bits.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "fp8": 2e-2}
# Four roundings of numbers of about 4 at most, as log-sum-exps (float32 for all records) and outputs are here.
ROUNDINGS = 4 * 4 * 2.0**-24


def inputs(record: str):
    row, rng = RowFormat(LATENT, ROPE, record), np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    words = np.array(write_rows(normal(GROUPS, SLOTS, LATENT), normal(GROUPS, SLOTS, ROPE), row))
    query = normal(REQUESTS, HEADS, LATENT + ROPE)
    place = np.array([[0, 5, 7, 9, 1, 2], [23, 11, 12, -1, -1, -1], [-1] * WIDTH], np.int32)
    return row, words, query, place


def oracle(row, words, query, place, group):
    record = np.asarray(read_rows(jnp.asarray(words[group]), row)).astype(np.float64)
    query = np.asarray(query.astype(row.dtype)).astype(np.float64)
    out, lse = np.zeros((REQUESTS, HEADS, LATENT)), np.full((REQUESTS, HEADS), -np.inf)
    for r in range(REQUESTS):
        rows = record[place[r][place[r] >= 0]]
        if len(rows):
            logits = SCALE * query[r] @ rows.T
            weight = np.exp(logits)
            lse[r] = np.log(weight.sum(-1))
            out[r] = weight / weight.sum(-1, keepdims=True) @ rows[:, :LATENT]
    return out, lse


@pytest.mark.parametrize("record", ["float32", "bfloat16", "fp8"])
def test_against_float64(record):
    row, words, query, place = inputs(record)
    attend = jax.jit(sparse_mla, static_argnames=("row", "scale"))
    out, lse = attend(query, jnp.asarray(words), 1, jnp.asarray(place), row=row, scale=SCALE)
    want_out, want_lse = oracle(row, words, query, place, 1)
    np.testing.assert_allclose(out, want_out, rtol=0, atol=TOLERANCE[record])
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=ROUNDINGS)
    assert out.dtype == lse.dtype == jnp.float32
    assert not np.asarray(out[2]).any()


def test_a_result_of_another_type_is_the_rounded_one():
    row, words, query, place = inputs("bfloat16")
    args = query, jnp.asarray(words), 1, jnp.asarray(place)
    (want, lse), (got, same) = (sparse_mla(*args, row=row, scale=SCALE, out_dtype=t) for t in ("float32", "bfloat16"))
    assert got.dtype == jnp.bfloat16 and np.array_equal(got, want.astype(jnp.bfloat16)) and np.array_equal(lse, same)


@pytest.mark.parametrize("record", ["float32", "bfloat16", "fp8"])
def test_poison_where_nothing_is_selected_changes_nothing(record):
    row, words, query, place = inputs(record)
    clean = sparse_mla(query, jnp.asarray(words), 0, jnp.asarray(place), row=row, scale=SCALE)
    unused = np.setdiff1d(np.arange(SLOTS), place[place >= 0])
    words[:, unused] = 0xFFFFFFFF  # NaN in every type
    words[1] = 0xFFFFFFFF
    poisoned = sparse_mla(query, jnp.asarray(words), 0, jnp.asarray(place), row=row, scale=SCALE)
    for a, b in zip(clean, poisoned, strict=True):
        assert np.array_equal(a, b)
    # Slot 0 is what a place of -1 would read: poisoned, requests that don't select it stay as they were.
    words[:, 0] = 0xFFFFFFFF
    poisoned = sparse_mla(query, jnp.asarray(words), 0, jnp.asarray(place), row=row, scale=SCALE)
    for a, b in zip(clean, poisoned, strict=True):
        assert np.array_equal(a[1:], b[1:])


def test_halves_merge_by_log_sum_exp():
    row, words, query, place = inputs("float32")
    whole, lse = sparse_mla(query, jnp.asarray(words), 0, jnp.asarray(place), row=row, scale=SCALE)
    halves = [jnp.asarray(place[:, :2]), jnp.asarray(place[:, 2:])]
    (a, a_lse), (b, b_lse) = (sparse_mla(query, jnp.asarray(words), 0, half, row=row, scale=SCALE) for half in halves)
    total = jnp.logaddexp(a_lse, b_lse)[:2]
    merged = jnp.exp(a_lse[:2] - total)[..., None] * a[:2] + jnp.exp(b_lse[:2] - total)[..., None] * b[:2]
    np.testing.assert_allclose(merged, whole[:2], rtol=0, atol=ROUNDINGS)
    np.testing.assert_allclose(total, lse[:2], rtol=0, atol=ROUNDINGS)


def test_codes_of_nan():
    """Finite latents of any size give none; one that isn't finite has a scale of 2^120."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, (200, 512), dtype=np.uint64).astype(np.uint32)
    latent = bits.view(np.float32)
    latent = np.where(np.isfinite(latent), latent, np.finfo(np.float32).max)
    latent = np.ldexp(latent, -(np.arange(200)[:, None] % 140)).astype(np.float32)
    codes, _ = quantise_latent(jnp.asarray(latent), 128)
    assert not (np.asarray(codes).view(np.uint8) & 0x7F == 0x7F).any()
    for value in (np.inf, -np.inf, np.nan):
        codes, scale = quantise_latent(jnp.full((1, 128), value, jnp.float32), 128)
        assert (np.asarray(codes).view(np.uint8) & 0x7F == 0x7F).all() and scale[0, 0] >= 2.0**120


def test_arguments_are_checked():
    row, words, query, place = inputs("fp8")
    with pytest.raises(ValueError, match=r"hot_rows must have shape \['any', 'any', 14\]"):
        sparse_mla(query, jnp.zeros((2, 24, 40), jnp.uint32), 0, jnp.asarray(place), row=row, scale=SCALE)
    with pytest.raises(ValueError, match="query must have shape"):
        sparse_mla(query[..., :-1], jnp.asarray(words), 0, jnp.asarray(place), row=row, scale=SCALE)
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="'mosaic_gpu' can't run"):
            sparse_mla(query, jnp.asarray(words), 0, jnp.asarray(place), row=row, scale=SCALE,
                       implementation="mosaic_gpu")  # fmt: skip
