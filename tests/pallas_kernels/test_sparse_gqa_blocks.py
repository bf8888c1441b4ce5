# SPDX-License-Identifier: Apache-2.0
"""Page attention over blocks of one KV head, as MSA's rows of (request, group) have them, interpreted without races."""

from __future__ import annotations

import functools

import jax
import pytest

from pallas_kernels.online_softmax import Split
from pallas_kernels.sparse_gqa import mosaic_gpu
from pallas_kernels.sparse_gqa.tuning import tuning
from tests.pallas_kernels.attention_cases import GQA_SCALE, agree, gqa_case
from tests.pallas_kernels.kernel_cases import ON_GPU, without_races

pytestmark = pytest.mark.skipif(ON_GPU, reason="runs on the CPU")


@pytest.mark.parametrize("split", [Split(1, 10), Split(4, 3)])
def test_more_tiles_than_stages_and_fewer(split):
    """Of six stages."""
    case = gqa_case(3, 1, 16, 5, 128)
    how = tuning(3, 1, 5 * 128, False)
    assert how.stages == 6
    run = functools.partial(mosaic_gpu.sparse_gqa, scale=GQA_SCALE, how=how._replace(split=split))
    with without_races():
        got = jax.jit(run)(*case.args())
    agree(got, case.want())
