# SPDX-License-Identifier: Apache-2.0
"""The DSA decoder in every residency: equal bits, chunks, prefetch, short histories, ties."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from hisparse_jax.cache.state import create, entering
from tests import dsa_small as small
from tests.dsa_small import CONFIG, PROMPTS, STEPS

K, LENGTH = CONFIG.selected, len(PROMPTS[0]) + STEPS
# Sums of at most 64 products in float32, three layers, logits of order one.
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def full():
    functional, params = small.model()
    return small.run(functional, params, small.layout(functional, "full", K))


def same_bits(one, other) -> bool:
    """Tokens, and the logits of every request that took part."""
    active = one.token >= 0
    return np.array_equal(one.token, other.token) and one.logits[active].tobytes() == other.logits[active].tobytes()


@pytest.mark.parametrize("hot_slots", [K, K + 1, K + 7, 2 * K, LENGTH - 1, LENGTH, LENGTH + 1])
def test_residencies_agree_bitwise(hot_slots, full):
    functional, params = small.model()
    sparse = small.run(functional, params, small.layout(functional, "hisparse", hot_slots))
    assert same_bits(full, sparse)
    tokens, counters = sparse.token, sparse.counters
    assert (tokens >= 0).sum(0).tolist() == [STEPS, STEPS - 1, STEPS - 2]
    misses = counters[..., 2].sum((0, 1))
    assert (misses[0] > 0) == (hot_slots < len(PROMPTS[0]))  # later records are in the ring or in their slots
    hits_and_misses = counters[..., 0] + counters[..., 2]
    assert np.array_equal(hits_and_misses, np.where(tokens >= 0, K, 0)[:, None].repeat(2, 1))


@pytest.mark.parametrize("record,dtype", [("bfloat16", jnp.bfloat16), ("fp8", jnp.float8_e4m3fn)])
def test_index_keys_are_stored_as_asked(record, dtype):
    functional, _ = small.model(record)
    index = functional.new_index(small.layout(functional, "hisparse", K))
    assert index.keys.shape == (2, 3, 64, 8) and index.keys.dtype == dtype
    assert (index.key_scale is not None) == (record == "fp8")


def test_prefetch_changes_no_bit(full):
    (early, params), (late, _) = small.model(), small.model(prefetch="off")
    late = small.run(late, params, small.layout(late, "hisparse", K + 1), prefilled_by=early)
    assert same_bits(full, late) and np.array_equal(full.selected, late.selected)


@pytest.mark.parametrize("parts", [2, 3, 64])
def test_parts_change_no_bit(parts, full):
    """Whatever the requests are resolved with: the same tables, counters and places, so the same of everything."""
    (whole, params), (split, _) = small.model(), small.model(parts=parts)
    sizes = small.layout(whole, "hisparse", K + 1)
    want, got = (small.run(one, params, sizes, prefilled_by=whole) for one in (whole, split))
    assert same_bits(full, got)
    assert np.array_equal(want.counters, got.counters) and np.array_equal(want.selected, got.selected)
    for name in ("slot_ids", "recency", "hot_rows", "pool"):
        for one, other in zip(*(jax.tree.leaves(getattr(run.cache, name)) for run in (want, got)), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), name


def barriers(functional, sizes, width: int) -> list[str | None]:
    """What gives each `[R, width]` barrier of a decode step its operand; attention has barriers of its own."""
    cache = jax.eval_shape(lambda: create(sizes, functional.new_index(sizes)))
    token, params = jnp.zeros(len(PROMPTS), jnp.int32), small.model()[1]
    traced = jax.make_jaxpr(lambda cache: functional.decode(params, token, entering(cache)))(cache)

    def inside(jaxpr):
        made_by = {id(variable): equation for equation in jaxpr.eqns for variable in equation.outvars}
        for equation in jaxpr.eqns:
            shapes = [variable.aval.shape for variable in equation.outvars]
            if equation.primitive.name == "optimization_barrier" and shapes == [(len(PROMPTS), width)]:
                yield made_by[id(equation.invars[0])].params.get("name")
            for inner in jaxprs_in_params(equation.params):
                yield from inside(inner)

    return list(inside(traced.jaxpr))


@pytest.mark.parametrize("residency", ["full", "hisparse", "no_io"])
def test_an_anchors_query_waits_for_what_it_selects(residency):
    """In every program its latent is cut off by a barrier; where rows are fetched, behind the selection."""
    functional, _ = small.model()
    names = barriers(functional, small.layout(functional, residency, K), CONFIG.query_latent)
    assert len(names) == 2, "two anchors"
    assert [name == "_where" for name in names] == [residency == "hisparse"] * 2, names


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_part_is_selected_after_the_one_before(parts):
    """The weights of its index scores hang on what that one selected; those of the first part on nothing."""
    functional, _ = small.model(parts=parts)
    names = barriers(functional, small.layout(functional, "hisparse", K), CONFIG.index_heads)
    assert names == ["_where"] * 2 * (parts - 1), "two anchors"


def test_no_io_moves_nothing():
    functional, params = small.model()
    sizes = small.layout(functional, "no_io", K + 1)
    before = np.asarray(small.admitted(functional, params, sizes).cache.pool)
    got = small.run(functional, params, sizes)
    assert not before.any() and not np.asarray(got.cache.pool).any()
    assert got.counters[..., 2].sum() > 0 and np.isfinite(got.logits[got.token >= 0]).all()


@pytest.mark.parametrize("chunk", [8, 64])
def test_chunks_of_a_prompt(chunk):
    functional, params = small.model()
    logits, scratch, ids = small.prefill(functional, params, PROMPTS[0])
    other_logits, other, other_ids = small.prefill(functional, params, PROMPTS[0], chunk)
    np.testing.assert_allclose(other_logits, logits, rtol=0, atol=ROUNDING)
    assert np.array_equal(ids, other_ids)
    for one, two in zip(jax.tree.leaves(scratch.index), jax.tree.leaves(other.index), strict=True):
        np.testing.assert_allclose(one[:, :, :40], two[:, :, :40], rtol=0, atol=ROUNDING)
    rows = [np.asarray(one.rows)[:, :40].view(np.float32) for one in (scratch, other)]
    np.testing.assert_allclose(*rows, rtol=0, atol=ROUNDING)


def test_decode_is_prefill_of_the_longer_sequence(full):
    functional, params = small.model()
    for slot, prompt in enumerate(PROMPTS):
        first = np.argmax(small.prefill(functional, params, prompt)[0][-1])
        own = full.token[:, slot][full.token[:, slot] >= 0]
        longer = [*prompt, int(first), *own[:-1].tolist()]
        want = small.prefill(functional, params, longer)[0][len(prompt) :]
        np.testing.assert_allclose(full.logits[: len(own), slot], want, rtol=0, atol=ROUNDING)


def test_short_histories_are_dense():
    """Up to K tokens everything is selected, so a model that selects more computes the same."""
    (few, params), (many, _) = small.model(), small.model(selected=32)
    for functional in (few, many):
        ids = small.prefill(functional, params, PROMPTS[1])[2]
        for token in range(min(K, len(PROMPTS[1]))):
            assert [i for i in ids[0, token] if i >= 0] == list(range(token + 1))
    short, long = (small.prefill(functional, params, PROMPTS[1])[0] for functional in (few, many))
    np.testing.assert_allclose(short[:K], long[:K], rtol=0, atol=ROUNDING)
    assert np.abs(short[K + 1 :] - long[K + 1 :]).max() > 1e-3


@pytest.mark.parametrize("weight", [0.0, -0.0])
def test_ties_go_to_the_lowest_tokens_in_every_residency(weight):
    """Indexer weights of zero make every score 0.0 or -0.0."""
    functional, params = small.model()
    paths = [jax.tree_util.keystr(path) for path, _ in _paths(functional, params)]
    zeroed = [jnp.full_like(leaf, weight) if "indexer" in path and "weight" in path else leaf
              for path, leaf in zip(paths, params, strict=True)]  # fmt: skip
    assert sum(a is not b for a, b in zip(zeroed, params, strict=True)) == 2
    runs = [small.run(functional, zeroed, small.layout(functional, residency, K + 1)) for residency in
            ("full", "hisparse")]  # fmt: skip
    assert same_bits(*runs)
    active = np.broadcast_to((runs[0].token >= 0)[:, None, :, None], runs[0].selected.shape)
    want = np.where(active, np.arange(K), -1)
    assert all(np.array_equal(run.selected, want) for run in runs)


def _paths(functional, params):
    state = jax.tree.unflatten(functional._structure, params)
    return jax.tree_util.tree_flatten_with_path(state)[0]


def test_traced_selections_are_ascending_and_visible(full):
    for step, of_step in enumerate(full.selected):
        for slot, prompt in enumerate(PROMPTS):
            if full.token[step, slot] < 0:
                assert (of_step[:, slot] == -1).all()
                continue
            assert (np.diff(of_step[:, slot], axis=-1) > 0).all()
            assert of_step[:, slot].min() >= 0 and of_step[:, slot].max() <= len(prompt) + step


def test_a_cache_made_for_fewer_is_refused():
    functional, params = small.model()
    bigger, _ = small.model(selected=32)
    sizes = small.layout(functional, "hisparse", K)
    state = small.admitted(functional, params, sizes)
    with pytest.raises(ValueError, match="the layout has selected = 6, the model selects 32"):
        jax.eval_shape(partial(small.greedy, bigger, 1), params, state)


def test_followers_have_no_indexer_and_no_index_keys():
    """Parameters of a run carry its groups in front."""
    functional, params = small.model()
    names = {jax.tree_util.keystr(path): leaf.shape for path, leaf in _paths(functional, params)}
    indexers = {name.split("['indexer']")[0] for name in names if "indexer" in name}
    assert len(indexers) == 2
    assert functional.new_index(small.layout(functional, "full", K)).keys.shape[0] == 2
    assert all(shape[0] == 1 for name, shape in names.items() if "runs" in name)
