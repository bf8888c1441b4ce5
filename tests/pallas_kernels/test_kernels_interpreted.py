# SPDX-License-Identifier: Apache-2.0
"""The kernels' own steps under the CPU interpreter, with the `jax.numpy` twins of the emitted words, and no races.

The interpreter has neither emitted code nor host memory, so one thread a program, and a pool on the device.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backup import mosaic_gpu as backup_kernel
from pallas_kernels.backup.tuning import Tuning as BackupTuning
from pallas_kernels.fetch import mosaic_gpu as fetch_kernel
from pallas_kernels.fetch.tuning import Tuning as FetchTuning
from pallas_kernels.resolve import mosaic_gpu, reference
from pallas_kernels.resolve.tuning import Tuning
from pallas_kernels.resolve.types import Plan
from tests.pallas_kernels.kernel_cases import (
    ON_GPU,
    Sizes,
    all_hits,
    all_misses,
    check_counters,
    pool_words,
    same,
    tables,
    trace,
    without_races,
)

pytestmark = pytest.mark.skipif(ON_GPU, reason="runs on the CPU")


@pytest.fixture(autouse=True)
def interpreted():
    with without_races():
        yield


@pytest.mark.parametrize(
    "selected, hot_slots, buckets, walk",
    [(9, 150, 0, trace), (9, 150, 4, trace), (40, 40, 0, trace), (1, 7, 2, trace), (40, 40, 0, all_hits),
     (40, 40, 4, all_misses)],
)  # fmt: skip
def test_resolve_and_fetch(selected, hot_slots, buckets, walk):
    sizes = Sizes(requests=3, selected=selected, hot_slots=hot_slots, ring_slots=5, page_records=4, pages=75)
    rng = np.random.default_rng(0)
    ids, ages, pages = tables(sizes, rng)
    words, rows_per_space, slots = 4, 3 * 300, hot_slots + 5
    pool = jnp.asarray(pool_words(np.arange(2 * rows_per_space), words))
    hot = np.full((2, 3 * slots, words), 7, np.uint32)
    base = jnp.arange(3, dtype=jnp.int32)[::-1] * slots
    options = dict(ring_slots=5, page_records=4)

    def kernel(hot, selected, length, ids, ages):
        rows = (pool, hot, jnp.int32(1), jnp.int32(1))
        return mosaic_gpu.resolve(
            selected, length, ids, ages, pages, base, jnp.int32(1), **options, rows=rows, rows_per_space=rows_per_space,
            how=Tuning(1, 1, 2, buckets),
        )  # fmt: skip

    step, want_of = jax.jit(kernel), jax.jit(functools.partial(reference.resolve, **options))
    state, counters = (jnp.asarray(ids), jnp.asarray(ages)), []
    for selected_ids, length in walk(sizes, 30, rng):
        want = want_of(selected_ids, length, *state, pages, base, jnp.int32(1))
        got, hot = step(jnp.asarray(hot), selected_ids, length, *state)
        same(got, want, f"step {len(counters)}: ")
        plan = jax.tree.map(np.asarray, want.plan)
        for r in range(3):
            n = plan.count[r]
            at = np.asarray(base)[r] + plan.slot[r, :n]
            same(np.asarray(hot)[1, at], pool_words(plan.host_row[r, :n] + rows_per_space, words), "rows")
        state = got.slot_ids, got.recency
        counters.append(np.asarray(got.counters))
    check_counters(np.stack(counters), walk, selected)


@pytest.mark.parametrize("programs, buckets", [(1, 0), (3, 0), (3, 4)])
def test_fetch(programs, buckets):
    counts, width, words = [2, 0, 4], 4, 6
    rng = np.random.default_rng(0)
    host_row = np.stack([rng.permutation(20)[:width] for _ in counts]).astype(np.int32)
    slot = np.stack([rng.permutation(5)[:width] for _ in counts]).astype(np.int32)
    plan = Plan(jnp.asarray(host_row), jnp.asarray(slot), jnp.asarray(counts, jnp.int32))
    pool = pool_words(np.arange(40), words)
    want = np.zeros((2, 15, words), np.uint32)
    for r, n in enumerate(counts):
        want[1, 5 * r + slot[r, :n]] = pool[20 + host_row[r, :n]]
    got, done = jax.jit(
        lambda pool, hot: fetch_kernel.fetch(
            pool, hot, plan, jnp.arange(3, dtype=jnp.int32) * 5, jnp.int32(1), jnp.int32(1), rows_per_space=20,
            how=FetchTuning(programs, 1, 2, buckets),
        )
    )(pool, jnp.zeros_like(want))  # fmt: skip
    same(got, want, "hot rows")
    same(done, np.array(counts, np.int32), "counts")


@pytest.mark.parametrize("programs", [1, 3])
def test_backup(programs):
    pool = pool_words(np.arange(30), 6)
    rows = np.arange(30, dtype=np.uint32).reshape(5, 6)
    want = pool.copy()
    want[[7, 0, 29]] = rows[[0, 2, 4]]
    host_row = jnp.asarray([7, -1, 0, -1, 29], jnp.int32)
    got = jax.jit(lambda p, r: backup_kernel.backup(p, r, host_row, how=BackupTuning(programs, 1, 2)))(pool, rows)
    same(got, want, "pool")
