# SPDX-License-Identifier: Apache-2.0
"""What every decoder has around its layers: embedding, final norm, head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from hisparse_jax.cache.state import Cache
from models.layers import RMSNorm, linear, precision


class BackboneShape(Protocol):
    """What a family's config says about it."""

    @property
    def vocab(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def norm_eps(self) -> float: ...

    @property
    def tied_head(self) -> bool: ...


class Backbone(nnx.Module):
    """Embedding, final norm and head; a family adds its layers and says how tokens go through them.

    Args:
      shape: sizes.
      dtype: type of parameters and arithmetic.
      rngs: for the initial parameters.
    """

    def __init__(self, shape: BackboneShape, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.dtype, self.tied_head = jnp.dtype(dtype), shape.tied_head
        self.embed = nnx.Embed(shape.vocab, shape.hidden, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(shape.hidden, shape.norm_eps, dtype=dtype)
        if not shape.tied_head:
            self.head = linear(shape.hidden, shape.vocab, dtype=dtype, rngs=rngs)

    if TYPE_CHECKING:  # what a family adds: the same, and the selections of all tables

        def decode_traced(self, token: Array, cache: Cache) -> tuple[Array, Cache, Any]: ...

        def prefill_traced(self, tokens: Array, start: Array, scratch: Any) -> tuple[Array, Any, Any]: ...

    def decode(self, token: Array, cache: Cache) -> tuple[Array, Cache]:
        """One token of each request: int32 `[R]` to float32 logits `[R, V]`."""
        logits, cache, _ = self.decode_traced(token, cache)
        return logits, cache

    def prefill(self, tokens: Array, start: Array, scratch: Any) -> tuple[Array, Any]:
        """A chunk of one prompt: int32 `[C]` at positions `start..` to hidden states `[C, D]`."""
        hidden, scratch, _ = self.prefill_traced(tokens, start, scratch)
        return hidden, scratch

    def logits(self, x: Array) -> Array:
        """Hidden states `[..., D]` to float32 logits `[..., V]`."""
        with jax.named_scope("head"):
            x = self.norm(x)
            kernel = self.embed.embedding[...].T if self.tied_head else self.head.kernel[...]
            return jnp.matmul(x, kernel, precision=precision(self.dtype), preferred_element_type=jnp.float32)
