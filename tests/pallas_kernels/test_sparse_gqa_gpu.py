# SPDX-License-Identifier: Apache-2.0
"""On the GPU: page attention against float64, wherever the pages lie, and past 4 GiB."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.online_softmax import Split
from pallas_kernels.sparse_gqa import mosaic_gpu, sparse_gqa
from pallas_kernels.sparse_gqa.tuning import tuning
from tests.pallas_kernels.attention_cases import GQA_SCALE, agree, gqa_case, moved
from tests.pallas_kernels.kernel_cases import needs_gpu, same

pytestmark = needs_gpu
attend = jax.jit(
    functools.partial(sparse_gqa, scale=GQA_SCALE, dtype=jnp.bfloat16, implementation="mosaic_gpu"),
    static_argnames="out_dtype",
)
# R, G, heads of each, K, tokens of a record
SIZES = [(1, 8, 4, 128, 16), (4, 2, 4, 13, 16), (3, 1, 16, 2, 128), (2, 3, 5, 11, 10), (5, 1, 32, 20, 7),
         (40, 8, 4, 9, 16), (2, 4, 8, 1, 1), (12, 1, 16, 16, 128), (150, 1, 16, 3, 128)]  # fmt: skip


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_against_float64(sizes, masked):
    """Pages missing, partly visible, seen by some heads; NaN in every byte that nobody may read."""
    case = gqa_case(*sizes, masked=masked)
    agree(attend(*case.args()), case.want())


@pytest.mark.parametrize("sizes", SIZES[:3])
def test_a_result_of_another_type_is_the_rounded_one(sizes):
    case = gqa_case(*sizes)
    want, sums = attend(*case.args())
    rounded = attend(*case.args(), out_dtype=jnp.bfloat16)
    same(rounded, (want.astype(jnp.bfloat16), sums), "rounded: ")


def test_all_heads_of_a_tile():
    case = gqa_case(2, 1, 64, 20, 16)
    agree(attend(*case.args()), case.want())


@pytest.mark.parametrize("masked", [False, True])
def test_the_same_bits_wherever_the_pages_lie(masked):
    case = gqa_case(3, 8, 4, 40, 16, masked=masked)
    first = attend(*case.args())
    for seed, extra in enumerate((0, 100, 7)):
        same(attend(*case.args(*moved(case.words, case.place, extra, seed))), first, f"{extra} more slots: ")
    for i in range(5):
        same(attend(*case.args()), first, f"run {i}: ")


@pytest.mark.parametrize("consumers, stages", [(1, 2), (1, 4), (2, 2), (2, 3)])
def test_launches(consumers, stages):
    """Any number of parts, KV heads of a program and stages."""
    case = gqa_case(3, 2, 4, 43, 16)
    want = case.want()
    for split in (Split(1, 11), Split(3, 4), Split(11, 1)):
        how = tuning(3, 2, 43 * 16, False)._replace(split=split, consumers=consumers, stages=stages)
        agree(jax.jit(functools.partial(mosaic_gpu.sparse_gqa, scale=GQA_SCALE, how=how))(*case.args()), want)


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_launches_of_one_kv_head(stages):
    """As rows of MSA: parts of one tile, of some, and of all, with more stages than tiles and fewer."""
    case = gqa_case(5, 1, 16, 5, 128)
    want = case.want()
    for split in (Split(1, 10), Split(3, 4), Split(10, 1)):
        how = tuning(5, 1, 5 * 128, False)._replace(split=split, stages=stages)
        agree(jax.jit(functools.partial(mosaic_gpu.sparse_gqa, scale=GQA_SCALE, how=how))(*case.args()), want)


@pytest.mark.parametrize("requests", [2, 16])
def test_the_same_bits_wherever_the_blocks_lie(requests):
    case = gqa_case(4 * requests, 1, 16, 16, 128)
    first = attend(*case.args())
    for seed, extra in enumerate((0, 33)):
        same(attend(*case.args(*moved(case.words, case.place, extra, seed))), first, f"{extra} more slots: ")


def test_rows_past_4_gib():
    """Group 1 of pages that are 6 GiB; the last slots."""
    case = gqa_case(3, 8, 4, 40, 16)
    n, words = case.words.shape[1:]
    slots = (6 << 30) // 2 // (4 * words)

    @jax.jit
    def large(small):
        rows = jnp.full((2, slots, words), 0xFFFFFFFF, jnp.uint32)
        return jax.lax.dynamic_update_slice(rows, small, (jnp.int32(1), jnp.int32(slots - n), jnp.int32(0)))

    place = np.where(case.place >= 0, case.place + (slots - n), -1).astype(np.int32)
    query, _, group, _, visible, mask = case.args()
    got = attend(query, large(jnp.asarray(case.words[1:])), group, jnp.asarray(place), visible, mask)
    same(got, attend(*case.args()), "past 4 GiB: ")
