# SPDX-License-Identifier: Apache-2.0
"""On the GPU: the kernel against the reference, element by element, and the rows it fetches, byte by byte."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hisparse_jax.compiler_options import CONCURRENT
from pallas_kernels.fetch import fetch
from pallas_kernels.resolve import mosaic_gpu, reference, resolve_and_fetch
from pallas_kernels.resolve.tuning import Tuning
from tests.pallas_kernels.kernel_cases import (
    SMALL,
    Sizes,
    all_hits,
    all_misses,
    check_counters,
    make_pool,
    needs_gpu,
    pinned,
    pool_words,
    same,
    tables,
    trace,
)

pytestmark = needs_gpu


def run_trace(sizes, words, how, steps=200, walk=trace, fetch=True):
    rng = np.random.default_rng(0)
    ids, ages, pages = tables(sizes, rng)
    rows_per_space = sizes.requests * sizes.pages * sizes.page_records
    slots = sizes.hot_slots + sizes.ring_slots
    space, group, table = jnp.int32(1), jnp.int32(1), jnp.int32(sizes.tables - 1)
    base = jnp.asarray(rng.permutation(sizes.requests) * slots, jnp.int32)
    options = dict(ring_slots=sizes.ring_slots, page_records=sizes.page_records)
    want_of = jax.jit(functools.partial(reference.resolve, **options))

    if fetch:
        pool = make_pool(2 * rows_per_space, words)
        hot = jnp.full((2, sizes.requests * slots, words), 0xDEADBEEF, jnp.uint32)
        expected = np.asarray(hot).copy()

        def kernel(pool, hot, selected, length, ids, ages):
            rows = (pool, hot, space, group)
            return mosaic_gpu.resolve(
                selected, length, ids, ages, pages, base, table, **options, rows=rows, rows_per_space=rows_per_space,
                how=how,
            )  # fmt: skip

        step = jax.jit(kernel, donate_argnums=(1, 4, 5))
    else:
        pool = hot = None
        step = jax.jit(lambda p, h, s, n, i, a: mosaic_gpu.resolve(s, n, i, a, pages, base, table, **options, how=how))

    got_state = want_state = (jnp.asarray(ids), jnp.asarray(ages))
    got_state = jax.tree.map(jnp.copy, got_state)
    counters = []
    for number, (selected, length) in enumerate(walk(sizes, steps, rng)):
        want = want_of(selected, length, *want_state, pages, base, table)
        got, hot = step(pool, hot, selected, length, *got_state)
        same(got, want, f"step {number}: ")
        got_state, want_state = (got.slot_ids, got.recency), (want.slot_ids, want.recency)
        counters.append(np.asarray(got.counters))
        if fetch:
            plan = jax.tree.map(np.asarray, got.plan)
            for r in range(sizes.requests):
                n = plan.count[r]
                at = np.asarray(base)[r] + plan.slot[r, :n]
                expected[1, at] = pool_words(plan.host_row[r, :n] + rows_per_space, words)
            if number % 20 == 19 or number == steps - 1:
                same(np.asarray(hot), expected, f"step {number}: hot rows")
    check_counters(np.stack(counters), walk, sizes.selected)


CORNERS = {
    "K=1": SMALL._replace(selected=1),
    "K=H": SMALL._replace(selected=150),
    "odd K and H": SMALL._replace(selected=77, hot_slots=151, ring_slots=3, page_records=1, pages=801),
    "W=1": SMALL._replace(ring_slots=1),
    "wide": Sizes(3, 2048, 4096, 64, 16, 2048),
    "wider than a chunk": Sizes(2, 4096, 8191, 64, 64, 512),
    "widest": Sizes(2, 4096, 32767, 64, 64, 2048),
}


@pytest.mark.parametrize("words", [288, 164, 146, 320, 160, 176, 2])
def test_rows(words):
    run_trace(SMALL, words, Tuning(2, 2, 4))


@pytest.mark.parametrize("words", [6144, 16384])
def test_big_records(words):
    run_trace(SMALL._replace(requests=2, hot_slots=70, selected=33, pages=40), words, Tuning(4, 4, 4))


@pytest.mark.parametrize("programs", [1, 2, 4, 8])
@pytest.mark.parametrize("threads", [1, 4, 8])
def test_programs_and_threads(programs, threads):
    run_trace(SMALL._replace(selected=140, hot_slots=700), 146, Tuning(programs, threads, 2), steps=60)


@pytest.mark.parametrize("name", CORNERS)
def test_corners(name):
    sizes = CORNERS[name]
    small = sizes.hot_slots < 1000
    run_trace(sizes, 2, Tuning(2 if small else 4, 8, 4), steps=200 if small else 40)


@pytest.mark.parametrize("buckets", [1, 7, 64])
def test_rows_in_address_order(buckets):
    run_trace(SMALL, 164, Tuning(2, 4, 2, buckets), steps=100)
    run_trace(CORNERS["wide"], 2, Tuning(1, 8, 1, buckets), steps=30)


@pytest.mark.parametrize("walk", [all_hits, all_misses])
@pytest.mark.parametrize("sizes", [SMALL, CORNERS["K=H"], CORNERS["wide"]], ids=["small", "K=H", "wide"])
def test_all_hits_and_all_misses(sizes, walk):
    run_trace(sizes, 8, Tuning(4, 4, 4), steps=100 if sizes.hot_slots < 1000 else 20, walk=walk)


def test_context_beyond_shared_memory():
    """2M records of context: the bitmap doesn't fit, the set of selected ids is searched instead."""
    sizes = Sizes(2, 256, 600, 64, 64, 1 << 15)
    assert mosaic_gpu.shared_bytes(256, 600, 1 << 21, bitmap=True) > mosaic_gpu.SHARED_BYTES
    run_trace(sizes, 8, Tuning(2, 8, 4), fetch=False, steps=100)


def test_without_fetch():
    run_trace(SMALL, 0, Tuning(1, 8, 4), fetch=False)


def test_in_place():
    """Donated tables and hot rows keep their buffers in a loop, and nothing of their size is allocated."""
    sizes = Sizes(4, 256, 512, 16, 16, 128)
    rng = np.random.default_rng(0)
    ids, ages, pages = tables(sizes, rng)
    rows_per_space, slots, words = 4 * 128 * 16, 528, 288
    pool = make_pool(rows_per_space, words)
    hot = jnp.zeros((2, 4 * slots, words), jnp.uint32)
    steps = list(trace(sizes, 10, rng))
    selected, length = (jnp.asarray(np.stack(x)) for x in zip(*steps, strict=True))
    base = jnp.arange(4, dtype=jnp.int32) * slots

    def loop(pool, hot, ids, ages, selected, length):
        def step(carry, x):
            hot, ids, ages = carry
            got, hot = mosaic_gpu.resolve(
                *x, ids, ages, pages, base, jnp.int32(1), ring_slots=16, page_records=16,
                rows=(pool, hot, jnp.int32(0), jnp.int32(1)), rows_per_space=rows_per_space, how=Tuning(4, 8, 4),
            )  # fmt: skip
            return (hot, got.slot_ids, got.recency), got.counters

        return jax.lax.scan(step, (hot, ids, ages), (selected, length))

    run = jax.jit(loop, donate_argnums=(1, 2, 3)).lower(pool, hot, ids, ages, selected, length).compile()
    args = [hot, jax.device_put(ids), jax.device_put(ages)]
    before = [x.unsafe_buffer_pointer() for x in args]
    after, _ = run(pool, *args, selected, length)
    assert [x.unsafe_buffer_pointer() for x in after] == before
    memory = run.memory_analysis()
    assert memory.temp_size_in_bytes < 1 << 19, memory
    assert memory.host_temp_size_in_bytes == 0, memory
    assert pool.sharding == pinned()


@pytest.mark.parametrize("options", [None, CONCURRENT], ids=["plain", "command buffers"])
def test_array_api(options):
    """The API picks the kernel by itself; the anchor's fetch and a follower's replay of its plan, in one scan."""
    sizes = Sizes(4, 128, 256, 16, 16, 64)
    rng = np.random.default_rng(3)
    ids, ages, pages = (jnp.asarray(x) for x in tables(sizes, rng))
    rows_per_space, slots, words = 4 * 64 * 16, 272, 164
    pool = make_pool(2 * rows_per_space, words)
    base = jnp.arange(4, dtype=jnp.int32) * slots
    selected, length = (jnp.asarray(np.stack(x)) for x in zip(*trace(sizes, 40, rng), strict=True))
    shape = dict(ring_slots=16, page_records=16)

    def step(pool, implementation, carry, x):
        anchor, follower, ids, ages = carry
        resolved, anchor = resolve_and_fetch(
            pool, anchor, *x, ids, ages, pages, base, 1, 0, 0, rows_per_space=rows_per_space, **shape,
            implementation=implementation,
        )  # fmt: skip
        follower, again = fetch(
            pool, follower, resolved.plan, base, 1, 0, rows_per_space=rows_per_space, beside=True,
            implementation=implementation,
        )  # fmt: skip
        return (anchor, follower, resolved.slot_ids, resolved.recency), (
            resolved.place,
            again,
            resolved.counters,
        )

    def run(implementation, options):
        hot = jnp.zeros((1, 4 * slots, words), jnp.uint32)

        def scan(pool, *state):
            return jax.lax.scan(functools.partial(step, pool, implementation), state, (selected, length))

        return jax.jit(scan, compiler_options=options)(pool, hot, hot, ids, ages)

    same(run("auto", options), run("xla", None), "auto against xla: ")
