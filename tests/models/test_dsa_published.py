# SPDX-License-Identifier: Apache-2.0
"""Published models at their true size, abstract: shapes are worked out, nothing is allocated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.state import create
from models.dsa import DsaDecoder, DsaOptions
from models.dsa_params import dsa_entries
from models.functional import Functional
from models.sizes import PUBLISHED_DSA, dsa_parameters
from tests.dsa_small import State, greedy

CONTEXT, REQUESTS = 131072, 4


@pytest.fixture(scope="module", params=PUBLISHED_DSA)
def published(request):
    shape = PUBLISHED_DSA[request.param]
    options = DsaOptions("bfloat16", "fp8")
    module = nnx.eval_shape(lambda: DsaDecoder(shape, options, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    return shape, Functional(module), nnx.state(module)


def test_parameters_are_those_of_the_formula_and_of_the_name_map(published):
    shape, _, abstract = published
    leaves = jax.tree.leaves(abstract)
    assert sum(int(np.prod(leaf.shape)) for leaf in leaves) == dsa_parameters(shape)
    entries = dsa_entries(shape)
    assert len(entries) == len(leaves)
    names = [name for entry in entries for name in entry.tensors()]
    with_indexer = {name.split(".")[2] for name in names if ".indexer." in name}
    assert with_indexer == {str(layer) for layer, anchor in enumerate(shape.anchors) if anchor}
    experts = [name for name in names if ".experts." in name]
    assert len(experts) == 3 * 256 * (shape.layers - 3)
    assert {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")} == set(range(shape.layers))


@pytest.mark.parametrize("residency", ["full", "hisparse"])
def test_a_decode_step_traces_at_true_size(published, residency):
    shape, model, abstract = published
    sizes = Layout(
        residency=residency, request_slots=REQUESTS, context_tokens=CONTEXT, hot_slots=4096, ring_slots=64,
        page_records=64, host_pages=REQUESTS * CONTEXT // 64, **model.records(CONTEXT)._asdict(),
    )  # fmt: skip
    cache = jax.eval_shape(lambda: create(sizes, model.new_index(sizes)))
    assert cache.index.keys.shape == (sum(shape.anchors), REQUESTS, CONTEXT, 128)
    assert cache.index.keys.dtype == jnp.float8_e4m3fn
    slots = REQUESTS * (CONTEXT if residency == "full" else 4096 + 64)
    by_position = {len(shape.group_sizes): 1} if max(shape.group_sizes) == 1 else {21: 1, 19: 3}
    want = [(groups, slots, 288) for groups, count in by_position.items() for _ in range(count)]
    assert [rows.shape for rows in cache.hot_rows] == want
    assert cache.pool.shape[0] >= (0 if residency == "full" else shape.layers * REQUESTS * CONTEXT)
    one = jax.ShapeDtypeStruct((REQUESTS,), jnp.int32)
    state, out = jax.eval_shape(
        lambda params, state: greedy(model, 1, params, state), jax.tree.leaves(abstract), State(cache, one, one)
    )
    assert out[1].shape == (1, REQUESTS, shape.vocab) and out[1].dtype == jnp.float32
    assert out[3].shape == (1, sum(shape.anchors), REQUESTS, 2048)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), state.cache, cache)
    assert all(jax.tree.leaves(same))
