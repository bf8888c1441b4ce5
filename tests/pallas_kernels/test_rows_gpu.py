# SPDX-License-Identifier: Apache-2.0
"""On the GPU: fetch and backup, byte by byte, in place, and past 4 GiB."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backup import mosaic_gpu as backup_kernel
from pallas_kernels.backup.tuning import Tuning as BackupTuning
from pallas_kernels.fetch import mosaic_gpu as fetch_kernel
from pallas_kernels.fetch.tuning import Tuning as FetchTuning
from pallas_kernels.resolve.types import Plan
from tests.pallas_kernels.kernel_cases import make_pool, needs_gpu, pinned, pool_words, same

pytestmark = needs_gpu
WORDS = [288, 164, 146, 320, 160, 176, 2, 6144, 16384]
LAUNCHES = [
    FetchTuning(1, 1), FetchTuning(16, 4, 4, 64), FetchTuning(7, 2, 2), FetchTuning(132, 8, 1, 3),
]  # fmt: skip


def random_plan(rng, counts, width, slots, rows_per_space):
    host_row, slot = (np.full((len(counts), width), -1, np.int32) for _ in range(2))
    for r, n in enumerate(counts):
        host_row[r, :n] = rng.choice(rows_per_space, n, replace=False)
        slot[r, :n] = rng.choice(slots, n, replace=False)
    return Plan(*(jnp.asarray(x) for x in (host_row, slot, np.asarray(counts, np.int32))))


@pytest.mark.parametrize("words", WORDS)
def test_fetch(words):
    rng = np.random.default_rng(words)
    slots, rows_per_space = 50, 300
    hot = np.full((3, 8 * slots, words), 0xDEADBEEF, np.uint32)
    pool = make_pool(3 * rows_per_space, words)
    base = jnp.asarray(rng.permutation(8) * slots, jnp.int32)
    for how in LAUNCHES:
        step = jax.jit(
            lambda p, h, plan, how=how: fetch_kernel.fetch(
                p, h, plan, base, jnp.int32(2), jnp.int32(1), rows_per_space=rows_per_space, how=how
            )[0]
        )
        for counts in ([0, 3, 0, 37, 1, 0, 40, 0], [0] * 8, [40] * 8, [0, 0, 0, 0, 0, 0, 0, 1]):
            plan = random_plan(rng, counts, 40, slots, rows_per_space)
            want = hot.copy()
            for r, n in enumerate(counts):
                rows = np.asarray(plan.host_row[r, :n]) + 2 * rows_per_space
                want[1, int(base[r]) + np.asarray(plan.slot[r, :n])] = pool_words(rows, words)
            same(step(pool, hot, plan), want, f"{how}, counts {counts}")


@pytest.mark.parametrize("how", [FetchTuning(), FetchTuning(3, 2, 1, 16)])
def test_fetch_in_several_rounds(how):
    """More rows than a program can list at once, from more requests than it has lanes."""
    rng = np.random.default_rng(0)
    requests, slots, rows_per_space, words = 1100, 30, 60_000, 4
    counts = rng.integers(0, 25, requests)
    plan = random_plan(rng, counts, 25, slots, rows_per_space)
    pool, base = make_pool(2 * rows_per_space, words), jnp.arange(requests, dtype=jnp.int32) * slots
    want = np.zeros((1, requests * slots, words), np.uint32)
    for r, n in enumerate(counts):
        rows = np.asarray(plan.host_row[r, :n]) + rows_per_space
        want[0, int(base[r]) + np.asarray(plan.slot[r, :n])] = pool_words(rows, words)
    step = jax.jit(
        lambda p, h, plan: fetch_kernel.fetch(
            p, h, plan, base, jnp.int32(1), jnp.int32(0), rows_per_space=rows_per_space, how=how
        )[0]
    )
    same(step(pool, jnp.zeros_like(want), plan), want, "hot rows")


@pytest.mark.parametrize("words", WORDS)
def test_backup(words):
    rng = np.random.default_rng(words)
    for n in (1, 5, 300):
        for programs, threads in ((1, 1), (16, 4)):
            pool = make_pool(400, words)
            want = np.asarray(pool).copy()
            rows = rng.integers(0, 1 << 32, (n, words), dtype=np.uint32)
            host_row = rng.choice(400, n, replace=False).astype(np.int32)
            host_row[rng.random(n) < 0.3] = -1
            want[host_row[host_row >= 0]] = rows[host_row >= 0]
            how = BackupTuning(programs, threads, 4)
            step = jax.jit(
                lambda p, r, h, how=how: backup_kernel.backup(p, r, h, how=how),
                donate_argnums=0,
                out_shardings=pinned(),
            )
            before = pool.unsafe_buffer_pointer()
            pool = step(pool, rows, host_row)
            assert pool.unsafe_buffer_pointer() == before
            same(np.asarray(pool), want, f"n {n}, programs {programs}: pool")


def test_loop_in_place():
    """One jitted loop fetches from the pool and backs up to it: same buffers, nothing of their size allocated."""
    words, rows, slots = 288, 4096, 256
    pool, hot = make_pool(rows, words), jnp.zeros((1, slots, words), jnp.uint32)
    want_pool, want_hot = np.asarray(pool).copy(), np.zeros((1, slots, words), np.uint32)
    base = jnp.zeros(1, jnp.int32)

    def loop(pool, hot):
        def step(i, carry):
            pool, hot = carry
            at = jnp.arange(16, dtype=jnp.int32)
            plan = Plan((at * 37 + i * 5)[None] % rows, (at * 3 + i)[None] % slots, jnp.full(1, 16, jnp.int32))
            hot, _ = fetch_kernel.fetch(pool, hot, plan, base, jnp.int32(0), jnp.int32(0), rows_per_space=rows)
            new = hot[0, :2] + jnp.uint32(i)
            return backup_kernel.backup(pool, new, jnp.stack([i * 2, jnp.int32(-1)])), hot

        return jax.lax.fori_loop(0, 12, step, (pool, hot))

    for i in range(12):
        at = np.arange(16)
        want_hot[0, (at * 3 + i) % slots] = want_pool[(at * 37 + i * 5) % rows]
        want_pool[i * 2] = want_hot[0, 0] + np.uint32(i)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    run = jax.jit(loop, donate_argnums=(0, 1), out_shardings=(pinned(), device)).lower(pool, hot).compile()
    before = pool.unsafe_buffer_pointer(), hot.unsafe_buffer_pointer()
    pool, hot = run(pool, hot)
    assert (pool.unsafe_buffer_pointer(), hot.unsafe_buffer_pointer()) == before
    same((np.asarray(pool), np.asarray(hot)), (want_pool, want_hot), "pool, hot ")
    memory = run.memory_analysis()
    assert memory.temp_size_in_bytes < 1 << 17, memory
    assert memory.host_temp_size_in_bytes == 0, memory


def test_pool_above_4_gib():
    """More than 2^32 bytes and more than 2^31 words: 8.6 GiB, rows at both ends."""
    words, rows = 16384, 140_000
    pool = jax.jit(lambda: jnp.zeros((rows, words), jnp.uint32), out_shardings=pinned())()
    at = np.array([0, 65535, 65536, 131071, 131072, rows - 1, -1], np.int32)
    values = np.arange(7 * words, dtype=np.uint32).reshape(7, words) * np.uint32(2654435761)
    step = jax.jit(backup_kernel.backup, donate_argnums=0, out_shardings=pinned())
    before = pool.unsafe_buffer_pointer()
    pool = step(pool, values, at)
    assert pool.unsafe_buffer_pointer() == before
    plan = Plan(
        jnp.asarray(at[None, :6] % (rows // 2)), jnp.arange(6, dtype=jnp.int32)[None], jnp.full(1, 6, jnp.int32)
    )
    for space in (0, 1):
        get = jax.jit(
            lambda p, space: fetch_kernel.fetch(
                p, jnp.zeros((1, 8, words), jnp.uint32), plan, jnp.zeros(1, jnp.int32), space, jnp.int32(0),
                rows_per_space=rows // 2,
            )[0]
        )  # fmt: skip
        hot = np.asarray(get(pool, jnp.int32(space)))[0]
        for i in range(6):
            row = int(at[i] % (rows // 2) + space * (rows // 2))
            known = np.flatnonzero(at == row)
            want = values[known[0]] if len(known) else np.zeros(words, np.uint32)
            same(hot[i], want, f"space {space}, row {row}: ")
