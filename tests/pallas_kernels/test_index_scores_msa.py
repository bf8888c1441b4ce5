# SPDX-License-Identifier: Apache-2.0
"""Scores of blocks against float64 NumPy, at the lengths where blocks begin and end."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_scores import msa_scores
from pallas_kernels.index_topk import index_topk
from tests.helpers import PLATFORMS, int32, lowered_for
from tests.pallas_kernels.selection_cases import msa_case

scores = functools.partial(msa_scores, implementation="xla")


@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("records", [384, 400, 385])
def test_against_float64(records, shift):
    """NaN past the length changes nothing, and with a shift no product is above 0, which padding would be."""
    case = msa_case(4, records, [1, 127, 128, 129, 256, 257, records, 0], shift=shift)
    case.check(case.run(scores))


def test_smaller_blocks_and_other_heads():
    case = msa_case(3, 50, [50, 1, 16, 17], block_tokens=16)
    case.check(case.run(scores))


def test_the_selection_of_a_group():
    """Equal blocks: the lower one; a forced block is one of infinite score."""
    keys = jnp.zeros((1, 1, 512, 128), jnp.bfloat16).at[0, 0, 130, 0].set(2).at[0, 0, 300, 1].set(1)
    query = jnp.zeros((1, 2, 128), jnp.bfloat16).at[0, 0, 0].set(1).at[0, 1, 1].set(1)
    got = scores(query, keys, 0, int32([400]))
    np.testing.assert_array_equal(got, [[[0, 2, 0, 0], [0, 0, 1, 0]]])
    forced = got.at[..., 3].set(jnp.inf)
    for group, want in ((0, [0, 1, 3]), (1, [0, 2, 3])):
        np.testing.assert_array_equal(index_topk(forced[:, group], int32([4]), 3), [want])
    np.testing.assert_array_equal(scores(query, keys, 0, int32([256]))[..., 2:], np.full((1, 2, 2), -np.inf))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_lowers_anywhere(platform):
    case = msa_case(4, 256, [256])
    assert lowered_for(scores, platform, case.query, case.keys, jnp.int32(1), int32([256]))


def test_wrong_arguments_are_named():
    query, keys = jnp.zeros((2, 4, 128), jnp.bfloat16), jnp.zeros((1, 2, 256, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"keys must have shape .* got \[1, 2, 256, 64\]"):
        msa_scores(query, keys[..., :64], 0, int32([1, 1]))
    with pytest.raises(ValueError, match=r"length must have shape \[2\], got \[3\]"):
        msa_scores(query, keys, 0, int32([1, 1, 1]))
    with pytest.raises(ValueError, match="block_tokens must be at least 1, got 0"):
        msa_scores(query, keys, 0, int32([1, 1]), block_tokens=0)
