# SPDX-License-Identifier: Apache-2.0
"""The portable fetch and backup: every byte, no other byte, and the pool never leaves pinned host memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backup import backup
from pallas_kernels.fetch import fetch
from pallas_kernels.resolve import Plan
from tests.helpers import PLATFORMS, int32, lowered_for, pinned, same_bits, words

REQUESTS, WIDTH, SLOTS = 3, 20, 24
SPACES, GROUPS, ROWS_PER_SPACE = 3, 2, 70


@functools.cache
def compiled_fetch():
    return jax.jit(functools.partial(fetch, rows_per_space=ROWS_PER_SPACE, implementation="xla"))


def random_plan(rng: np.random.Generator, counts) -> Plan:
    """Distinct slots a request, any host rows, -1 behind the last miss."""
    host_row = np.full((REQUESTS, WIDTH), -1, np.int32)
    slot = np.full((REQUESTS, WIDTH), -1, np.int32)
    for r, count in enumerate(counts):
        host_row[r, :count] = rng.permutation(ROWS_PER_SPACE)[:count]
        slot[r, :count] = rng.permutation(SLOTS)[:count]
    return Plan(int32(host_row), int32(slot), int32(counts))


def fetched(pool, hot_rows, plan: Plan, base, space: int, group: int) -> np.ndarray:
    """What fetch has to give, a row at a time."""
    want = hot_rows.copy()
    for r in range(REQUESTS):
        for m in range(int(plan.count[r])):
            want[group, base[r] + plan.slot[r, m]] = pool[space * ROWS_PER_SPACE + plan.host_row[r, m]]
    return want


# No miss at all, one, a partial block of the transfer, an exact one (32), several, and all places of the plan.
@pytest.mark.parametrize("counts", [(0, 0, 0), (0, 1, 0), (3, 0, 5), (12, 0, 20), (17, 15, 12), (20, 20, 20)])
def test_fetch_moves_the_planned_rows_and_no_other(counts):
    rng = np.random.default_rng(sum(counts))
    pool, hot_rows = words(rng, SPACES * ROWS_PER_SPACE, 4), words(rng, GROUPS, REQUESTS * SLOTS, 4)
    base = rng.permutation(REQUESTS) * SLOTS
    plan = random_plan(rng, counts)
    for space, group in ((0, 0), (2, 1)):
        got = compiled_fetch()(
            pinned(pool), jnp.asarray(hot_rows), plan, int32(base), jnp.int32(space), jnp.int32(group)
        )
        same_bits(got[0], fetched(pool, hot_rows, plan, base, space, group))
        same_bits(got[1].count, plan.count)


@pytest.mark.parametrize("row_words", [2, 164, 288])
def test_fetch_of_real_row_sizes(row_words):
    """8, 656 and 1152 bytes; odd numbers of 16-byte pieces move like any other."""
    rng = np.random.default_rng(row_words)
    pool, hot_rows = words(rng, SPACES * ROWS_PER_SPACE, row_words), words(rng, GROUPS, REQUESTS * SLOTS, row_words)
    base = np.arange(REQUESTS) * SLOTS
    plan = random_plan(rng, (7, 0, 20))
    got = compiled_fetch()(pinned(pool), jnp.asarray(hot_rows), plan, int32(base), jnp.int32(1), jnp.int32(0))
    same_bits(got[0], fetched(pool, hot_rows, plan, base, 1, 0))


def test_backup_moves_the_rows_and_no_other():
    rng = np.random.default_rng(0)
    pool, rows = words(rng, 50, 4), words(rng, 12, 4)
    where = rng.permutation(50)[:12].astype(np.int32)
    where[[0, 5, 11]] = -1
    got = jax.jit(functools.partial(backup, implementation="xla"))(pinned(pool), jnp.asarray(rows), int32(where))
    want = pool.copy()
    for row, target in zip(rows, where, strict=True):
        if target >= 0:
            want[target] = row
    same_bits(got, want)
    assert got.sharding.memory_kind == "pinned_host"


def test_backup_of_nothing_changes_nothing():
    """-1 is not the last row."""
    rng = np.random.default_rng(1)
    pool, rows = words(rng, 50, 4), words(rng, 12, 4)
    got = jax.jit(functools.partial(backup, implementation="xla"))(
        pinned(pool), jnp.asarray(rows), jnp.full(12, -1, jnp.int32)
    )
    same_bits(got, pool)


def test_fetch_and_backup_in_a_loop_never_copy_the_pool():
    """A pool of 8 MiB carried through a loop that reads and writes it: same buffer, nothing of its size beside it."""
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    # Of its own memory: what shares NumPy's, as a well aligned array may, can't be donated.
    empty = functools.partial(jnp.zeros, (SPACES * ROWS_PER_SPACE * 100, 100), jnp.uint32)
    pool = jax.jit(empty, out_shardings=host)()
    rng = np.random.default_rng(2)
    plan = random_plan(rng, (5, 3, 1))
    hot_rows = jnp.zeros((GROUPS, REQUESTS * SLOTS, 100), jnp.uint32)
    base = int32(np.arange(REQUESTS) * SLOTS)

    def steps(pool, hot_rows, plan, base):
        pool = jax.device_put(pool, jax.memory.Space.Host)

        def step(number, carry):
            pool, hot_rows = carry
            hot_rows, _ = fetch(pool, hot_rows, plan, base, 1, 0, rows_per_space=ROWS_PER_SPACE, implementation="xla")
            hot_rows = hot_rows + jnp.uint32(1)
            return backup(pool, hot_rows[0, :4], number + jnp.arange(4), implementation="xla"), hot_rows

        return jax.lax.fori_loop(0, 3, step, (pool, hot_rows))

    on_device = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    run = jax.jit(steps, donate_argnums=(0, 1), out_shardings=(host, on_device))
    built = run.lower(pool, hot_rows, plan, base).compile()
    assert built.memory_analysis().temp_size_in_bytes < pool.nbytes // 8
    assert built.memory_analysis().host_temp_size_in_bytes < pool.nbytes // 8
    address = pool.unsafe_buffer_pointer()
    new_pool, _ = built(pool, hot_rows, plan, base)
    assert new_pool.unsafe_buffer_pointer() == address
    assert new_pool.sharding.memory_kind == "pinned_host"
    assert np.asarray(new_pool)[:6].any()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_lowers_anywhere(platform):
    pool = pinned(np.zeros((SPACES * ROWS_PER_SPACE, 4), np.uint32))
    hot_rows = jnp.zeros((GROUPS, REQUESTS * SLOTS, 4), jnp.uint32)
    plan = random_plan(np.random.default_rng(3), (5, 3, 1))

    def both(pool, hot_rows, plan, base):
        pool = jax.device_put(pool, jax.memory.Space.Host)
        hot_rows, _ = fetch(pool, hot_rows, plan, base, 0, 0, rows_per_space=ROWS_PER_SPACE, implementation="xla")
        return backup(pool, hot_rows[0, :4], jnp.arange(4), implementation="xla"), hot_rows

    text = lowered_for(both, platform, pool, hot_rows, plan, int32(np.zeros(REQUESTS)))
    assert len(re.findall(r'call @compute_on.*_xla_compute_type = "host"', text)) == 2, "gather and scatter of the pool"
    assert '_xla_buffer_placement = "pinned_host"' in text


def fetch_arguments(**changes):
    plan = Plan(jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32))
    plan = plan._replace(**{name: changes.pop(name) for name in plan._fields if name in changes})
    given = {
        "pool": pinned(np.zeros((8, 4), np.uint32)),
        "hot_rows": jnp.zeros((1, 6, 4), jnp.uint32),
        "plan": plan,
        "base": jnp.zeros(2, jnp.int32),
        "space": 0,
        "group": 0,
        "rows_per_space": 8,
    }
    return given | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hot_rows": jnp.zeros((6, 4), jnp.uint32)}, "hot_rows must have shape"),
        ({"hot_rows": jnp.zeros((1, 6, 4), jnp.float32)}, "hot_rows must be uint32, got float32"),
        ({"hot_rows": jnp.zeros((1, 6, 5), jnp.uint32)}, r"pool must have shape \['any', 5\], got \[8, 4\]"),
        ({"pool": jnp.zeros((8, 4), jnp.int32)}, "pool must be uint32, got int32"),
        ({"host_row": jnp.zeros((2, 3), jnp.int16)}, "plan.host_row must be int32, got int16"),
        ({"slot": jnp.zeros((2, 4), jnp.int32)}, r"plan.slot must have shape \[2, 3\], got \[2, 4\]"),
        ({"count": jnp.zeros(3, jnp.int32)}, r"plan.count must have shape \[2\], got \[3\]"),
        ({"base": jnp.zeros(3, jnp.int32)}, r"base must have shape \[2\], got \[3\]"),
        ({"implementation": "fast"}, "implementation must be one of auto, xla, mosaic_gpu, got 'fast'"),
    ],
)
def test_fetch_names_wrong_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        fetch(**fetch_arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool": jnp.zeros((8, 4, 1), jnp.uint32)}, "pool must have shape"),
        ({"pool": jnp.zeros((8, 4), jnp.float32)}, "pool must be uint32, got float32"),
        ({"rows": jnp.zeros((2, 5), jnp.uint32)}, r"rows must have shape \['any', 4\], got \[2, 5\]"),
        ({"rows": jnp.zeros((2, 4), jnp.int32)}, "rows must be uint32, got int32"),
        ({"host_row": jnp.zeros(3, jnp.int32)}, r"host_row must have shape \[2\], got \[3\]"),
        ({"host_row": jnp.zeros(2, jnp.uint32)}, "host_row must be int32, got uint32"),
        ({"implementation": "fast"}, "implementation must be one of auto, xla, mosaic_gpu, got 'fast'"),
    ],
)
def test_backup_names_wrong_arguments(changes, message):
    given = {
        "pool": pinned(np.zeros((8, 4), np.uint32)),
        "rows": jnp.zeros((2, 4), jnp.uint32),
        "host_row": jnp.zeros(2, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        backup(**(given | changes))
