# SPDX-License-Identifier: Apache-2.0
"""Routing and expert layers against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.moe import MoE, Routing, route

TOKENS = 40


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
    np.testing.assert_allclose(weight, want * routing.factor, rtol=1e-5)


def test_routing_that_does_not_add_up():
    for wrong in ({"groups": 3}, {"groups": 4, "groups_used": 5}, {"used": 9}):
        with pytest.raises(ValueError, match="routing does not add up"):
            Routing(**({"experts": 8, "used": 2, "score": "sigmoid"} | wrong))


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_expert_layer_by_hand(shared):
    module = MoE(12, 6, Routing(5, 2, "sigmoid", factor=1.5), shared, dtype=jnp.float32, rngs=nnx.Rngs(3))
    x = np.random.default_rng(1).normal(size=(TOKENS, 12)).astype(np.float32)
    got = nnx.jit(module)(jnp.asarray(x))
    chosen, weight = (np.asarray(part) for part in module.route(jnp.asarray(x)))

    def mlp(rows, gate, up, down):
        rows, gate, up, down = (np.asarray(part, np.float64) for part in (rows, gate, up, down))
        inner = rows @ gate
        return (inner / (1 + np.exp(-inner)) * (rows @ up)) @ down

    experts = module.experts
    want = np.zeros((TOKENS, 12))
    for token in range(TOKENS):
        for expert, share in zip(chosen[token], weight[token], strict=True):
            kernels = (experts.gate[...][expert], experts.up[...][expert], experts.down[...][expert])
            want[token] += share * mlp(x[token : token + 1], *kernels)[0]
    if shared:
        want += mlp(x, *(getattr(module.shared, part).kernel[...] for part in ("gate", "up", "down")))
        assert module.shared.gate.kernel.shape == (12, 6 * shared)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_no_scatter_add_in_an_expert_layer():
    """Adding by index has no fixed order on every device; two residencies could then differ."""
    module = MoE(12, 6, Routing(5, 2, "sigmoid"), 1, dtype=jnp.float32, rngs=nnx.Rngs(3))
    definition, state = nnx.split(module)
    text = str(jax.make_jaxpr(lambda state, x: nnx.merge(definition, state)(x))(state, jnp.zeros((4, 12))))
    assert "ragged_dot" in text and "scatter" not in text


def test_equal_scores_go_to_the_lower_expert():
    got, weight = route(jnp.zeros((1, 6)), jnp.zeros(6), Routing(6, 3, "sigmoid"))
    assert np.asarray(got).tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(weight, 1 / 3, rtol=1e-6)
