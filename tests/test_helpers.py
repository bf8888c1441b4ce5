# SPDX-License-Identifier: Apache-2.0
"""The comparisons that tests of data movement rest on."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import same_bits
from tests.pallas_kernels.kernel_cases import same

NANS = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)


@pytest.mark.parametrize("compare", [same_bits, lambda got, want: same(got, want, "")], ids=["same_bits", "same"])
def test_equal_means_dtype_shape_and_every_bit(compare):
    bfloat16 = jnp.asarray([1.5, -0.0, jnp.nan], jnp.bfloat16)
    for values in (bfloat16, NANS, np.float32(2), np.zeros((0, 3), np.int16), np.array([True, False])):
        compare(values, jnp.asarray(values))
    for got, want in (
        (np.float32(0.0), np.float32(-0.0)),
        (NANS, NANS[::-1]),
        (bfloat16, bfloat16.at[1].set(0.0)),
        (np.zeros(3, np.int32), np.zeros(3, np.uint32)),
        (np.zeros(3, np.int32), np.zeros((1, 3), np.int32)),
        (np.zeros(3, np.int32), np.zeros(1, np.int32)),
    ):
        with pytest.raises(AssertionError):
            compare(got, want)


def test_same_says_what_differs():
    zeros, ones = jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3), jnp.int32).at[1, 2].set(1)
    with pytest.raises(AssertionError, match=r"step 4: \[1\]: 1 of 6 differ, first at \[1 2\]: 0 instead of 1"):
        same((zeros, zeros), (zeros, ones), "step 4: ")
    with pytest.raises(AssertionError, match=r"int32 \[2, 3\] instead of int32 \[3\]"):
        same(zeros, zeros[0], "")
