# SPDX-License-Identifier: Apache-2.0
"""The steps of the selection kernels under the CPU interpreter, with the twins of the emitted words, and no races.

One thread a program, and one program a row of the top-k: the interpreter has no emitted code and no clusters.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_scores import dsa, reference
from pallas_kernels.index_scores import mosaic_gpu as scores_kernel
from pallas_kernels.index_scores.tuning import Tuning as ScoresTuning
from pallas_kernels.index_topk import mosaic_gpu
from pallas_kernels.index_topk.tuning import Tuning
from tests.helpers import int32
from tests.pallas_kernels.kernel_cases import ON_GPU, same, without_races
from tests.pallas_kernels.selection_cases import SCORES, dsa_inputs, expected_topk, msa_case, poison, quest_inputs

pytestmark = pytest.mark.skipif(ON_GPU, reason="runs on the CPU")


@pytest.fixture(autouse=True)
def interpreted():
    with without_races():
        yield


@pytest.mark.parametrize(("name", "resident"), [(name, i % 2 == 0) for i, name in enumerate(SCORES)])
def test_topk(name, resident):
    scores = SCORES[name](np.random.default_rng(0), (5, 300))
    for k in (20, 299):
        length = [300, k + 1, k, 17, 0]
        run = functools.partial(mosaic_gpu.index_topk, k=k, how=Tuning(1, 1, 2, resident))
        same(jax.jit(run)(jnp.asarray(scores), int32(length)), expected_topk(scores, length, k), f"{name}, k = {k}")


@pytest.mark.parametrize("newest", [1, 2, 18])
def test_topk_with_the_newest(newest):
    length = [300, 21, 20, newest, newest - 1, 0]
    scores = SCORES["normal"](np.random.default_rng(2), (6, 300))
    run = functools.partial(mosaic_gpu.index_topk, k=20, newest=newest, how=Tuning(1, 1, 2, True))
    same(
        jax.jit(run)(jnp.asarray(poison(scores, length, newest)), int32(length)),
        expected_topk(scores, length, 20, newest),
        "ids",
    )


def test_topk_of_a_width_that_is_no_multiple_of_four():
    scores = np.random.default_rng(1).standard_normal((2, 145)).astype(np.float32)
    got = jax.jit(functools.partial(mosaic_gpu.index_topk, k=9, how=Tuning(1, 1, 1, True)))(
        jnp.asarray(scores), int32([145, 30])
    )
    same(got, expected_topk(scores, [145, 30], 9), "ids")


# float32 sums of 128 products and 8 heads, of values about 1
@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("records, parts, length", [(192, 2, None), (192, 3, [100, 0]), (200, 1, [200, 140])])
def test_dsa_scores(kind, records, parts, length):
    query, weight, keys, scales = dsa_inputs(kind, 2, 8, records)
    want = np.asarray(dsa.dsa_scores(query, weight, keys, scales, jnp.int32(1), scale=0.1))
    run = functools.partial(
        scores_kernel.dsa_scores, scale=0.1, length=None if length is None else int32(length),
        how=ScoresTuning(64, 2, parts),
    )  # fmt: skip
    got = np.asarray(jax.jit(run)(query, weight, keys, scales, jnp.int32(1)))
    for r, n in enumerate(length or [records] * 2):
        np.testing.assert_allclose(got[r, :n], want[r, :n], rtol=0, atol=5e-6)
        assert not got[r, -(-n // 64) * 64 if n <= records - 64 else records :].any()


def test_quest_scores():
    query, low, high = quest_inputs(2, 2, 3, 128)
    want = reference.quest_scores(query, low, high, jnp.int32(1))
    run = functools.partial(scores_kernel.quest_scores, how=ScoresTuning(64, 2, 2))
    got = jax.jit(run)(query, low, high, jnp.int32(1))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)  # values about 100


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in matmul")  # of what lies past a length
@pytest.mark.parametrize(
    "heads, records, length, block_tokens, parts",
    [
        (4, 384, [1, 127, 128, 129, 384, 0], 128, 2),
        (4, 200, [200, 128, 129, 72, 73, 199], 128, 1),
        (9, 200, [200, 64, 1], 64, 3),
    ],
)
def test_msa_scores(heads, records, length, block_tokens, parts):
    case = msa_case(heads, records, length, block_tokens=block_tokens)
    case.check(case.run(scores_kernel.msa_scores, how=ScoresTuning(block_tokens, 2, parts)))
