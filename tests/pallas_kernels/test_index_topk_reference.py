# SPDX-License-Identifier: Apache-2.0
"""The portable index scores and exact top-k against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_scores import quest_scores
from pallas_kernels.index_topk import index_topk
from tests import oracles
from tests.helpers import PLATFORMS, int32, lowered_for, same_bits

topk = jax.jit(functools.partial(index_topk, implementation="xla"), static_argnums=2, static_argnames="newest")


def check(scores, lengths, k: int, newest: int = 0) -> np.ndarray:
    scores = np.asarray(scores, np.float32)
    got = np.asarray(topk(jnp.asarray(scores), int32(lengths), k, newest=newest))
    want = np.stack([oracles.top_k(row, length, k, newest) for row, length in zip(scores, lengths, strict=True)])
    same_bits(got, want)
    return got


@pytest.mark.parametrize("k", [1, 7, 40])
def test_random_scores(k):
    rng = np.random.default_rng(k)
    check(rng.standard_normal((6, 40)), [40, 39, 8, 7, 6, 0], k)


@pytest.mark.parametrize("newest", [1, 3, 6])
def test_the_newest_are_chosen_whatever_their_scores(newest):
    """Behind better ones, infinite ones and NaN; rows of fewer than are newest, and of as many as are chosen."""
    rng = np.random.default_rng(newest)
    lengths = [40, 39, 8, 7, 6, 3, 2, 1, 0]
    scores = rng.standard_normal((len(lengths), 40)).astype(np.float32)
    scores[0, :20] = np.inf
    for row, length in zip(scores, lengths, strict=True):
        row[max(length - newest, 0) :] = np.nan
    got = check(scores, lengths, 7, newest)
    np.testing.assert_array_equal(got[0], [*range(7 - newest), *range(40 - newest, 40)])


def test_many_ties_go_to_the_lower_position():
    rng = np.random.default_rng(0)
    check(rng.integers(-1, 2, (6, 40)), [40, 33, 12, 7, 2, 1], 7)


def test_all_equal():
    got = check(np.full((6, 40), -3.5), [40, 8, 7, 6, 1, 0], 7)
    np.testing.assert_array_equal(got[0], np.arange(7))


def test_minus_zero_equals_zero():
    """A relu with negative weights gives -0.0, which a plain top-k orders below +0.0."""
    scores = np.full((6, 40), -1.0, np.float32)
    scores[:, 3:30] = 0.0
    scores[:, 3:30:2] = -0.0
    got = check(scores, [40, 30, 12, 7, 4, 0], 7)
    np.testing.assert_array_equal(got[0], np.arange(3, 10))


def test_infinities_and_extremes():
    rng = np.random.default_rng(1)
    tiny, largest = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    values = np.array([np.inf, -np.inf, largest, -largest, tiny, -tiny, 0.0, -0.0], np.float32)
    check(rng.choice(values, (6, 40)), [40, 39, 20, 8, 3, 0], 7)


def test_all_minus_infinity_still_gives_what_is_visible():
    got = check(np.full((6, 40), -np.inf), [40, 8, 7, 6, 1, 0], 7)
    np.testing.assert_array_equal(got[4], [0, -1, -1, -1, -1, -1, -1])


def test_what_is_not_visible_may_hold_anything():
    scores = np.random.default_rng(2).standard_normal((6, 40)).astype(np.float32)
    lengths = [30, 20, 10, 5, 1, 0]
    poisoned = scores.copy()
    for row, length in zip(poisoned, lengths, strict=True):
        row[length:] = np.resize([np.nan, np.inf, -np.inf], 40 - length)
    want = check(scores, lengths, 7)
    same_bits(topk(jnp.asarray(poisoned), int32(lengths), 7), want)


def test_more_wanted_than_there_are_scores():
    check(np.random.default_rng(3).standard_normal((2, 5)), [5, 3], 9)


@pytest.mark.parametrize(
    ("scores", "length", "k", "message"),
    [
        (jnp.zeros((2, 3, 4)), jnp.zeros(2, jnp.int32), 2, "scores must have shape"),
        (jnp.zeros((2, 3), jnp.bfloat16), jnp.zeros(2, jnp.int32), 2, "scores must be float32, got bfloat16"),
        (jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32), 2, r"length must have shape \[2\], got \[3\]"),
        (jnp.zeros((2, 3)), jnp.zeros(2, jnp.uint32), 2, "length must be int32, got uint32"),
        (jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32), 0, "k must be at least 1, got 0"),
    ],
)
def test_topk_names_wrong_arguments(scores, length, k, message):
    with pytest.raises(ValueError, match=message):
        index_topk(scores, length, k)


@pytest.mark.parametrize("newest", [-1, 2, 3])
def test_topk_names_a_wrong_number_of_newest(newest):
    with pytest.raises(ValueError, match=f"newest must be at least 0 and less than k = 2, got {newest}"):
        index_topk(jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32), 2, newest=newest)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_topk_lowers_anywhere(platform):
    lowered = functools.partial(index_topk, k=7, implementation="xla")
    assert "top_k" in lowered_for(lowered, platform, jnp.zeros((2, 40)), jnp.zeros(2, jnp.int32))


def bounds_and_query(dtype, rng):
    """Two layers, three requests, five pages, two KV heads, four query heads each, sixteen channels."""
    keys = rng.standard_normal((2, 3, 5, 16, 2, 16))
    low, high = (jnp.asarray(x, dtype) for x in (keys.min(3), keys.max(3)))
    return low, high, jnp.asarray(rng.standard_normal((3, 2, 4, 16)), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_quest_scores(dtype):
    """In float32 from stored values: a sum of C = 16 products rounds by at most about C eps of its absolute terms."""
    low, high, query = bounds_and_query(dtype, np.random.default_rng(4))
    for layer in (0, 1):
        got = jax.jit(functools.partial(quest_scores, implementation="xla"))(query, low, high, jnp.int32(layer))
        assert got.dtype == jnp.float32
        kmin, kmax, q = (np.asarray(x.astype(jnp.float32), np.float64) for x in (low[layer], high[layer], query))
        for r, g, h in np.ndindex(3, 2, 4):
            want = oracles.quest_bound(q[r, g, h], kmin[r, :, g], kmax[r, :, g])
            terms = np.maximum(np.abs(q[r, g, h] * kmin[r, :, g]), np.abs(q[r, g, h] * kmax[r, :, g])).sum(-1)
            assert np.all(np.abs(got[r, g, h] - want) <= 16 * np.finfo(np.float32).eps * terms)


def test_a_quest_score_bounds_every_key_of_its_page():
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((1, 1, 5, 16, 1, 8)).astype(np.float32)
    query = rng.standard_normal((1, 1, 3, 8)).astype(np.float32)
    got = quest_scores(jnp.asarray(query), jnp.asarray(keys.min(3)), jnp.asarray(keys.max(3)), 0, implementation="xla")
    products = np.einsum("hc,ptc->hpt", query[0, 0].astype(np.float64), keys[0, 0, :, :, 0])
    assert np.all(np.asarray(got)[0, 0] >= products.max(-1) - 1e-6)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((3, 2, 16), (2, 3, 5, 2, 16), (2, 3, 5, 2, 16)), "query must have shape"),
        (((3, 2, 4, 16), (2, 4, 5, 2, 16), (2, 4, 5, 2, 16)), "key_min must have shape"),
        (((3, 2, 4, 16), (2, 3, 5, 2, 8), (2, 3, 5, 2, 8)), "key_min must have shape"),
        (((3, 2, 4, 16), (2, 3, 5, 2, 16), (2, 3, 6, 2, 16)), "key_max must have shape"),
    ],
)
def test_quest_scores_name_wrong_arguments(shapes, message):
    with pytest.raises(ValueError, match=message):
        quest_scores(*(jnp.zeros(shape) for shape in shapes), 0)
