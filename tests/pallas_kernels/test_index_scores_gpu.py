# SPDX-License-Identifier: Apache-2.0
"""On the GPU: the index scores against float64, and the selection they lead to."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_scores import dsa_scores, mosaic_gpu, msa_scores, quest_scores, reference
from pallas_kernels.index_scores.tuning import Tuning
from pallas_kernels.index_topk import index_topk
from tests.helpers import int32
from tests.pallas_kernels.kernel_cases import needs_gpu
from tests.pallas_kernels.selection_cases import dsa_inputs, msa_case, quest_inputs

pytestmark = needs_gpu
LAUNCHES = [None, Tuning(64, 1, 1), Tuning(64, 3, 5), Tuning(128, 4, 2)]
SCALE = 128**-0.5


def exact(query, weight, keys, scales) -> tuple[np.ndarray, np.ndarray]:
    """Scores in float64, and the sum of their absolute terms."""
    keys = np.asarray(keys.astype(jnp.float32), np.float64)
    keys = keys if scales is None else keys * np.asarray(scales, np.float64)[..., None]
    query, weight = (np.asarray(x.astype(jnp.float32), np.float64) for x in (query, weight))
    product = np.maximum(SCALE * np.einsum("rnd,rsd->rns", query, keys), 0)
    terms = SCALE * np.einsum("rnd,rsd->rns", np.abs(query), np.abs(keys))
    return np.einsum("rn,rns->rs", weight, product), np.einsum("rn,rns->rs", np.abs(weight), terms)


@pytest.mark.parametrize("how", LAUNCHES, ids=str)
@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("rows, heads, records", [(3, 32, 1024), (2, 64, 1000), (1, 8, 136), (3, 128, 2048)])
def test_dsa_scores(rows, heads, records, kind, how):
    """A sum of 128 products and of the heads rounds by at most (128 + N) eps of its absolute terms."""
    query, weight, keys, scales = dsa_inputs(kind, rows, heads, records)
    length = np.random.default_rng(0).integers(0, records + 1, rows)
    length[0] = records
    run = jax.jit(functools.partial(mosaic_gpu.dsa_scores, scale=SCALE, how=how))
    got = np.asarray(run(query, weight, keys, scales, jnp.int32(1), length=int32(length)))
    want, terms = exact(query, weight, keys[1], None if scales is None else scales[1])
    for r, n in enumerate(length):
        error = np.abs(got[r, :n] - want[r, :n])
        assert np.all(error <= (128 + heads) * np.finfo(np.float32).eps * terms[r, :n]), (r, error.max())
    assert np.isfinite(got).all()
    again = np.asarray(run(query, weight, keys, scales, jnp.int32(1), length=int32(length)))
    np.testing.assert_array_equal(got, again)


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn"])
def test_every_key_has_its_own_score(kind):
    """Keys and heads that say where they are: a wrong tile, swizzle or transpose can't hide behind rounding."""
    records, heads = 640, 32
    query = jnp.asarray(np.broadcast_to(np.eye(heads, 128), (2, heads, 128)), jnp.bfloat16)
    weight = jnp.asarray(np.broadcast_to(2.0 ** -np.arange(heads), (2, heads)), jnp.float32)
    bits = (np.arange(records)[:, None] >> (np.arange(128) % 10)) & 1
    layers = np.asarray([1, 2])[:, None, None]
    keys = np.broadcast_to(bits, (2, 2, records, 128)) * (layers[..., None] if kind == "bfloat16" else 1)
    keys = jnp.asarray(keys, jnp.float32).astype(kind)
    scales = None if kind == "bfloat16" else jnp.asarray(np.broadcast_to(layers, (2, 2, records)), jnp.float32)
    got = jax.jit(functools.partial(mosaic_gpu.dsa_scores, scale=1.0))(query, weight, keys, scales, jnp.int32(1))
    want = 2 * (bits[:, :heads] * 2.0 ** -np.arange(heads)).sum(-1)
    # Terms are exact. Those of 8 of the 32 heads may lie below the last bit of the sum, each a rounding (of 2^-24).
    np.testing.assert_allclose(np.asarray(got), np.broadcast_to(want, got.shape), rtol=1e-6)


def test_queries_of_all_sizes():
    """Heads far apart in size, and a head of zeros: the shift to float16 loses nothing."""
    query, weight, keys, scales = dsa_inputs("float8_e4m3fn", 2, 16, 512)
    sizes = 2.0 ** np.arange(-40, 120, 10)
    query = query * jnp.asarray(sizes, jnp.bfloat16)[None, :, None]
    query = query.at[:, 3].set(0)
    weight = weight * jnp.asarray(1 / sizes, jnp.float32)[None]
    got = jax.jit(functools.partial(mosaic_gpu.dsa_scores, scale=SCALE))(query, weight, keys, scales, jnp.int32(0))
    want, terms = exact(query, weight, keys[0], scales[0])
    assert np.all(np.abs(got - want) <= 160 * np.finfo(np.float32).eps * terms)


def test_the_selection_is_that_of_the_scores():
    query, weight, keys, scales = dsa_inputs("float8_e4m3fn", 4, 32, 8192)
    length = int32([8192, 5000, 2048, 1])

    @jax.jit
    def select(query, weight, keys, scales):
        scores = dsa_scores(
            query, weight, keys, scales, 1, scale=SCALE, length=length, implementation="mosaic_gpu"
        )  # fmt: skip
        return scores, index_topk(scores, length, 2048, implementation="mosaic_gpu")

    scores, ids = select(query, weight, keys, scales)
    np.testing.assert_array_equal(ids, index_topk(scores, length, 2048, implementation="xla"))


@pytest.mark.parametrize("how", LAUNCHES[:3], ids=str)
@pytest.mark.parametrize("rows, groups, heads, pages", [(3, 8, 4, 1024), (2, 2, 7, 200), (1, 1, 16, 72), (2, 4, 1, 64)])
def test_quest_scores(rows, groups, heads, pages, how):
    query, low, high = quest_inputs(rows, groups, heads, pages)
    run = functools.partial(mosaic_gpu.quest_scores, how=how) if how else functools.partial(
        quest_scores, implementation="mosaic_gpu"
    )  # fmt: skip
    got = jax.jit(run)(query, low, high, jnp.int32(1))
    want = reference.quest_scores(query, low, high, jnp.int32(1))
    both = (jnp.abs(x.astype(jnp.float32)) for x in (low, high))
    terms = reference.quest_scores(jnp.abs(query), *(jnp.stack([x, x]) for x in [sum(both)[1]] * 2), jnp.int32(1))
    assert np.all(np.abs(got - want) <= 256 * np.finfo(np.float32).eps * np.asarray(terms))


MSA_LENGTHS = [1, 127, 128, 129, 0, 1000, 1023, 10**9]


@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("how", [None, Tuning(128, 1, 1), Tuning(128, 3, 5), Tuning(128, 6, 2)], ids=str)
@pytest.mark.parametrize("heads, records, block_tokens", [
    (4, 1024, 128), (4, 1000, 128), (9, 1160, 128), (1, 128, 128), (32, 4096, 128), (4, 1000, 64), (4, 72, 64),
])  # fmt: skip
def test_msa_scores(heads, records, block_tokens, how, shift):
    """Lengths where blocks begin and end, NaN and infinities past them; every product below 0 with the shift."""
    length = np.minimum(MSA_LENGTHS, records)
    case = msa_case(heads, records, length, block_tokens=block_tokens, shift=shift)
    run = functools.partial(mosaic_gpu.msa_scores, how=how)
    got = case.run(run)
    case.check(got)
    np.testing.assert_array_equal(got, case.run(run))


def test_every_token_counts_for_its_block():
    """One key of each block is the largest, at every place of a block: a wrong tile, row or swizzle can't hide."""
    blocks = 128
    at = np.arange(blocks) * 128 + np.arange(blocks)[::-1]
    keys = np.zeros((2, 1, blocks * 128, 128), np.float32)
    keys[1, 0, at, np.arange(blocks)] = 1 + np.arange(blocks)
    query = jnp.asarray(np.stack([np.ones(128), np.arange(128) % 2, -np.ones(128), np.arange(128) == 5]), jnp.bfloat16)
    run = functools.partial(msa_scores, implementation="mosaic_gpu")
    got = jax.jit(run)(query[None], jnp.asarray(keys, jnp.bfloat16), jnp.int32(1), int32([blocks * 128]))
    largest = 1.0 + np.arange(blocks)
    want = [largest, largest * (np.arange(blocks) % 2), 0 * largest, largest * (np.arange(blocks) == 5)]
    np.testing.assert_array_equal(np.asarray(got)[0], want)


def test_msa_scores_past_4_gib():
    """Layer 1 of keys that are 5 GiB; the last request."""
    case = msa_case(4, 1024, [1000])
    keys = jnp.full((2, 10, 1 << 20, 128), jnp.nan, jnp.bfloat16).at[1, 9, :1024].set(case.keys[1, 0])
    query = jnp.broadcast_to(case.query, (10, 4, 128))
    run = jax.jit(functools.partial(msa_scores, implementation="mosaic_gpu"))
    got = np.asarray(run(query, keys, jnp.int32(1), int32([0] * 9 + [1000])))
    case.check(got[9:, :, :8])
    assert np.all(got[:9] == -np.inf) and np.all(got[9, :, 8:] == -np.inf)
