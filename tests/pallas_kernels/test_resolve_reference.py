# SPDX-License-Identifier: Apache-2.0
"""The portable resolve against the NumPy simulator, to the last bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fetch import fetch
from pallas_kernels.resolve import resolve, resolve_and_fetch
from pallas_kernels.resolve.reference import ORDERS
from tests import oracles
from tests.helpers import int32, padded, pinned, random_selection, same_bits, words
from tests.pallas_kernels.kernel_cases import SMALL, all_hits, all_misses, check_counters

PAGE_RECORDS, PAGES, REQUESTS, TABLES = 4, 10, 4, 2
SIZES = {  # K, H, W
    "small": (3, 4, 1),
    "K is H": (4, 4, 2),
    "K is 1": (1, 5, 3),
    "H is 1": (1, 1, 1),
    "ring wider than H": (3, 4, 6),
    "larger": (8, 16, 4),
}


@functools.cache
def compiled(ring_slots: int, rule: str = "hit_first_lru"):
    return jax.jit(
        functools.partial(
            resolve, ring_slots=ring_slots, page_records=PAGE_RECORDS, order=ORDERS[rule], implementation="xla"
        )
    )


class Trace:
    """Tables of the kernel and of the simulator side by side; `step` compares everything that comes out."""

    def __init__(self, sizes: tuple[int, int, int], rule: str = "hit_first_lru", lengths=None):
        self.width, self.hot_slots, self.ring_slots = sizes
        self.rule = rule
        lengths = [self.hot_slots + 1] * REQUESTS if lengths is None else lengths
        self.tables = [[oracles.admitted_table(length, self.hot_slots) for length in lengths] for _ in range(TABLES)]
        self.slot_ids = int32([[table.ids for table in row] for row in self.tables])
        self.recency = jnp.asarray(np.array([[table.recency for table in row] for row in self.tables]))
        self.base = int32(np.arange(REQUESTS)[::-1] * (self.hot_slots + self.ring_slots))
        self.pages = np.random.default_rng(7).permutation(REQUESTS * PAGES).reshape(REQUESTS, PAGES)

    def host_rows(self, request: int, missed: np.ndarray) -> np.ndarray:
        """Where each missed record is in a space of the pool."""
        rows = [
            -1 if i == oracles.EMPTY else self.pages[request, i // PAGE_RECORDS] * PAGE_RECORDS + i % PAGE_RECORDS
            for i in missed
        ]
        return np.array(rows, np.int32)

    def step(self, selected: np.ndarray, lengths, table: int = 0) -> list[oracles.Resolved]:
        got = compiled(self.ring_slots, self.rule)(
            int32(selected), int32(lengths), self.slot_ids, self.recency, int32(self.pages), self.base, jnp.int32(table)
        )
        want = [
            oracles.resolve_row(
                selected[r],
                lengths[r],
                self.tables[table][r],
                hot_slots=self.hot_slots,
                ring_slots=self.ring_slots,
                rule=oracles.RULES[self.rule],
            )
            for r in range(REQUESTS)
        ]
        self.tables[table] = [one.table for one in want]
        self.slot_ids, self.recency = got.slot_ids, got.recency
        slots = np.stack([one.slots for one in want])
        same_bits(got.place, np.where(slots >= 0, np.asarray(self.base)[:, None] + slots, -1).astype(np.int32))
        same_bits(got.plan.host_row, np.stack([self.host_rows(r, one.missed) for r, one in enumerate(want)]))
        same_bits(got.plan.slot, np.stack([one.missed_slots for one in want]))
        same_bits(got.plan.count, np.array([one.misses for one in want], np.int32))
        same_bits(got.counters, np.array([[one.hits, one.ring_hits, one.misses] for one in want], np.int32))
        same_bits(got.slot_ids, np.array([[t.ids for t in row] for row in self.tables], np.int32))
        same_bits(got.recency, np.array([[t.recency for t in row] for row in self.tables], np.int16))
        return want


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("rule", ORDERS)
def test_random_traces(sizes, rule):
    rng = np.random.default_rng(sum(sizes))
    width, hot_slots, ring_slots = sizes
    start = [int(rng.integers(1, hot_slots + 1)), hot_slots, hot_slots + 1, int(hot_slots + ring_slots)]
    trace = Trace(sizes, rule, start)
    lengths, seen = list(start), np.zeros(3, int)
    for _ in range(100):
        lengths = [min(length + int(rng.integers(0, 2)), PAGES * PAGE_RECORDS) for length in lengths]
        active = rng.random(REQUESTS) > 0.1
        now = [length if on else 0 for length, on in zip(lengths, active, strict=True)]
        selected = np.stack([random_selection(rng, length, width) for length in now])
        for done in trace.step(selected, now, table=int(rng.integers(TABLES))):
            seen += (done.hits, done.ring_hits, done.misses)
    assert seen.min() > 0, "a trace without hits, ring hits or misses shows nothing"


def test_lengths_around_the_boundaries():
    """Every length from 0 over H and H + W, with all records, none, the oldest and the newest selected."""
    width, hot_slots, ring_slots = SIZES["small"]
    for length in range(hot_slots + 3 * ring_slots + 3):
        trace = Trace(SIZES["small"], lengths=[length] * REQUESTS)
        oldest = padded(range(min(width, length)), width)
        newest = padded(range(max(0, length - width), length), width)
        last = padded(range(max(0, length - 1), length), width)
        trace.step(np.stack([oldest, newest, last, padded([], width)]), [length] * REQUESTS)


def test_short_becomes_long_with_its_records_in_place():
    """The first step beyond H finds 0..H-1 in the table, so only a record that has left the ring can miss."""
    trace = Trace((3, 4, 1), lengths=[2] * REQUESTS)
    for length, ids in ((4, [0, 2, 3]), (5, [0, 3, 4]), (6, [1, 4, 5])):
        done = trace.step(np.stack([padded(ids, 3)] * REQUESTS), [length] * REQUESTS)
        assert [one.misses for one in done] == [int(length == 6)] * REQUESTS
    assert done[0].missed[0] == 4


def test_all_miss_then_all_hit():
    trace = Trace((4, 4, 2))
    lengths = [30] * REQUESTS
    first, second = padded([1, 5, 9, 13], 4), padded([2, 6, 10, 14], 4)
    for selected, misses in ((first, 4), (first, 0), (second, 4), (second, 0), (first, 4)):
        done = trace.step(np.stack([selected] * REQUESTS), lengths)
        assert [one.misses for one in done] == [misses] * REQUESTS


@pytest.mark.parametrize("walk", [all_hits, all_misses])
@pytest.mark.parametrize("width", [SMALL.selected, SMALL.hot_slots])
def test_walks_of_the_kernel_tests(width, walk):
    """Traces that are nothing but hits after the first step, or nothing but misses, by the simulator."""
    sizes, counters = SMALL._replace(selected=width), []
    tables = [oracles.admitted_table(sizes.hot_slots + 1, sizes.hot_slots)] * sizes.requests
    options = {"hot_slots": sizes.hot_slots, "ring_slots": sizes.ring_slots}
    for selected, length in walk(sizes, 100, np.random.default_rng(0)):
        done = [oracles.resolve_row(*row, **options) for row in zip(selected, length, tables, strict=True)]
        tables = [one.table for one in done]
        counters.append([(one.hits, one.ring_hits, one.misses) for one in done])
    check_counters(np.array(counters), walk, width)


def test_all_in_the_ring():
    trace = Trace((3, 4, 6))
    done = trace.step(np.stack([padded([14, 17, 19], 3)] * REQUESTS), [20] * REQUESTS)
    assert [(one.hits, one.ring_hits, one.misses) for one in done] == [(3, 3, 0)] * REQUESTS
    np.testing.assert_array_equal(done[0].slots, [4 + 14 % 6, 4 + 17 % 6, 4 + 19 % 6])


def test_an_inactive_row_keeps_its_tables_and_says_nothing():
    trace = Trace((3, 4, 1))
    lengths = [20, 20, 20, 20]
    trace.step(np.stack([padded([1, 2, 3], 3)] * REQUESTS), lengths)
    before = np.asarray(trace.slot_ids), np.asarray(trace.recency)
    # What an inactive row has selected may be anything.
    stale = np.stack([padded([4, 5, 6], 3)] * REQUESTS)
    got = compiled(1)(
        int32(stale), int32([0, 0, 0, 0]), trace.slot_ids, trace.recency, int32(trace.pages), trace.base, jnp.int32(0)
    )
    for part in (got.place, got.plan.host_row, got.plan.slot):
        same_bits(part, np.full((REQUESTS, 3), -1, np.int32))
    same_bits(got.plan.count, np.zeros(REQUESTS, np.int32))
    same_bits(got.counters, np.zeros((REQUESTS, 3), np.int32))
    same_bits(got.slot_ids, before[0])
    same_bits(got.recency, before[1])


def test_resolve_and_fetch_is_resolve_and_then_fetch():
    """The fused operation is defined by the two: the same results, and the rows of the plan and no other."""
    trace, rng = Trace((8, 16, 4)), np.random.default_rng(5)
    rows_per_space, slots = REQUESTS * PAGES * PAGE_RECORDS, 20
    pool, hot_rows = pinned(words(rng, 2 * rows_per_space, 4)), jnp.asarray(words(rng, 2, REQUESTS * slots, 4))
    base = int32(np.arange(REQUESTS) * slots)
    options = {"ring_slots": 4, "page_records": PAGE_RECORDS, "implementation": "xla"}
    fused = jax.jit(functools.partial(resolve_and_fetch, rows_per_space=rows_per_space, **options))
    then_fetch = jax.jit(functools.partial(fetch, rows_per_space=rows_per_space, implementation="xla"))
    lengths = int32([40, 33, 0, 21])
    for number in range(6):
        selected = int32(np.stack([random_selection(rng, int(length), 8) for length in lengths]))
        tables = (selected, lengths, trace.slot_ids, trace.recency, int32(trace.pages), base)
        want = compiled(4)(*tables, jnp.int32(1))
        want_rows, _ = then_fetch(pool, hot_rows, want.plan, base, jnp.int32(1), jnp.int32(0))
        got, rows = fused(pool, hot_rows, *tables, jnp.int32(1), jnp.int32(1), jnp.int32(0))
        jax.tree.map(same_bits, got, want)
        same_bits(rows, want_rows)
        assert number or want.plan.count.sum() > 0
        trace.slot_ids, trace.recency, hot_rows = got.slot_ids, got.recency, rows


def arguments(**changes):
    given = {
        "selected": jnp.zeros((2, 3), jnp.int32),
        "length": jnp.zeros(2, jnp.int32),
        "slot_ids": jnp.zeros((1, 2, 4), jnp.int32),
        "recency": jnp.zeros((1, 2, 4), jnp.int16),
        "page_table": jnp.zeros((2, 5), jnp.int32),
        "base": jnp.zeros(2, jnp.int32),
        "table": 0,
        "ring_slots": 1,
        "page_records": 4,
    }
    return given | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selected": jnp.zeros((3, 3), jnp.int32)}, r"selected must have shape \[2, 'any'\], got \[3, 3\]"),
        ({"selected": jnp.zeros((2, 3), jnp.float32)}, "selected must be int32, got float32"),
        ({"length": jnp.zeros(3, jnp.int32)}, r"length must have shape \[2\], got \[3\]"),
        ({"length": jnp.zeros(2, jnp.int16)}, "length must be int32, got int16"),
        ({"slot_ids": jnp.zeros((2, 4), jnp.int32)}, "slot_ids must have shape"),
        ({"slot_ids": jnp.zeros((1, 2, 4), jnp.int16)}, "slot_ids must be int32, got int16"),
        ({"recency": jnp.zeros((1, 2, 5), jnp.int16)}, r"recency must have shape \[1, 2, 4\], got \[1, 2, 5\]"),
        ({"recency": jnp.zeros((1, 2, 4), jnp.int32)}, "recency must be int16, got int32"),
        ({"page_table": jnp.zeros((1, 5), jnp.int32)}, "page_table must have shape"),
        ({"base": jnp.zeros(3, jnp.int32)}, r"base must have shape \[2\], got \[3\]"),
        ({"selected": jnp.zeros((2, 5), jnp.int32)}, "hot slots must be between K = 5 and 32767, got 4"),
        (
            {"slot_ids": jnp.zeros((1, 2, 32768), jnp.int32), "recency": jnp.zeros((1, 2, 32768), jnp.int16)},
            "hot slots must be between K = 3 and 32767, got 32768",
        ),
        ({"ring_slots": 0}, "ring_slots and page_records must be at least 1, got 0 and 4"),
        ({"page_records": 0}, "ring_slots and page_records must be at least 1, got 1 and 0"),
        ({"implementation": "cuda"}, "implementation must be one of auto, xla, mosaic_gpu, got 'cuda'"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        resolve(**arguments(**changes))
