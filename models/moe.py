# SPDX-License-Identifier: Apache-2.0
"""Expert layers: routing, routed and shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from models.layers import MLP, precision


@dataclass(frozen=True)
class Routing:
    """How a token chooses its experts.

    Attributes:
      experts: how many there are.
      used: how many a token uses.
      score: of an expert: "sigmoid" of its logit (DeepSeek-V3, GLM-5), with a bias that steers the choice only, or
        "softmax" over all (Qwen3).
      groups: contiguous groups of experts.
      groups_used: a token uses experts of this many groups, those with the largest sums of their two best scores.
      renormalise: weights are scaled to a sum of one.
      factor: multiplies the weights.
    """

    experts: int
    used: int
    score: Literal["sigmoid", "softmax"]
    groups: int = 1
    groups_used: int = 1
    renormalise: bool = True
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.experts % self.groups or not 1 <= self.groups_used <= self.groups or self.used > self.experts:
            raise ValueError(f"routing does not add up: {self}")


def route(logits: Array, bias: Array | None, routing: Routing) -> tuple[Array, Array]:
    """The experts of each token and their weights.

    Args:
      logits: float32 `[T, E]`.
      bias: float32 `[E]`, added to the scores for the choice only; None for softmax scores.
      routing: how.
    Returns:
      int32 `[T, used]` and float32 `[T, used]`, the best expert first; equal scores go to the lower number.
    """
    score = jax.nn.sigmoid(logits) if routing.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    steered = score if bias is None else score + bias[None]
    if routing.groups > 1:
        grouped = steered.reshape(len(logits), routing.groups, -1)
        group_score = jnp.sum(lax.top_k(grouped, min(2, grouped.shape[2]))[0], axis=-1)
        _, kept = lax.top_k(group_score, routing.groups_used)
        is_kept = jnp.any(kept[:, :, None] == jnp.arange(routing.groups)[None, None], axis=1)
        steered = jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(steered.shape)
    _, chosen = lax.top_k(steered, routing.used)
    weight = jnp.take_along_axis(score, chosen, axis=1)
    if routing.renormalise:
        tiny = 1e-20 if routing.score == "sigmoid" else 0.0
        weight = weight / (jnp.sum(weight, axis=1, keepdims=True) + tiny)
    return chosen, weight * routing.factor


class Experts(nnx.Module):
    """Routed MLPs, `(silu(x G) * (x U)) D` each; every expert multiplies every token.

    That takes no longer than reading the weights for up to a few hundred tokens, and the sum over a token's experts has
    one order in every program. `lax.ragged_dot` of tokens sorted by expert would do less arithmetic, but is lowered for
    CPUs and GPUs as each pair of token and choice times every expert under a mask, which is more.
    """

    def __init__(self, experts: int, hidden: int, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        make = nnx.initializers.lecun_normal(batch_axis=0)
        self.gate = nnx.Param(make(rngs.params(), (experts, hidden, width), dtype))
        self.up = nnx.Param(make(rngs.params(), (experts, hidden, width), dtype))
        self.down = nnx.Param(make(rngs.params(), (experts, width, hidden), dtype))

    def __call__(self, x: Array, chosen: Array, weight: Array) -> Array:
        """Tokens `[T, D]` with experts and weights `[T, used]` to `[T, D]`."""
        return every_expert(x, chosen, weight, self.gate[...], self.up[...], self.down[...])


def every_expert(x: Array, chosen: Array, weight: Array, gate: Array, up: Array, down: Array) -> Array:
    """See `Experts`. What an expert makes of a token that did not choose it is dropped, so that it may overflow."""
    taken = chosen[None] == jnp.arange(len(gate))[:, None, None]
    share = jnp.sum(jnp.where(taken, weight[None], 0), axis=2)[..., None]  # [E, T, 1]

    def multiply(kernel: Array) -> Array:
        return jnp.einsum("td,edf->etf", x, kernel, precision=precision(x.dtype))

    inner = (nnx.silu(multiply(gate)) * multiply(up)).astype(jnp.float32) * share
    inner = jnp.where(jnp.any(taken, axis=2)[..., None], inner, 0).astype(x.dtype)
    return jnp.einsum("etf,efd->td", inner, down, precision=precision(x.dtype))


class MoE(nnx.Module):
    """Router, routed experts, and experts that every token uses.

    Args:
      hidden: width of the residual stream.
      width: inner width of an expert.
      routing: how a token chooses.
      shared: how many experts every token uses; they are one MLP of that many times the width.
      dtype: type of parameters and arithmetic; the router computes in float32.
      rngs: for the initial parameters.
    """

    def __init__(
        self, hidden: int, width: int, routing: Routing, shared: int = 0, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.routing = routing
        self.router = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (hidden, routing.experts), dtype))
        if routing.score == "sigmoid":
            self.router_bias = nnx.Param(jnp.zeros(routing.experts, jnp.float32))
        self.experts = Experts(routing.experts, hidden, width, dtype=dtype, rngs=rngs)
        if shared:
            self.shared = MLP(hidden, width * shared, dtype=dtype, rngs=rngs)
        self.has_shared = shared > 0

    def route(self, x: Array) -> tuple[Array, Array]:
        """Experts and weights of tokens `[T, D]`; see `route`."""
        wide, kernel = x.astype(jnp.float32), self.router[...].astype(jnp.float32)
        bias = self.router_bias[...] if self.routing.score == "sigmoid" else None
        return route(jnp.matmul(wide, kernel, precision=lax.Precision.HIGHEST), bias, self.routing)

    def __call__(self, x: Array) -> Array:
        out = self.experts(x, *self.route(x))
        return out + self.shared(x) if self.has_shared else out
