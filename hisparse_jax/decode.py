# SPDX-License-Identifier: Apache-2.0
"""The decode loop: one jitted function that runs a chunk of steps for all request slots.

This file is the one place where the decode step is jitted: donation, placement and compiler options are declared here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.stages import Wrapped

from hisparse_jax.cache.backup import end_step
from hisparse_jax.cache.layout import Layout, Records
from hisparse_jax.cache.memory import sharding
from hisparse_jax.cache.state import Cache, begin_step, entering, placements
from hisparse_jax.compiler_options import Options, decode_options
from hisparse_jax.sampling import Sampling, sample
from pallas_kernels.common import Implementation

Params = Any


class Model(Protocol):
    """What the decode loop and the engine need of a model. Methods are traced; `params` is any pytree.

    A model is hashable, by identity as plain classes are, so that engines can share what is compiled for it.
    """

    def decode(self, params: Params, token: Array, cache: Cache) -> tuple[Array, Cache]:
        """One token per request: int32 `[R]` to float32 logits `[R, V]`; `cache` is of a step that has begun."""
        ...

    def prefill(self, params: Params, tokens: Array, start: Array, scratch: Any) -> tuple[Array, Any]:
        """A chunk of one prompt: int32 `[C]` at positions `start..` to hidden states `[C, D]` and new scratch."""
        ...

    def logits(self, params: Params, hidden: Array) -> Array:
        """Hidden states `[..., D]` to float32 logits `[..., V]`."""
        ...

    def records(self, context_tokens: int) -> Records:
        """What it stores and selects, for histories of up to `context_tokens`."""
        ...

    def new_index(self, layout: Layout) -> Any:
        """Empty index state, leaves `[layers, R, ...]`."""
        ...

    def new_scratch(self, layout: Layout, chunk: int) -> Any:
        """Memory for the prefill of one request of up to `layout.context_tokens`, in chunks of `chunk` tokens."""
        ...

    def rows(self, scratch: Any, space: Array, layout: Layout) -> Array:
        """The rows of one space as prefill computed them: uint32 `[S, words]`."""
        ...

    def index_of(self, scratch: Any, tokens: Array, layout: Layout) -> Any:
        """Index state of one prefilled request of `tokens` tokens: leaves `[layers, ...]`."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """What goes from one chunk of steps to the next.

    Attributes:
      cache: the cache between two steps.
      token: int32 `[R]`, the token each request feeds next.
      remaining: int32 `[R]`, tokens each request may still emit; 0 for one that is done or a free slot.
      sampling: how each request chooses its tokens.
    """

    cache: Cache
    token: Array
    remaining: Array
    sampling: Sampling


class Steps(NamedTuple):
    """What a chunk of steps gives out.

    Attributes:
      token: int32 `[steps, R]`, the emitted tokens, -1 where a request took no part.
      counters: int32 `[steps, tables, R, 3]`, hits, ring hits and misses.
      logits: float32 `[steps, R, V]`, or None if they were not asked for.
    """

    token: Array
    counters: Array
    logits: Array | None


def decode_step(
    model: Model, params: Params, state: DecodeState, *, stop_tokens: Sequence[int] = (), keep_logits: bool = False,
    draws: bool = True, implementation: Implementation = "auto",
) -> tuple[DecodeState, Steps]:  # fmt: skip
    """One step: each active request feeds a token, appends its record and emits the next token."""
    active = state.remaining > 0
    cache = begin_step(state.cache, active)
    logits, cache = model.decode(params, state.token, cache)
    counters = cache.counters
    with jax.named_scope("backup"):
        cache = end_step(cache, implementation)
    with jax.named_scope("sample"):
        token, sampling = sample(logits, state.sampling, cache.tokens, active, draws=draws)
    stops = jnp.isin(token, jnp.asarray(stop_tokens, jnp.int32)) if stop_tokens else jnp.zeros_like(active)
    remaining = jnp.where(active & ~stops, state.remaining - 1, 0)
    out = Steps(jnp.where(active, token, -1), counters, logits if keep_logits else None)
    return DecodeState(cache, jnp.where(active, token, state.token), remaining, sampling), out


def compile_decode(
    model: Model, state: DecodeState, *, steps: int, stop_tokens: Sequence[int] = (), keep_logits: bool = False,
    draws: bool = True, implementation: Implementation = "auto", compiler_options: Options | None = None,
) -> Wrapped:  # fmt: skip
    """The jitted chunk of `steps` decode steps. Lengths may grow without compiling again.

    Args:
      model: see `Model`.
      state: an example of the state, for its placement.
      steps: decode steps of a call.
      stop_tokens: a request that emits one of them is done.
      keep_logits: give out the logits of every step.
      draws: whether a request may have a temperature above 0. If not, the program is faster and takes the most likely
        token of every request, whatever its temperature.
      implementation: of backup: "auto", "xla" or "mosaic_gpu".
      compiler_options: options for XLA; `hisparse_jax.compiler_options.decode_options()` if not given.
    Returns:
      a jitted function of parameters and state to the new state and `Steps`; the state it is given is donated.
    """
    one = partial(
        decode_step, model, stop_tokens=tuple(stop_tokens), keep_logits=keep_logits, draws=draws,
        implementation=implementation,
    )  # fmt: skip

    def chunk(params: Params, state: DecodeState) -> tuple[DecodeState, Steps]:
        state = replace(state, cache=entering(state.cache))
        return lax.scan(lambda state, _: one(params, state), state, length=steps)

    options = decode_options() if compiler_options is None else compiler_options
    return jax.jit(chunk, donate_argnums=1, out_shardings=(state_placements(state), None), compiler_options=options)


def place(state: DecodeState) -> DecodeState:
    """Puts every leaf where the decode loop keeps it. Nothing moves that is there already."""
    return jax.device_put(state, state_placements(state))


def state_placements(state: DecodeState) -> Any:
    """The sharding of every leaf of the state."""
    on_device = jax.tree.map(lambda _: sharding(host=False), state)
    return replace(on_device, cache=placements(state.cache))
