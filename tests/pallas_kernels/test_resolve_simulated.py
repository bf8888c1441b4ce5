# SPDX-License-Identifier: Apache-2.0
"""Resolve as compiled for an H200, run by the simulator: several programs and warpgroups, without a GPU or a fetch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.resolve import reference
from tests.pallas_kernels.compiled_kernels import compiled, needs_packages
from tests.pallas_kernels.kernel_cases import Sizes, same, tables, trace

pytestmark = needs_packages
KERNEL = """
from pallas_kernels.resolve import mosaic_gpu
from pallas_kernels.resolve.tuning import Tuning

requests, selected, hot_slots, ring_slots, page_records, pages, tables, programs, threads = numbers
options = dict(ring_slots=ring_slots, page_records=page_records, how=Tuning(programs, threads, 2))
run = lambda *args: mosaic_gpu.resolve(*args, **options)[0]
args = (
    ((requests, selected), jnp.int32), ((requests,), jnp.int32), ((tables, requests, hot_slots), jnp.int32),
    ((tables, requests, hot_slots), jnp.int16), ((requests, pages), jnp.int32), ((requests,), jnp.int32),
    ((), jnp.int32),
)
"""


@pytest.mark.parametrize(
    "sizes, how",
    [
        (Sizes(3, 9, 150, 5, 4, 75), (2, 4)),
        (Sizes(2, 140, 700, 5, 4, 300), (4, 2)),
        (Sizes(2, 140, 700, 5, 4, 300), (1, 8)),
    ],
    ids=str,
)
def test_trace(sizes, how):
    """Places, plan, counters and tables are the reference's, bit by bit; rows of requests lie in another order."""
    rng = np.random.default_rng(0)
    ids, ages, pages = (np.array(x, order="C") for x in tables(sizes, rng))
    table = sizes.tables - 1
    base = np.arange(sizes.requests, dtype=np.int32)[::-1] * (sizes.hot_slots + sizes.ring_slots)
    options = {"ring_slots": sizes.ring_slots, "page_records": sizes.page_records}
    want_of = jax.jit(functools.partial(reference.resolve, **options))
    misses = 0
    for number, (selected, length) in enumerate(trace(sizes, 12, rng)):
        selected, length = np.asarray(selected), np.asarray(length)
        # In arrays of its own: the simulator changes the tables in place.
        want = jax.tree.map(np.array, want_of(selected, length, ids, ages, pages, base, jnp.int32(table)))
        place, host_row, slot = (np.full_like(selected, -77) for _ in range(3))
        counters, count = np.full((sizes.requests, 3), -77, np.int32), np.full(sizes.requests, -77, np.int32)
        operands = [np.array([table], np.int32), length, base.copy(), ages, ids, selected, pages]  # by their first use
        operands += [place, host_row, slot, counters, count]
        compiled(KERNEL, *sizes, *how).run(operands, clusters=sizes.requests, seed=number)
        got = reference.Resolved(place, reference.Plan(host_row, slot, count), counters, ids, ages)
        same(got, want, f"step {number}: ")
        misses += int(count.sum())
    assert misses > 0
