# SPDX-License-Identifier: Apache-2.0
"""On the GPU: the top-k kernel, element by element."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_topk import arg_specs, index_topk, mosaic_gpu, reference
from pallas_kernels.index_topk.tuning import Tuning
from tests.helpers import int32
from tests.pallas_kernels.kernel_cases import needs_gpu, same
from tests.pallas_kernels.selection_cases import SCORES, expected_topk, poison

pytestmark = needs_gpu
LAUNCHES = [
    Tuning(1, 8, 4, True), Tuning(1, 4, 2, False), Tuning(2, 8, 4, True), Tuning(4, 8, 2, False), Tuning(8, 4, 1, True),
    Tuning(8, 8, 4, False),
]  # fmt: skip


@functools.cache
def kernel(k: int, how: Tuning, newest: int = 0):
    return jax.jit(functools.partial(mosaic_gpu.index_topk, k=k, newest=newest, how=how))


@functools.cache
def real(k: int, newest: int):
    """At the tuned launch; and the reference, on the GPU too."""
    run = jax.jit(functools.partial(index_topk, k=k, newest=newest, implementation="mosaic_gpu"))
    return run, jax.jit(functools.partial(reference.index_topk, k=k, newest=newest))


def compare(scores: np.ndarray, length, k: int, how: Tuning, what: str, newest: int = 0) -> None:
    got = kernel(k, how, newest)(jnp.asarray(poison(scores, length, newest)), int32(length))
    same(got, expected_topk(scores, length, k, newest), f"{what}, {how}: ")


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("how", LAUNCHES, ids=str)
def test_corners(name, how):
    rng = np.random.default_rng(0)
    for context in (4096, 5001):
        scores = SCORES[name](rng, (9, context))
        for k in (1, 16, 333, 2048):
            compare(
                scores, [context, k + 1, k, max(k - 1, 0), 0, 1, 129, 4001, context - 1], k, how, f"{name}, k = {k}"
            )


@pytest.mark.parametrize("how", LAUNCHES[1:4], ids=str)
@pytest.mark.parametrize("context", [1, 4, 33, 127, 128, 129, 1000, 1025])
def test_widths(context, how):
    rng = np.random.default_rng(context)
    scores = SCORES["ties"](rng, (4, context))
    for k in (16, 100):
        compare(scores, [context, max(context - 1, 0), context // 2, 0], k, how, f"S = {context}, k = {k}")


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("how", LAUNCHES, ids=str)
def test_the_newest(name, how):
    rng = np.random.default_rng(0)
    scores = SCORES[name](rng, (8, 2048))
    for k, newest in ((16, 1), (128, 2), (333, 300)):
        length = [2048, k + 1, k, k - 1, newest, newest - 1, 0, 1001]
        compare(scores, length, k, how, f"{name}, {newest} of {k}", newest)


@pytest.mark.parametrize("seed", range(20))
def test_random(seed):
    """Random sizes, lengths, kinds and launches."""
    rng = np.random.default_rng(seed)
    context, k = int(rng.integers(2000, 40000)), int(rng.choice([16, 128, 512, 2048, 4096]))
    scores = SCORES[list(SCORES)[seed % len(SCORES)]](rng, (7, context))
    compare(scores, rng.integers(0, context + 1, 7).tolist(), k, LAUNCHES[seed % len(LAUNCHES)], f"seed {seed}")


@pytest.mark.parametrize("name", arg_specs.SPECS)
@pytest.mark.parametrize("kind", ["normal", "positive", "zeros", "all equal"])
def test_real_shapes(name, kind):
    spec = arg_specs.SPECS[name]
    rng = np.random.default_rng(0)
    scores = jnp.asarray(SCORES[kind](rng, (spec.rows, spec.context)))
    length = int32(np.where(np.arange(spec.rows) % 3, rng.integers(1, spec.context + 1, spec.rows), spec.context))
    run, want = real(spec.selected, spec.newest)
    same(run(scores, length), want(scores, length), f"{name}, {kind}")


def test_again_and_again():
    """The same bits every time, and in a loop: atomics come in any order."""
    scores = jnp.asarray(SCORES["ties"](np.random.default_rng(0), (64, 32768)))
    length = jnp.full(64, 32768, jnp.int32)
    run = jax.jit(lambda s, n: mosaic_gpu.index_topk(s, n, 2048))
    first = np.asarray(run(scores, length))
    for _ in range(50):
        same(run(scores, length), first, "ids")
    many = jax.jit(lambda s, n: jax.lax.scan(lambda c, _: (c, mosaic_gpu.index_topk(s, n, 2048)), 0, length=20)[1])
    for ids in np.asarray(many(scores, length)):
        same(ids, first, "in a loop")
