# SPDX-License-Identifier: Apache-2.0
"""The decoder of Llama, Qwen2, Qwen3 and Qwen3-MoE shape, decoding over Quest pages."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from hisparse_jax.cache.layout import Address, Layout, Records
from hisparse_jax.cache.state import Cache
from hisparse_jax.selection import QuestIndex, QuestRule, Selection, page_bounds, quest_index
from hisparse_jax.workload import Locality
from models.backbone import Backbone
from models.config import GqaConfig
from models.gqa import QuestAttention
from models.layers import MLP, RMSNorm
from models.moe import MoE, Routing
from pallas_kernels.common import Implementation
from pallas_kernels.words import to_words


class Layer(nnx.Module):
    """Attention and MLP, each with its norm and a residual connection."""

    def __init__(
        self, config: GqaConfig, rule: QuestRule, *, dtype: DTypeLike, rngs: nnx.Rngs, implementation: Implementation,
        workload: Locality | None,
    ) -> None:  # fmt: skip
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps, dtype=dtype)
        self.attention = QuestAttention(
            config, rule, dtype=dtype, rngs=rngs, implementation=implementation, workload=workload
        )
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps, dtype=dtype)
        if config.experts:
            routing = Routing(config.experts, config.experts_used, "softmax", renormalise=config.renormalise)
            self.mlp = MoE(config.hidden, config.mlp_width, routing, dtype=dtype, rngs=rngs)
        else:
            self.mlp = MLP(config.hidden, config.mlp_width, dtype=dtype, rngs=rngs)

    def decode(self, x: Array, cache: Cache, address: Address) -> tuple[Array, Cache, Selection]:
        out, cache, selection = self.attention.decode(self.attention_norm(x), cache, address)
        return self._mlp(x + out), cache, selection

    def prefill(self, x: Array, stored: Array, layer: Array, start: Array) -> tuple[Array, Array]:
        out, stored = self.attention.prefill(self.attention_norm(x), stored, layer, start)
        return self._mlp(x + out), stored

    def _mlp(self, x: Array) -> Array:
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x))


class QuestDecoder(Backbone):
    """Layers between embedding and head. Implements `hisparse_jax.decode.Model` through `models.functional`.

    Each layer has parameters of its own: a scan over stacked ones copies a layer's before it uses them. All layers
    share what is traced and lowered, so that compile time hardly grows with depth.

    Args:
      config: shapes.
      rule: how pages are selected while decoding.
      dtype: type of parameters, arithmetic and stored keys and values.
      rngs: for the initial parameters.
      implementation: of the kernels.
      workload: see `models.gqa.QuestAttention`.
    """

    def __init__(
        self, config: GqaConfig, rule: QuestRule, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs,
        implementation: Implementation = "auto", workload: Locality | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.config, self.rule = config, rule

        self.layers = nnx.List(
            [
                Layer(config, rule, dtype=dtype, rngs=rngs, implementation=implementation, workload=workload)
                for _ in range(config.layers)
            ]
        )

    def decode_traced(self, token: Array, cache: Cache) -> tuple[Array, Cache, Selection]:
        """As `decode`, and the selected pages of all layers, stacked."""
        x, selected = self.embed(token), []
        for number, layer in enumerate(self.layers):
            x, cache, selection = _decode(*nnx.split(layer), x, cache, jnp.int32(number))
            selected.append(selection)
        return self.logits(x), cache, jax.tree.map(lambda *layers: jnp.stack(layers), *selected)

    def prefill_traced(self, tokens: Array, start: Array, scratch: Array) -> tuple[Array, Array, None]:
        """As `prefill`; prompts are dense, so nothing is selected."""
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            x, scratch = _prefill(*nnx.split(layer), x, scratch, jnp.int32(number), start)
        return x, scratch, None

    # What the cache holds of it ------------------------------------------------------------------------------------

    def records(self, context_tokens: int) -> Records:
        """A record is a page; every layer selects for itself."""
        size = self.rule.page_tokens
        return Records(
            record_tokens=size,
            row_bytes=size * self.config.token_bytes(self.dtype.itemsize),
            group_sizes=self.config.group_sizes,
            selected=self.rule.width(self.config.query_heads, -(-context_tokens // size)),
        )

    def new_index(self, layout: Layout) -> QuestIndex:
        """Empty bounds of all pages."""
        return quest_index(layout, self.config.layers, self.config.kv_heads, self.config.head_dim, self.dtype)

    def new_scratch(self, layout: Layout, chunk: int) -> Array:
        """Keys and values of one prompt, `[L, T, 2, G, C]`; T is a multiple of the chunk."""
        tokens = -(-layout.context_tokens // chunk) * chunk
        shape = (self.config.layers, tokens, 2, self.config.kv_heads, self.config.head_dim)
        return jnp.zeros(shape, self.dtype)

    def rows(self, stored: Array, space: Array, layout: Layout) -> Array:
        """One layer's pages: uint32 `[S, words]`."""
        tokens = _fit(stored[space], layout.records * layout.record_tokens)
        return to_words(tokens.reshape(layout.records, -1))

    def index_of(self, stored: Array, tokens: Array, layout: Layout) -> QuestIndex:
        """Bounds of one prompt's pages, `[L, S, G, C]`."""

        def one(layer: Array) -> tuple[Array, Array]:
            keys = _fit(layer[:, 0], layout.records * layout.record_tokens)
            return page_bounds(keys, tokens, layout.record_tokens)

        return QuestIndex(*lax.map(one, stored))


@partial(jax.jit, static_argnums=0)
def _decode(definition: Any, parameters: Any, x: Array, cache: Cache, number: Array) -> tuple[Array, Cache, Selection]:
    """`Layer.decode`; which layer is data, so that all share it."""
    return nnx.merge(definition, parameters).decode(x, cache, Address(number, number, 0, number))


@partial(jax.jit, static_argnums=0)
def _prefill(
    definition: Any, parameters: Any, x: Array, stored: Array, number: Array, start: Array
) -> tuple[Array, Array]:
    """`Layer.prefill`, shared in the same way."""
    return nnx.merge(definition, parameters).prefill(x, stored, number, start)


def _fit(x: Array, length: int) -> Array:
    """`x` cut or zero-padded to `length` along its first axis."""
    missing = max(length - len(x), 0)
    return jnp.pad(x[:length], [(0, missing)] + [(0, 0)] * (x.ndim - 1))
