# SPDX-License-Identifier: Apache-2.0
"""A Flax module as functions of flat parameters: split once, merged while tracing.

Passing leaves to `jax.jit` costs half a millisecond a call where `nnx.jit` costs nineteen (732 parameters, CPU).
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax import Array

from hisparse_jax.cache.layout import Layout, Records
from hisparse_jax.cache.state import Cache


class Functional:
    """Implements `hisparse_jax.decode.Model` by a module with the same methods less `params`.

    Args:
      module: the module; its arrays are not kept.
    """

    def __init__(self, module: nnx.Module) -> None:
        self._definition, state = nnx.split(module)
        self._structure = jax.tree.structure(state)

    @staticmethod
    def parameters(module: nnx.Module) -> list[Array]:
        """The flat parameters of a module, in the order that the methods expect."""
        return jax.tree.leaves(nnx.state(module))

    def module(self, params: list[Array] | None = None) -> Any:
        """The module with these parameters; without any, for methods that use none."""
        leaves = [None] * self._structure.num_leaves if params is None else params
        return nnx.merge(self._definition, jax.tree.unflatten(self._structure, leaves))

    def decode(self, params: list[Array], token: Array, cache: Cache) -> tuple[Array, Cache]:
        return self.module(params).decode(token, cache)

    def decode_traced(self, params: list[Array], token: Array, cache: Cache) -> tuple[Array, Cache, Any]:
        """As `decode`, and what every table selected."""
        return self.module(params).decode_traced(token, cache)

    def prefill_traced(self, params: list[Array], tokens: Array, start: Array, scratch: Any) -> tuple[Array, Any, Any]:
        """As `prefill`, and what every table selected; None where prompts are dense."""
        return self.module(params).prefill_traced(tokens, start, scratch)

    def prefill(self, params: list[Array], tokens: Array, start: Array, scratch: Any) -> tuple[Array, Any]:
        return self.module(params).prefill(tokens, start, scratch)

    def logits(self, params: list[Array], hidden: Array) -> Array:
        return self.module(params).logits(hidden)

    def records(self, context_tokens: int) -> Records:
        return self.module().records(context_tokens)

    def new_index(self, layout: Layout) -> Any:
        return self.module().new_index(layout)

    def new_scratch(self, layout: Layout, chunk: int) -> Any:
        return self.module().new_scratch(layout, chunk)

    def rows(self, scratch: Any, space: Array, layout: Layout) -> Array:
        return self.module().rows(scratch, space, layout)

    def index_of(self, scratch: Any, tokens: Array, layout: Layout) -> Any:
        return self.module().index_of(scratch, tokens, layout)
