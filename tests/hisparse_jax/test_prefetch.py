# SPDX-License-Identifier: Apache-2.0
"""The schedule of fetches, for the published GLM-5.2 pattern and in general."""

from __future__ import annotations

import pytest

from hisparse_jax.prefetch import Fetch, followers_issued, schedule
from models.sizes import PUBLISHED

GLM_52 = PUBLISHED["GLM-5.2"].group_sizes


def test_published_pattern():
    assert GLM_52 == (1, 1) + (4,) * 19
    fetches = schedule(GLM_52)
    assert [fetch.layer for fetch in fetches] == list(range(78))
    anchors = sorted({fetch.anchor for fetch in fetches})
    assert anchors == [0, 1, *range(2, 78, 4)] and len(anchors) == 21
    assert fetches[:2] == (Fetch(0, 0, 0, 0), Fetch(1, 0, 1, 1))
    assert fetches[2:6] == (Fetch(2, 0, 2, 2), Fetch(3, 1, 2, 2), Fetch(4, 2, 2, 2), Fetch(5, 3, 2, 2))
    assert [fetch.layers_ahead for fetch in fetches if fetch.anchor == 74] == [0, 1, 2, 3]
    assert sum(fetch.layers_ahead > 0 for fetch in fetches) == 57


@pytest.mark.parametrize("sizes", [(1,), (4,), (1, 1, 4, 4, 1), (2, 3, 1), GLM_52])
@pytest.mark.parametrize("prefetch", [True, False])
def test_every_layer_is_fetched_once_and_in_time(sizes, prefetch):
    fetches = schedule(sizes, prefetch=prefetch)
    assert sorted(fetch.layer for fetch in fetches) == list(range(sum(sizes)))
    for fetch in fetches:
        assert fetch.layer == fetch.anchor + fetch.position
        assert fetch.anchor <= fetch.issued <= fetch.layer  # not before its plan is known, not after it is read
        assert fetch.issued == (fetch.anchor if prefetch else fetch.layer)
    assert [fetch.issued for fetch in fetches] == sorted(fetch.issued for fetch in fetches)


def test_order_inside_a_group():
    assert followers_issued(1, prefetch=True) == followers_issued(1, prefetch=False) == ((),)
    assert followers_issued(4, prefetch=True) == ((1, 2, 3), (), (), ())
    assert followers_issued(4, prefetch=False) == ((), (1,), (2,), (3,))
