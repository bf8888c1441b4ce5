# SPDX-License-Identifier: Apache-2.0
"""Pages of the host pool: each has one owner, and what is given back is found again."""

import hypothesis
import pytest
from hypothesis import strategies as st

from hisparse_jax.cache.pages import HostPages


def test_lowest_first():
    pages = HostPages(6)
    assert (pages.take(2), pages.take(3), pages.free) == ([0, 1], [2, 3, 4], 1)


def test_given_back_and_taken_again():
    pages = HostPages(6)
    first, second = pages.take(3), pages.take(3)
    pages.give_back(first)
    assert pages.free == 3
    assert sorted(pages.take(3)) == first
    assert second == [3, 4, 5] and pages.free == 0


def test_all_or_none():
    pages = HostPages(4)
    pages.take(2)
    with pytest.raises(MemoryError, match="3 host pages are needed and 2 of 4 are free: wait for a request to end or"):
        pages.take(3)
    assert pages.free == 2 and pages.take(2) == [2, 3]


def test_none_at_all():
    pages = HostPages(0)
    assert pages.take(0) == [] and pages.free == 0
    with pytest.raises(MemoryError):
        pages.take(1)


@pytest.mark.parametrize("wrong", [[0, 0], [0, 5], [9], [-1], [1, 2, 2, 0]])
def test_what_is_not_taken_cannot_be_given_back(wrong):
    """Twice in one call, still free, or not of this pool: refused as a whole."""
    pages = HostPages(6)
    pages.take(3)
    with pytest.raises(ValueError, match="are not taken, so they can't be given back"):
        pages.give_back(wrong)
    assert pages.free == 3
    pages.give_back([2, 0, 1])
    assert pages.free == 6


def test_double_free_is_found():
    pages = HostPages(6)
    taken = pages.take(2)
    pages.give_back(taken)
    with pytest.raises(ValueError, match=r"host pages \[0, 1\] are not taken"):
        pages.give_back(taken)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)
@hypothesis.given(st.integers(0, 12), st.lists(st.integers(0, 5) | st.none(), max_size=40), st.randoms())
def test_every_page_has_one_owner(count, moves, random):
    """A number takes so many pages; None gives the pages of some owner back."""
    pages, owners = HostPages(count), []
    for move in moves:
        if move is not None and move <= pages.free:
            owners.append(pages.take(move))
            assert len(owners[-1]) == move
        elif move is not None:
            with pytest.raises(MemoryError):
                pages.take(move)
        elif owners:
            pages.give_back(owners.pop(random.randrange(len(owners))))
        owned = [page for taken in owners for page in taken]
        assert len(owned) == len(set(owned)) == count - pages.free
        assert set(owned) <= set(range(count))
