# SPDX-License-Identifier: Apache-2.0
"""Rules of replacement and Belady's bound, against the simulator."""

import functools

import numpy as np
import pytest

from hisparse_jax.policies import ORDERS, belady_misses, hit_first_lru, replay
from tests import oracles
from tests.helpers import padded, same_bits

STREAMS, STEPS = 3, 60


def trace(sizes, seed: int = 0, streams: int = STREAMS, steps: int = STEPS, start=None):
    """Selections `[steps, streams, K]` and lengths `[steps, streams]`: a few records are wanted often, many rarely."""
    width, hot_slots, _ = sizes
    rng = np.random.default_rng(seed)
    lengths = np.array(start or [1, hot_slots, hot_slots + 5][:streams])
    selected, length = [], []
    for _ in range(steps):
        lengths = lengths + rng.integers(0, 2, streams)
        chosen = [rng.zipf(1.3, width) % count for count in lengths]
        selected.append([padded(ids, width) for ids in chosen])
        length.append(lengths)
    return np.array(selected, np.int32), np.array(length, np.int32)


def admitted(in_place: bool, hot_slots: int) -> oracles.Table:
    return oracles.admitted_table(hot_slots if in_place else hot_slots + 1, hot_slots)


@pytest.mark.parametrize("rule", ORDERS)
@pytest.mark.parametrize(("sizes", "in_place"), [((3, 4, 1), True), ((4, 12, 2), False)])
def test_replay_counts_what_the_simulator_counts(rule, sizes, in_place):
    _, hot_slots, ring_slots = sizes
    selected, length = trace(sizes)
    length[5:8, 1] = 0  # takes no part
    selected[5:8, 1] = -1
    got = replay(selected, length, hot_slots=hot_slots, ring_slots=ring_slots, order=ORDERS[rule], in_place=in_place)
    want = [
        oracles.count_misses(
            selected[:, stream],
            length[:, stream],
            admitted(in_place, hot_slots),
            hot_slots=hot_slots,
            ring_slots=ring_slots,
            rule=oracles.RULES[rule],
        )
        for stream in range(STREAMS)
    ]
    same_bits(got[..., 2], np.array(want, np.int32).T)
    np.testing.assert_array_equal(got[..., 0] + got[..., 2], (selected >= 0).sum(-1))
    assert np.asarray(got[..., 2]).sum() > 0


def test_rules_differ_and_none_beats_belady():
    sizes = _, hot_slots, ring_slots = 4, 8, 2
    selected, length = trace(sizes, seed=3, steps=200, start=[20, 20, 20])
    count = functools.partial(replay, selected, length, hot_slots=hot_slots, ring_slots=ring_slots)
    misses = {name: int(count(order=order)[..., 2].sum()) for name, order in ORDERS.items()}
    assert len(set(misses.values())) == len(ORDERS), misses
    bound = sum(
        belady_misses(selected[:, s], length[:, s], hot_slots=hot_slots, ring_slots=ring_slots).sum()
        for s in range(STREAMS)
    )
    assert 0 < bound < min(misses.values()), (bound, misses)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("sizes", [(2, 3, 1), (2, 2, 2), (3, 4, 1)])
def test_belady_is_the_best_of_all_rules(sizes, in_place):
    """Every replacement that there is, tried out on short traces."""
    width, hot_slots, ring_slots = sizes
    for seed in range(12):
        selected, length = trace(sizes, seed, streams=1, steps=14, start=[hot_slots if in_place else hot_slots + 4])
        selected, length = selected[:, 0], length[:, 0]
        got = belady_misses(selected, length, hot_slots=hot_slots, ring_slots=ring_slots, in_place=in_place)
        table = admitted(in_place, hot_slots)
        want = oracles.fewest_misses(selected, length, table, hot_slots=hot_slots, ring_slots=ring_slots)
        assert got.sum() == want, f"seed {seed}"
        assert got.shape == (14,) and (got <= width).all()


def test_belady_of_a_request_that_fits_is_nothing():
    selected, length = trace((3, 4, 1), streams=1, steps=10, start=[1])
    assert not belady_misses(selected[:, 0], np.minimum(length[:, 0], 4), hot_slots=4, ring_slots=1).any()


def test_the_default_is_hit_first():
    sizes = 4, 8, 2
    selected, length = trace(sizes, seed=1)
    default = replay(selected, length, hot_slots=8, ring_slots=2)
    same_bits(default, replay(selected, length, hot_slots=8, ring_slots=2, order=hit_first_lru))


def test_where_the_rules_part():
    """H = 3, K = 2, W = 1, a cold request of 20 records; slots are written as the records they hold.

    Steps 1 and 2 load 1, 2 and 4 and hit 1; step 3 hits 2 and loads 5 for the first of the order that was not hit:
    for all rules 1 and 4 are left to choose from. Step 4 wants 1 and 3 and step 5 wants 2 and 3.
    """
    selected = np.array([[[1, 2]], [[1, 4]], [[2, 5]], [[1, 3]], [[2, 3]]], np.int32)
    length = np.full((5, 1), 20, np.int32)
    misses = {
        name: np.asarray(replay(selected, length, hot_slots=3, ring_slots=1, order=order))[:, 0, 2].tolist()
        for name, order in ORDERS.items()
    }
    # FIFO lets 1 go in step 3, though step 2 hit it. In step 4, 3 replaces 5, which was just loaded, for hit-first,
    # and 2, which was just hit, for plain LRU.
    assert misses == {"hit_first_lru": [2, 1, 1, 1, 0], "plain_lru": [2, 1, 1, 1, 1], "fifo": [2, 1, 1, 2, 1]}
    assert belady_misses(selected[:, 0], length[:, 0], hot_slots=3, ring_slots=1).tolist() == [2, 1, 1, 1, 0]
