# SPDX-License-Identifier: Apache-2.0
"""GLM-5.2 at its real width, so that no assumption of the small models survives.

Layers 0..6 of the published pattern, 4 experts, a small vocabulary, random weights; random records and index keys go
straight into the cache, 2,600 tokens of them, as no prompt of that length could be computed here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import psutil
import pytest
from flax import nnx

from hisparse_jax.cache.admission import admit
from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.state import create, entering, placements
from hisparse_jax.records import write_rows
from models.dsa import DsaDecoder, DsaOptions
from models.functional import Functional
from models.sizes import PUBLISHED
from tests.dsa_small import State, greedy

LAYERS, LENGTH, HOT_SLOTS, STEPS, PAGE = 7, 2600, 2304, 3, 64
GIB = 2**30


def config():
    published = PUBLISHED["GLM-5.2"]
    return replace(
        published, vocab=1024, experts=4, experts_used=2, anchors=published.anchors[:LAYERS],
        dense=published.dense[:LAYERS],
    )  # fmt: skip


def parameters(abstract) -> list[jax.Array]:
    """bfloat16 normals over the square root of the inner width; one small table of them, repeated."""
    table = np.random.default_rng(0).normal(size=1_000_003).astype(np.float32)
    leaves = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(abstract)[0]:
        name = jax.tree_util.keystr(path)
        if "norm" in name or "router_bias" in name:
            leaves.append(jnp.full(leaf.shape, 0 if "bias" in name else 1, leaf.dtype))
            continue
        inner = leaf.shape[-1] if "_up'" in name and "query" not in name else leaf.shape[-2]
        scaled = (table / np.sqrt(inner)).astype(ml_dtypes.bfloat16)
        leaves.append(jnp.asarray(np.resize(scaled, leaf.shape)))
    return leaves


@pytest.mark.slow
@pytest.mark.parametrize("record", ["bfloat16", "fp8"])
def test_a_few_steps_at_true_width(record):
    shape = config()
    module = nnx.eval_shape(lambda: DsaDecoder(shape, DsaOptions(record, record), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    model, abstract = Functional(module), nnx.state(module)
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(abstract))
    assert count > 2.5e9  # the layers really have their published size
    if psutil.virtual_memory().available < 4 * count + 4 * GIB:
        pytest.skip(f"needs {(4 * count + 4 * GIB) / GIB:.0f} GiB of free memory")
    params = parameters(abstract)

    rng = np.random.default_rng(1)
    normal = lambda *size: jnp.asarray(rng.normal(size=size), jnp.float32)  # noqa: E731
    row = shape.row_format(record)
    assert row.row_bytes == {"bfloat16": 1152, "fp8": 656}[record]
    rows = write_rows(normal(LAYERS, LENGTH, 512), normal(LAYERS, LENGTH, 64), row)

    outcomes = {}
    for residency in ("full", "hisparse"):
        sizes = Layout(
            residency=residency, request_slots=1, context_tokens=LENGTH + STEPS, hot_slots=HOT_SLOTS, ring_slots=64,
            page_records=PAGE, host_pages=45, **model.records(LENGTH + STEPS)._asdict(),
        )  # fmt: skip
        assert sizes.selected == 2048 and sizes.group_sizes == (1, 1, 4, 1)
        cache = create(sizes, model.new_index(sizes))
        rng = np.random.default_rng(2)
        keys = jax.tree.map(
            lambda leaf, rng=rng: jnp.asarray(rng.normal(size=(leaf.shape[0], *leaf.shape[2:])), leaf.dtype),
            cache.index,
        )
        pages = jnp.asarray(np.random.default_rng(3).permutation(45)[: cache.page_table.shape[1]].astype(np.int32))
        cache = jax.jit(partial(_admitted, rows=rows), out_shardings=placements(cache))(cache, pages, keys)
        state = State(cache, jnp.array([7], jnp.int32), jnp.array([STEPS], jnp.int32))
        decode = jax.jit(
            partial(greedy, model, STEPS), donate_argnums=1, out_shardings=(State(placements(cache), None, None), None)
        )
        state, out = decode(params, state)
        outcomes[residency] = jax.tree.map(np.asarray, out)
        if residency == "hisparse":
            _check_hot_rows(state.cache, sizes, pages)
        del cache, state

    (tokens, logits, _, ids), (other_tokens, other_logits, counters, other_ids) = outcomes.values()
    assert np.isfinite(logits).all() and logits.std() > 1e-3
    assert tokens.tolist() == other_tokens.tolist()
    assert logits.tobytes() == other_logits.tobytes() and np.array_equal(ids, other_ids)
    assert ids.shape == (STEPS, 4, 1, 2048) and (np.diff(ids, axis=-1) > 0).all() and ids.max() > HOT_SLOTS
    hits, _, misses = np.moveaxis(counters, -1, 0)
    assert (hits + misses == 2048).all()
    assert (misses[0] > 1500).all() and (misses[1:] > 0).all()  # cold at first, except for the ring


def _admitted(cache, pages, keys, rows):
    return admit(entering(cache), jnp.int32(0), pages, jnp.int32(LENGTH), lambda space: rows[space], keys)


def _check_hot_rows(cache, sizes, pages):
    """Every record in a table lies in its slot of every layer of the group, as it lies in the host pool."""
    pool, slot_ids = np.asarray(cache.pool), np.asarray(cache.slot_ids)[:, 0]
    pages = np.asarray(pages)
    assert (slot_ids >= 0).sum() >= 4 * 2048
    for address in sizes.addresses():
        ids = slot_ids[address.table]
        held = np.flatnonzero(ids >= 0)
        hot = np.asarray(cache.hot_rows[address.position])[address.group, held]
        place = address.space * sizes.rows_per_space + pages[ids[held] // PAGE] * PAGE + ids[held] % PAGE
        assert np.array_equal(hot, pool[place])
