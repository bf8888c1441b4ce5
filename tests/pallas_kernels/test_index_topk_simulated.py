# SPDX-License-Identifier: Apache-2.0
"""The top-k kernel as compiled for an H200, run by the simulator: several programs and warps, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from tests.pallas_kernels.compiled_kernels import compiled, needs_packages
from tests.pallas_kernels.selection_cases import SCORES, expected_topk, poison

pytestmark = needs_packages
KERNEL = """
from pallas_kernels.index_topk import mosaic_gpu
from pallas_kernels.index_topk.tuning import Tuning

rows, context, k, newest, programs, threads, in_flight, resident = numbers
how = Tuning(programs, threads, in_flight, bool(resident))
run = lambda scores, length: mosaic_gpu.index_topk(scores, length, k, newest=newest, how=how)
args = ((rows, context), jnp.float32), ((rows,), jnp.int32)
"""


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(
    "context, k, newest, how",
    [
        (3000, 200, 0, (2, 4, 2, 1)), (3001, 333, 0, (4, 8, 2, 0)), (2500, 16, 3, (8, 4, 1, 1)),
        (4096, 2048, 0, (1, 8, 4, 1)), (2048, 128, 2, (2, 4, 2, 1)), (129, 100, 0, (1, 4, 1, 0)),
        (40000, 2048, 0, (8, 8, 4, 1)), (70000, 4096, 0, (2, 8, 4, 0)),
    ],
    ids=str,
)  # fmt: skip
def test_corners(context, k, newest, how, name):
    length = [context, k + 1, context - 5, k, context // 2 + 3, 0, 1]
    scores = poison(SCORES[name](np.random.default_rng(0), (len(length), context)), length, newest)
    got = np.full((len(length), k), -77, np.int32)
    compiled(KERNEL, len(length), context, k, newest, *how).run(
        [np.asarray(length, np.int32), got, scores], clusters=len(length)
    )
    np.testing.assert_array_equal(got, expected_topk(scores, length, k, newest))
