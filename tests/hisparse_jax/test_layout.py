# SPDX-License-Identifier: Apache-2.0
"""Sizes known before anything is allocated: exact to the byte, and every impossible one refused."""

import jax
import numpy as np
import pytest

from hisparse_jax.cache.layout import Address, Budget, gib
from hisparse_jax.cache.state import create, placements
from tests.helpers import layout

SHAPES = {
    "one layer": {"group_sizes": (1,)},
    "layers": {"group_sizes": (1, 1, 1)},
    "followers": {"group_sizes": (1, 4, 2)},
    "open records": {"record_tokens": 5, "context_tokens": 48, "page_records": 3},
    "wide rows": {"row_bytes": 656, "hot_slots": 7, "request_slots": 1},
    "a ring wider than H": {"ring_slots": 9},
}


@pytest.mark.parametrize("residency", ["full", "hisparse", "no_io"])
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_bytes_are_those_of_the_arrays(residency, changes):
    sizes = layout(residency=residency, **changes)
    cache = create(sizes)
    rows = sum(rows.nbytes for rows in cache.hot_rows)
    everything = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert sizes.device_bytes() == {"rows": rows, "metadata": everything - rows - cache.pool.nbytes}
    assert sizes.host_bytes() == cache.pool.nbytes
    assert (cache.pool.nbytes == 0) == (residency == "full")


def test_every_array_is_where_it_belongs():
    cache = create(layout())
    for leaf, where in zip(jax.tree.leaves(cache), jax.tree.leaves(placements(cache)), strict=True):
        assert leaf.sharding == where
        assert where.memory_kind == ("pinned_host" if leaf is cache.pool else "device")


def test_no_two_arrays_share_a_buffer():
    """Donation needs that, and a follower's rows must not be its anchor's."""
    leaves = [leaf for leaf in jax.tree.leaves(create(layout())) if leaf.size]
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_derived_sizes():
    sizes = layout(context_tokens=47, record_tokens=2, page_records=5, host_pages=18, group_sizes=(1, 3, 2))
    assert (sizes.records, sizes.words, sizes.pages_per_request) == (24, 4, 5)
    assert (sizes.tables, sizes.spaces, sizes.rows_per_space, sizes.pool_rows) == (3, 6, 90, 540)
    assert (sizes.table_slots, sizes.slots_per_request) == (4, 6)
    assert [sizes.groups_at(position) for position in range(4)] == [3, 2, 1, 0]


def test_full_residency_has_no_table_and_no_pool():
    sizes = layout(residency="full")
    assert (sizes.table_slots, sizes.pages_per_request, sizes.rows_per_space, sizes.pool_rows) == (0, 0, 0, 0)
    assert sizes.slots_per_request == sizes.records == 24


def test_addresses():
    """Spaces are numbered group by group; a hot buffer holds one position of every group that has it."""
    assert layout(group_sizes=(1, 3, 2)).addresses() == (
        Address(space=0, table=0, position=0, group=0),
        Address(space=1, table=1, position=0, group=1),
        Address(space=2, table=1, position=1, group=0),
        Address(space=3, table=1, position=2, group=0),
        Address(space=4, table=2, position=0, group=2),
        Address(space=5, table=2, position=1, group=1),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_slots": 0}, "request_slots must be at least 1, got 0"),
        ({"context_tokens": 0}, "context_tokens must be at least 1, got 0"),
        ({"record_tokens": -1}, "record_tokens must be at least 1, got -1"),
        ({"selected": 0}, "selected must be at least 1, got 0"),
        ({"ring_slots": 0}, "ring_slots must be at least 1, got 0"),
        ({"page_records": 0}, "page_records must be at least 1, got 0"),
        ({"group_sizes": ()}, r"group_sizes must name at least one group of at least one space, got \(\)"),
        ({"group_sizes": (1, 0)}, r"at least one space, got \(1, 0\)"),
        ({"row_bytes": 0}, "row_bytes must be a positive multiple of 8, got 0"),
        ({"row_bytes": 12}, "row_bytes must be a positive multiple of 8, got 12"),
        ({"hot_slots": 2}, "hot_slots must be at least the 3 selected records, got 2"),
        ({"hot_slots": 32768}, r"hot_slots must be at most 32767 \(recency is int16\), got 32768"),
        ({"host_pages": 5}, "host_pages must hold at least one request of 48 tokens, 6 pages of 4 records; got 5"),
        (
            {"host_pages": 2**28},
            "the host pool would have 3221225472 rows, more than int32 can number; lower host_pages",
        ),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        layout(**changes)


@pytest.mark.parametrize("changes", [{"hot_slots": 2}, {"hot_slots": 40000}, {"host_pages": 0}])
def test_full_needs_no_hot_slots_and_no_pool(changes):
    assert layout(residency="full", **changes).host_bytes() == 0


def test_the_most_rows_that_int32_can_number():
    sizes = layout(group_sizes=(1,), page_records=1, host_pages=2**31 - 1)
    assert sizes.host_bytes() == (2**31 - 1) * 16
    with pytest.raises(ValueError, match="more than int32 can number"):
        layout(group_sizes=(1,), page_records=1, host_pages=2**31)


NEEDS = {"device": {"rows": 3000, "index": 96}, "host": {"host pool": 5000}}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"device_limit": 3095},
            "needs 3.0 KiB of device memory and there is 3.0 KiB; the largest part is rows with 2.9 KiB: lower "
            "cache.request_slots, cache.context_tokens or cache.hot_slots",
        ),
        (
            {"host_limit": 4999},
            "needs 4.9 KiB of host memory and there is 4.9 KiB; the largest part is host pool with 4.9 KiB: lower "
            "cache.host_pages, cache.request_slots or cache.context_tokens",
        ),
        ({"host_limit": 8095, "shared": True}, "needs 7.9 KiB of host memory and there is 7.9 KiB"),
        ({"device_limit": 10**6, "host_limit": 0}, "there is 0 B"),
    ],
)
def test_too_little_memory_says_what_to_change(limits, message):
    with pytest.raises(MemoryError, match=message):
        Budget(**NEEDS, **limits).check()


@pytest.mark.parametrize(
    "limits",
    [{}, {"device_limit": 3096}, {"host_limit": 5000}, {"device_limit": 1, "host_limit": 8096, "shared": True}],
)
def test_just_enough_memory_is_enough(limits):
    Budget(**NEEDS, **limits).check()
    tighter = {name: limit - 1 if name == "host_limit" else limit for name, limit in limits.items()}
    if tighter != limits:
        with pytest.raises(MemoryError):
            Budget(**NEEDS, **tighter).check()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**20, "5.0 MiB"), (3 * 2**40, "3072.00 GiB")],
)
def test_bytes_for_people(count, text):
    assert gib(count) == text


def test_a_new_cache_holds_nothing():
    sizes = layout()
    cache = create(sizes)
    assert np.all(np.asarray(cache.slot_ids) == -1) and np.all(np.asarray(cache.page_table) == -1)
    np.testing.assert_array_equal(np.asarray(cache.recency)[1, 2], np.arange(sizes.hot_slots))
    assert not np.asarray(cache.tokens).any() and not np.asarray(cache.active).any()
    assert np.all(np.asarray(cache.length) == 0)
