# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention that decodes over the pages Quest selects, usable inside any Flax model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from hisparse_jax.attention import attend_pages
from hisparse_jax.cache.append import append
from hisparse_jax.cache.layout import Address
from hisparse_jax.cache.state import Cache
from hisparse_jax.resolve import resolve
from hisparse_jax.selection import QuestRule, Selection, append_key, select_pages
from hisparse_jax.workload import Locality
from models.config import GqaConfig
from models.layers import RMSNorm, chunk_attention, linear, rope
from pallas_kernels.common import Implementation
from pallas_kernels.words import to_words


class QuestAttention(nnx.Module):
    """One attention layer. `decode` reads and writes a cache; `prefill` a dense scratch of one prompt.

    A record of the cache is a page of tokens, each token `[key, value]` of all KV heads; the index state is a
    `QuestIndex` over the rotated keys.

    Args:
      config: shapes.
      rule: how pages are selected.
      dtype: type of parameters, arithmetic and stored keys and values.
      rngs: for the initial parameters.
      implementation: of the kernels.
      workload: a synthetic process that chooses pages instead of their bounds, which are still scored.
    """

    def __init__(
        self, config: GqaConfig, rule: QuestRule, *, dtype: DTypeLike, rngs: nnx.Rngs,
        implementation: Implementation = "auto", workload: Locality | None = None,
    ) -> None:  # fmt: skip
        self.config, self.rule, self.implementation, self.workload = config, rule, implementation, workload
        queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
        bias = config.qkv_bias
        self.query = linear(config.hidden, queries, bias=bias, dtype=dtype, rngs=rngs)
        self.key = linear(config.hidden, keys, bias=bias, dtype=dtype, rngs=rngs)
        self.value = linear(config.hidden, keys, bias=bias, dtype=dtype, rngs=rngs)
        self.out = linear(queries, config.hidden, dtype=dtype, rngs=rngs)
        if config.qk_norm:
            self.query_norm = RMSNorm(config.head_dim, config.norm_eps, dtype=dtype)
            self.key_norm = RMSNorm(config.head_dim, config.norm_eps, dtype=dtype)

    def project(self, x: Array, position: Array) -> tuple[Array, Array, Array]:
        """`[T, D]` to rotated queries `[T, G, heads, C]`, rotated keys `[T, G, C]` and values `[T, G, C]`."""
        config = self.config
        with jax.named_scope("project"):
            query = self.query(x).reshape(len(x), config.query_heads, config.head_dim)
            # For a GPU XLA makes of one row times these two kernels a multiplication that writes all products to
            # memory, rounded, and sums (docs/throughput.md). Two equal rows stay a matmul.
            rows = jnp.broadcast_to(x, (2, x.shape[1])) if len(x) == 1 else x
            key, value = (
                projection(rows)[: len(x)].reshape(len(x), config.kv_heads, config.head_dim)
                for projection in (self.key, self.value)
            )
            if config.qk_norm:
                query, key = self.query_norm(query), self.key_norm(key)
            query, key = (
                rope(part, position, theta=config.rope_theta, pairing=config.rope_pairing) for part in (query, key)
            )
        return query.reshape(len(x), config.kv_heads, -1, config.head_dim), key, value

    def decode(self, x: Array, cache: Cache, address: Address) -> tuple[Array, Cache, Selection]:
        """One token of each request, `[R, D]`, at the newest position of `cache`, whose step has begun."""
        query, key, value = self.project(x, jnp.maximum(cache.tokens - 1, 0))
        token = to_words(jnp.stack([key, value], axis=1).reshape(len(x), -1))
        cache = append(cache, address, token)
        cache = cache.replace(index=append_key(cache.index, cache, address.table, key))
        selection = select_pages(
            cache.index, cache, address.table, query, self.rule, self.implementation, self.workload
        )
        resolution, cache = resolve(cache, address, selection.ids, self.implementation)
        out = attend_pages(
            cache, address, resolution, query, selection.head_mask, scale=self.config.head_dim**-0.5, dtype=key.dtype,
            out_dtype=x.dtype, implementation=self.implementation,
        )  # fmt: skip
        return self.out(out.reshape(len(x), -1)), cache, selection

    def prefill(self, x: Array, stored: Array, layer: Array, start: Array) -> tuple[Array, Array]:
        """A chunk of one prompt, `[C, D]` at positions `start..`, densely; its keys and values go to `stored`.

        `stored` is `[L, T, 2, G, C]` with T and `start` multiples of the chunk.
        """
        query, key, value = self.project(x, start + jnp.arange(len(x)))
        new = jnp.stack([key, value], axis=1)
        stored = lax.dynamic_update_slice(stored, new[None], (layer, start, 0, 0, 0))
        out = chunk_attention(query, stored, layer, start, scale=self.config.head_dim**-0.5)
        return self.out(out.reshape(len(x), -1).astype(x.dtype)), stored
