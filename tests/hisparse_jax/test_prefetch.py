# SPDX-License-Identifier: Apache-2.0
"""The schedule of fetches, for the published GLM-5.2 pattern and in general."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hisparse_jax.cache.state import create
from hisparse_jax.prefetch import Fetch, followers_issued, schedule
from hisparse_jax.resolve import after_selection, part_of, selection_parts
from models.sizes import PUBLISHED
from tests import dsa_small as small
from tests.pallas_kernels.kernel_cases import abstract_gpu

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
@pytest.mark.parametrize("prefetch", ["off", "exact"])
def test_every_layer_is_fetched_once_and_in_time(sizes, prefetch):
    fetches = schedule(sizes, prefetch=prefetch)
    assert sorted(fetch.layer for fetch in fetches) == list(range(sum(sizes)))
    for fetch in fetches:
        assert fetch.layer == fetch.anchor + fetch.position
        assert fetch.anchor <= fetch.issued <= fetch.layer  # not before its plan is known, not after it is read
        assert fetch.layers_ahead == (fetch.position if prefetch == "exact" else 0)
    assert [fetch.issued for fetch in fetches] == sorted(fetch.issued for fetch in fetches)


def test_order_inside_a_group():
    assert followers_issued(1, prefetch="exact") == followers_issued(1, prefetch="off") == ((),)
    assert followers_issued(4, prefetch="exact") == ((1, 2, 3), (), (), ())
    assert followers_issued(4, prefetch="off") == ((), (1,), (2,), (3,))


@pytest.mark.parametrize("residency", ["full", "hisparse", "no_io"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_what_waits_for_the_selection_keeps_its_bits(residency, dtype):
    """Whatever the number is, an inactive request's too; with rows on the host the compiled program reads the ids."""
    value = jnp.asarray([[0.0, -0.0, 1.5, -3.0], [np.inf, -np.inf, np.nan, -np.nan]], dtype)
    selected = jnp.asarray([[0, 1, 5], [-1, -1, -1]], jnp.int32)
    layout = small.layout(small.model()[0], residency, small.CONFIG.selected)
    lowered = jax.jit(partial(after_selection, layout), keep_unused=True).lower(selected, value)
    assert "optimization_barrier" in lowered.as_text()  # or the condition would become a part of one matmul
    compiled = lowered.compile()
    assert np.asarray(compiled(selected, value)).tobytes() == np.asarray(value).tobytes()
    assert (" select(" in compiled.as_text()) == (residency == "hisparse")


def test_parts():
    """As measured for the kernels, one in plain JAX and where nothing is fetched, never more than there are slots."""
    model, _ = small.model()

    def chosen(requests, tokens, residency="hisparse", **options):
        layout = small.layout(model, residency, 6, requests, context_tokens=tokens, host_pages=requests * tokens // 8)
        return selection_parts(layout, **options)

    with abstract_gpu():
        assert [chosen(n, 65536, implementation="mosaic_gpu") for n in (16, 17, 43)] == [1, 2, 2]
        assert [chosen(n, 32768, implementation="mosaic_gpu") for n in (17, 43, 44)] == [1, 1, 2]
        assert chosen(44, 32760, implementation="mosaic_gpu") == 1
    assert chosen(43, 65536, implementation="xla") == 1
    assert [chosen(43, 32768, residency, wanted=3) for residency in ("full", "no_io", "hisparse")] == [1, 1, 3]
    assert chosen(2, 64, wanted=5) == 2


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_each_active_request_is_in_one_part(parts):
    model, _ = small.model()
    cache = create(small.layout(model, "hisparse", 6, 43))
    cache = cache.replace(active=jnp.arange(43) % 5 > 0)
    shares = np.stack([part_of(cache, number, parts).active for number in range(parts)])
    assert np.array_equal(shares.sum(0), cache.active)
    everybody = cache.replace(active=jnp.ones(43, bool))
    sizes = [int(part_of(everybody, number, parts).active.sum()) for number in range(parts)]
    assert max(sizes) == -(-43 // parts) and min(sizes) >= 43 // parts
