# SPDX-License-Identifier: Apache-2.0
"""Routing and expert layers against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.moe import Experts, MoE, Routing, every_expert, route
from tests.helpers import PLATFORMS, lowered_for

TOKENS = 40
EPSILON = {"float32": 2.0**-24, "bfloat16": 2.0**-8}  # one rounding moves a number by at most so much of it


def chosen_by_hand(score, bias, routing):
    """Expert sets of every token, in float64."""
    sets = []
    for row in score + bias:
        groups = np.split(np.arange(routing.experts), routing.groups)
        best = sorted(groups, key=lambda group: -np.sort(row[group])[-2:].sum())[: routing.groups_used]
        allowed = np.concatenate(best)
        sets.append(set(allowed[np.argsort(-row[allowed])[: routing.used]].tolist()))
    return sets


@pytest.mark.parametrize(
    "routing",
    [
        Routing(8, 2, "sigmoid", factor=2.5),
        Routing(16, 4, "sigmoid", groups=4, groups_used=2, factor=2.5),
        Routing(8, 3, "sigmoid", groups=2, groups_used=1, renormalise=False),
        Routing(8, 2, "softmax"),
        Routing(8, 2, "softmax", renormalise=False),
    ],
)
def test_routing_by_hand(routing):
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(TOKENS, routing.experts)).astype(np.float32)
    is_sigmoid = routing.score == "sigmoid"
    bias = rng.normal(size=routing.experts).astype(np.float32) * is_sigmoid
    got, weight = route(jnp.asarray(logits), jnp.asarray(bias) if is_sigmoid else None, routing)
    wide = logits.astype(np.float64)
    score = 1 / (1 + np.exp(-wide)) if is_sigmoid else np.exp(wide) / np.exp(wide).sum(1, keepdims=True)
    assert [set(row) for row in np.asarray(got).tolist()] == chosen_by_hand(score, bias, routing)
    want = np.take_along_axis(score, np.asarray(got), 1)  # without the bias, which only steers the choice
    if routing.renormalise:
        want /= want.sum(1, keepdims=True)
    # A softmax rounds the argument of its exponential, which is below 8: that moves a score by up to 8 roundings, and
    # the sum that it is divided by too. As many again are for the exponential, the sums, the quotients and the factor.
    np.testing.assert_allclose(weight, want * routing.factor, rtol=32 * EPSILON["float32"])


def test_routing_that_does_not_add_up():
    for wrong in ({"groups": 3}, {"groups": 4, "groups_used": 5}, {"used": 9}):
        with pytest.raises(ValueError, match="routing does not add up"):
            Routing(**({"experts": 8, "used": 2, "score": "sigmoid"} | wrong))


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_expert_layer_by_hand(shared):
    module = MoE(12, 6, Routing(5, 2, "sigmoid", factor=1.5), shared, dtype=jnp.float32, rngs=nnx.Rngs(3))
    x = np.random.default_rng(1).normal(size=(TOKENS, 12)).astype(np.float32)
    got = nnx.jit(module)(jnp.asarray(x))
    experts = module.experts
    want, sizes = experts_by_hand(
        x, *module.route(jnp.asarray(x)), experts.gate[...], experts.up[...], experts.down[...]
    )  # fmt: skip
    if shared:
        assert module.shared.gate.kernel.shape == (12, 6 * shared)
        kernels = (getattr(module.shared, part).kernel[...][None] for part in ("gate", "up", "down"))
        more, more_sizes = experts_by_hand(x, np.zeros((TOKENS, 1), int), np.ones((TOKENS, 1)), *kernels)
        want, sizes = want + more, sizes + more_sizes
    agree(got, want, sizes, summands=(2 + shared) * 6 + 12)


def test_no_scatter_add_in_an_expert_layer():
    """Adding by index has no fixed order on every device; two residencies could then differ."""
    module = MoE(12, 6, Routing(5, 2, "sigmoid"), 1, dtype=jnp.float32, rngs=nnx.Rngs(3))
    definition, state = nnx.split(module)
    text = str(jax.make_jaxpr(lambda state, x: nnx.merge(definition, state)(x))(state, jnp.zeros((4, 12))))
    assert "dot_general" in text and "scatter" not in text


def test_equal_scores_go_to_the_lower_expert():
    got, weight = route(jnp.zeros((1, 6)), jnp.zeros(6), Routing(6, 3, "sigmoid"))
    assert np.asarray(got).tolist() == [[0, 1, 2]]
    # Halves, their sum and a quotient: one rounding, and a device's division may be off by the last bit.
    np.testing.assert_allclose(weight, 1 / 3, rtol=3 * EPSILON["float32"])


def experts_by_hand(x, chosen, weight, gate, up, down):
    """The sum over the chosen experts in float64, and the sum of the sizes of all its products."""
    x, weight, gate, up, down = (np.asarray(part).astype(np.float64) for part in (x, weight, gate, up, down))
    out, sizes = np.zeros_like(x), np.zeros_like(x)
    for token, experts in enumerate(np.asarray(chosen)):
        for place, expert in enumerate(experts):
            inner = x[token] @ gate[expert]
            inner = weight[token, place] * inner / (1 + np.exp(-inner)) * (x[token] @ up[expert])
            out[token] += inner @ down[expert]
            sizes[token] += np.abs(inner) @ np.abs(down[expert])
    return out, sizes


def agree(got, want, sizes, *, summands):
    """Off by at most 8 roundings of each of the products that are added up, and in float32 one for every 4 summands.

    Args:
      want, sizes: from `experts_by_hand`.
      summands: of the sum over all inner numbers of a token's experts, and of the sum over the hidden width.
    """
    roundings = 8 + summands / 4 * (got.dtype == np.float32)
    assert (np.abs(np.asarray(got, np.float64) - want) <= roundings * EPSILON[str(got.dtype)] * (sizes + 1e-3)).all()


def expert_case(tokens, used, dtype):
    """Tokens, choices without repetition, weights and kernels; the last expert is chosen by nobody if there is room."""
    rng, experts, hidden, width = np.random.default_rng(0), 6, 20, 10
    known = experts - (used < experts)
    chosen = np.array([rng.permutation(known)[:used] for _ in range(tokens)], np.int32)
    weight = rng.uniform(0.1, 1, (tokens, used)).astype(np.float32)
    arrays = [rng.normal(size=(tokens, hidden))]
    arrays += [rng.normal(size=shape) / 4 for shape in [(experts, hidden, width)] * 2 + [(experts, width, hidden)]]
    x, *kernels = (jnp.asarray(array, dtype) for array in arrays)
    return x, jnp.asarray(chosen), jnp.asarray(weight), *kernels


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "used"), [(TOKENS, 2), (1, 2), (1, 1), (7, 6), (1, 6), (65, 3)])
def test_experts_against_float64(dtype, tokens, used):
    case = expert_case(tokens, used, dtype)
    want, sizes = experts_by_hand(*case)
    got = jax.jit(every_expert)(*case)
    assert got.dtype == case[0].dtype and got.shape == case[0].shape
    agree(got, want, sizes, summands=used * 10 + 20)


def test_order_of_choices_does_not_matter():
    """Weights of equal size, experts in any order: the same experts are added up, in their own order."""
    x, chosen, _, *kernels = expert_case(TOKENS, 3, "float32")
    weight = jnp.full(chosen.shape, 1 / 3, jnp.float32)
    one, other = every_expert(x, chosen, weight, *kernels), every_expert(x, chosen[:, ::-1], weight, *kernels)
    np.testing.assert_array_equal(one, other)
    tied = [every_expert(x, jnp.zeros_like(chosen[:, :1]), weight[:, :1], *kernels) for _ in range(2)]
    np.testing.assert_array_equal(*tied)  # everybody takes one expert
    agree(tied[0], *experts_by_hand(x, np.zeros((TOKENS, 1), int), weight, *kernels), summands=10 + 20)


@pytest.mark.parametrize("value", [3e38, np.inf, np.nan])
def test_what_an_expert_nobody_chose_gives_does_not_matter(value):
    """Its inner products overflow or are no numbers; the output has the bits it has without.

    The last kernel has to be finite: it is multiplied by zero.
    """
    x, chosen, weight, gate, up, down = expert_case(TOKENS, 2, "float32")
    assert 5 not in np.asarray(chosen)
    want = every_expert(x, chosen, weight, gate, up, down)
    wild = every_expert(x, chosen, weight, gate.at[5].set(value), up.at[5].set(value), down)
    np.testing.assert_array_equal(np.asarray(wild), np.asarray(want))
    assert np.isfinite(want).all()


def test_a_token_is_not_touched_by_what_another_one_overflows():
    """Token 0 overflows in its expert, which token 1 does not use."""
    x, _, weight, *kernels = expert_case(2, 1, "float32")
    chosen = jnp.array([[0], [1]], jnp.int32)
    want = every_expert(x, chosen, weight, *kernels)
    got = every_expert(x.at[0].set(1e38), chosen, weight, *kernels)
    np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(want[1]))
    assert not np.isfinite(got[0]).all()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_no_product_under_a_mask(platform):
    """Nothing has a row for each pair of token and choice and for each expert; no tokens are sorted."""
    module = Experts(5, 12, 6, dtype=jnp.float32, rngs=nnx.Rngs(0))
    definition, state = nnx.split(module)
    arguments = state, jnp.zeros((7, 12)), jnp.zeros((7, 3), jnp.int32), jnp.zeros((7, 3))
    text = lowered_for(lambda state, *rest: nnx.merge(definition, state)(*rest), platform, *arguments)
    assert "stablehlo.sort" not in text and "ragged_dot" not in text and f"{7 * 3}x" not in text
    assert "5x7x6" in text or "5x6x7" in text  # every expert, every token
