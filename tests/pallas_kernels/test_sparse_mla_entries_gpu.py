# SPDX-License-Identifier: Apache-2.0
"""On the GPU: attention over entries, a window and a sink against float64, wherever the entries lie."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.online_softmax import Split
from pallas_kernels.sparse_mla import mosaic_gpu, sparse_entries
from pallas_kernels.sparse_mla.tuning import tiles_of, tuning
from tests.pallas_kernels.attention_cases import MLA_SCALE, OUT_TOLERANCE, agree, entry_case, moved
from tests.pallas_kernels.kernel_cases import needs_gpu, same

pytestmark = needs_gpu


@functools.cache
def attend(how=None, implementation="mosaic_gpu"):
    if how is not None:
        return jax.jit(functools.partial(mosaic_gpu.sparse_entries, scale=MLA_SCALE, how=how))
    options = {"record": "bfloat16", "scale": MLA_SCALE, "implementation": implementation}
    return jax.jit(functools.partial(sparse_entries, **options))


@pytest.mark.parametrize(
    "requests, heads, selected, window",
    [(1, 64, 512, 128), (64, 64, 512, 128), (5, 64, 512, 128), (5, 16, 77, 100), (3, 128, 333, 65), (2, 96, 63, 1),
     (5, 64, 0, 128), (5, 64, 200, 0), (8, 64, 1024, 128), (6, 1, 1, 1)],
)  # fmt: skip
def test_against_float64(requests, heads, selected, window):
    """Gaps, no entries, no window, neither; NaN in every slot that isn't selected."""
    case = entry_case("bfloat16", requests, heads, selected, window)
    got = attend()(*case.args())
    agree(got, case.want())
    if requests > 1:
        assert not np.asarray(got[0][-1]).any()
        # Turned into units of log2 and back: two constants and two products are rounded, by 2.4e-7 together; and a
        # log of 1 by approximation is added.
        np.testing.assert_allclose(got[1][-1], case.sink, rtol=1e-5)
    want = attend(implementation="xla")(*case.args())
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=OUT_TOLERANCE)


@pytest.mark.parametrize("requests", [2, 64])
def test_the_same_bits_wherever_the_entries_lie(requests):
    case = entry_case("bfloat16", requests, 64, 200, 128)
    first = attend()(*case.args())
    for seed, extra in enumerate((0, 1000, 7)):
        same(attend()(*case.args(*moved(case.words, case.place, extra, seed))), first, f"{extra} more slots: ")
    for i in range(5):
        same(attend()(*case.args()), first, f"run {i}: ")


def test_parts():
    """Any number of parts, which begin and end among entries or in the window; the same bits whatever else is said."""
    case = entry_case("bfloat16", 5, 64, 300, 128)
    want, tiles = case.want(), tiles_of(300) + tiles_of(128)
    for parts in (1, 2, 3, 5, 7):
        how = tuning(5, 64, 300, window=128)._replace(split=Split(parts, -(-tiles // parts)))
        got = attend(how)(*case.args())
        agree(got, want)
        for change in ({"handed_on": False}, {"consumer_registers": (240, 200), "producer_registers": 64}):
            same(attend(how._replace(**change))(*case.args()), got, f"{parts} parts, {change}: ")
