# SPDX-License-Identifier: Apache-2.0
"""Decoders of DeepSeek-V3.2 and GLM-5: latent attention over the tokens an indexer selects, expert layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from hisparse_jax.cache.append import append
from hisparse_jax.cache.layout import Address, Layout, Records
from hisparse_jax.cache.state import Cache
from hisparse_jax.dsa_selection import (
    DsaIndex,
    append_index_key,
    dsa_index,
    select_in_prompt,
    select_tokens,
    store_keys,
)
from hisparse_jax.prefetch import Prefetch, followers_issued
from hisparse_jax.resolve import Resolution, after_selection, fetch, part_of, resolve, selection_parts, together
from hisparse_jax.selection import Selection
from hisparse_jax.workload import Locality
from models.backbone import Backbone
from models.dsa_config import DsaConfig
from models.indexer import Indexer
from models.layers import MLP, RMSNorm
from models.mla import LatentAttention
from models.moe import MoE, Routing
from pallas_kernels.common import Implementation
from pallas_kernels.row_format import RecordType


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prompt:
    """What prefill keeps of one prompt of up to T tokens, T a multiple of the chunk.

    Attributes:
      rows: uint32 `[L, T, words]`, records as stored.
      index: index keys as stored, `[anchors, 1, T, D]`.
    """

    rows: Array
    index: DsaIndex


@dataclass(frozen=True)
class DsaOptions:
    """How a decoder stores and runs; the output depends on the stored types and the workload only.

    Attributes:
      record: type of stored records.
      index_keys: type of stored index keys.
      prefetch: when followers' rows are fetched: as soon as their anchor has resolved ("exact"), or just before they
        are read ("off").
      fetch_programs: grid of a follower's fetch; the tuned one if None.
      parts: in how many parts requests are selected and resolved, each beside the fetch of the one before; the tuned
        number if None.
      workload: a synthetic process that chooses tokens instead of the indexer, which still runs; None for the real one.
      implementation: of the kernels.
    """

    record: RecordType
    index_keys: RecordType
    prefetch: Prefetch = "exact"
    fetch_programs: int | None = None
    parts: int | None = None
    workload: Locality | None = None
    implementation: Implementation = "auto"


class Layer(nnx.Module):
    """Attention and MLP, each with its norm and a residual connection; an anchor has an indexer too."""

    def __init__(
        self, config: DsaConfig, options: DsaOptions, *, anchor: bool, dense: bool, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        hidden, eps = config.hidden, config.norm_eps
        self.attention_norm = RMSNorm(hidden, eps, dtype=dtype)
        self.attention = LatentAttention(
            config, config.row_format(options.record), dtype=dtype, rngs=rngs, implementation=options.implementation
        )
        if anchor:
            attention = self.attention
            self.indexer = Indexer(config, attention.frequency, attention.factor, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(hidden, eps, dtype=dtype)
        if dense:
            self.mlp = MLP(hidden, config.mlp_width, dtype=dtype, rngs=rngs)
        else:
            routing = Routing(
                config.experts, config.experts_used, "sigmoid", config.expert_groups, config.expert_groups_used,
                config.renormalise, config.routed_factor,
            )  # fmt: skip
            self.mlp = MoE(hidden, config.expert_width, routing, config.shared_experts, dtype=dtype, rngs=rngs)

    def add_mlp(self, x: Array) -> Array:
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x))


class Group(nnx.Module):
    """A selection group: the anchor selects and resolves, its followers attend to the same tokens of their own."""

    def __init__(
        self, config: DsaConfig, options: DsaOptions, dense: tuple[bool, ...], *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.config, self.options = config, options
        self.layers = nnx.List(
            [
                Layer(config, options, anchor=position == 0, dense=is_dense, dtype=dtype, rngs=rngs)
                for position, is_dense in enumerate(dense)
            ]
        )

    def decode(self, x: Array, cache: Cache, addresses: list[Address]) -> tuple[Array, Cache, Array]:
        """One token of each request through the group: `[R, D]`, and what was selected, int32 `[R, K]`."""
        issued = followers_issued(len(self.layers), prefetch=self.options.prefetch)
        place, anchor = jnp.maximum(cache.tokens - 1, 0), self.layers[0]
        normed = anchor.attention_norm(x)
        query_latent, record = anchor.attention.project(normed, place)
        cache = append(cache, addresses[0], record)
        resolution, cache = self._resolve(anchor, normed, query_latent, place, cache, addresses[0])
        query_latent = after_selection(cache.layout, resolution.selected, query_latent)
        plan = resolution.plan
        for position, (layer, address, followers) in enumerate(zip(self.layers, addresses, issued, strict=True)):
            if position > 0:
                query_latent, record = layer.attention.project(layer.attention_norm(x), place)
                cache = append(cache, address, record)
            for follower in followers:  # each after the one before, or they would share the link and all come late
                cache, plan = fetch(
                    cache, addresses[follower], plan, self.options.implementation,
                    beside=self.options.prefetch == "exact", programs=self.options.fetch_programs,
                )  # fmt: skip
            x = layer.add_mlp(x + layer.attention.attend(cache, address, resolution, query_latent, place))
        return x, cache, resolution.selected

    def _resolve(
        self, anchor: Layer, normed: Array, query_latent: Array, place: Array, cache: Cache, address: Address
    ) -> tuple[Resolution, Cache]:
        """The anchor appends its index key, selects, and brings its missing rows in, part by part of the requests."""
        query, weight, key = anchor.indexer(normed, query_latent, place)
        cache = cache.replace(index=append_index_key(cache.index, cache, address.table, key))
        parts = selection_parts(cache.layout, self.options.parts, self.options.implementation)
        busy = -(-cache.layout.request_slots // parts)
        active, resolutions = cache.active, []
        for number in range(parts):
            part = part_of(cache, number, parts)
            if resolutions:
                weight = after_selection(cache.layout, resolutions[-1].selected, weight)
            ids = select_tokens(
                part.index, part, address.table, query, weight, self.config.selected, scale=anchor.indexer.scale,
                workload=self.options.workload, busy=busy, implementation=self.options.implementation,
            )  # fmt: skip
            resolution, part = resolve(part, address, ids, self.options.implementation, busy=busy)
            resolutions.append(resolution)
            cache = part.replace(active=active)
        return together(resolutions), cache

    def prefill(
        self, x: Array, prompt: Prompt, start: Array, first: Array, anchor: Array
    ) -> tuple[Array, Prompt, Array]:
        """A chunk of one prompt through the group, layers `first..`: `[C, D]`, and what was selected, `[C, K]`."""
        place, anchor_layer = start + jnp.arange(len(x), dtype=jnp.int32), self.layers[0]
        normed = anchor_layer.attention_norm(x)
        query_latent, record = anchor_layer.attention.project(normed, place)
        query, weight, key = anchor_layer.indexer(normed, query_latent, place)
        index = _write_keys(prompt.index, anchor, start, key)
        ids = select_in_prompt(
            index, anchor, query, weight, start, self.config.selected, scale=anchor_layer.indexer.scale,
            implementation=self.options.implementation,
        )  # fmt: skip
        rows, mask = prompt.rows, _mask(ids, prompt.rows.shape[1])
        for position, layer in enumerate(self.layers):
            if position > 0:
                query_latent, record = layer.attention.project(layer.attention_norm(x), place)
            rows = lax.dynamic_update_slice(rows, record[None], (first + position, start, 0))
            out = layer.attention.attend_in_prompt(rows, first + position, start, mask, query_latent)
            x = layer.add_mlp(x + out)
        return x, Prompt(rows, index), ids


class DsaDecoder(Backbone):
    """Groups of layers between embedding and head. Implements `hisparse_jax.decode.Model` through `models.functional`.

    Each layer has parameters of its own: a scan over stacked ones copies a layer's before it uses them. Groups of one
    shape share what is traced and lowered (`_decode`), so that compile time hardly grows with depth.

    Args:
      config: shapes.
      options: how it stores and runs.
      dtype: type of parameters and arithmetic.
      rngs: for the initial parameters.
    """

    def __init__(
        self, config: DsaConfig, options: DsaOptions, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.config, self.options = config, options

        self.groups = nnx.List(
            [Group(config, options, sharing.dense, dtype=dtype, rngs=rngs) for sharing in config.sharing()]
        )

    def decode_traced(self, token: Array, cache: Cache) -> tuple[Array, Cache, Selection]:
        """As `decode`, and the selected tokens of all tables, stacked."""
        x, selected = self.embed(token), []
        for group, sharing in zip(self.groups, self.config.sharing(), strict=True):
            first, table = jnp.int32(sharing.first_layer), jnp.int32(sharing.table)
            hot_groups = jnp.asarray(sharing.hot_groups, jnp.int32)
            x, cache, ids = _decode(*nnx.split(group), x, cache, first, table, hot_groups)
            selected.append(ids)
        return self.logits(x), cache, Selection(jnp.stack(selected), None)

    def prefill_traced(self, tokens: Array, start: Array, scratch: Prompt) -> tuple[Array, Prompt, Selection]:
        """As `prefill`, and the selected tokens of all tables, ids `[tables, C, K]`."""
        x, selected = self.embed(tokens), []
        for group, sharing in zip(self.groups, self.config.sharing(), strict=True):
            first, table = jnp.int32(sharing.first_layer), jnp.int32(sharing.table)
            x, scratch, ids = _prefill(*nnx.split(group), x, scratch, start, first, table)
            selected.append(ids)
        return x, scratch, Selection(jnp.stack(selected), None)

    # What the cache holds of it ------------------------------------------------------------------------------------

    def records(self, context_tokens: int) -> Records:
        """A record is a token; an anchor and its followers share a selection."""
        row = self.config.row_format(self.options.record)
        return Records(1, row.row_bytes, self.config.group_sizes, min(self.config.selected, context_tokens))

    def new_index(self, layout: Layout) -> DsaIndex:
        """Empty index keys of the anchors."""
        return self._index(layout.request_slots, layout.records)

    def new_scratch(self, layout: Layout, chunk: int) -> Prompt:
        """Records and index keys of one prompt; T is a multiple of the chunk."""
        tokens = -(-layout.context_tokens // chunk) * chunk
        rows = jnp.zeros((self.config.layers, tokens, layout.words), jnp.uint32)
        return Prompt(rows, self._index(1, tokens))

    def rows(self, prompt: Prompt, space: Array, layout: Layout) -> Array:
        """One layer's records: uint32 `[S, words]`."""
        return prompt.rows[space, : layout.records]

    def index_of(self, prompt: Prompt, tokens: Array, layout: Layout) -> DsaIndex:
        """Index keys of one prompt, `[anchors, S, D]`; those from `tokens` on mean nothing."""
        del tokens
        return jax.tree.map(lambda leaf: leaf[:, 0, : layout.records], prompt.index)

    def _index(self, requests: int, tokens: int) -> DsaIndex:
        config = self.config
        return dsa_index(len(config.group_sizes), requests, tokens, config.index_dim, self.options.index_keys)


@partial(jax.jit, static_argnums=0)
def _decode(
    definition: Any, parameters: Any, x: Array, cache: Cache, first: Array, table: Array, hot_groups: Array
) -> tuple[Array, Cache, Array]:
    """`Group.decode` of the group that begins with layer `first`. Where it lies is data: groups of a shape share it."""
    addresses = [Address(first + at, table, at, hot_groups[at]) for at in range(len(hot_groups))]
    return nnx.merge(definition, parameters).decode(x, cache, addresses)


@partial(jax.jit, static_argnums=0)
def _prefill(
    definition: Any, parameters: Any, x: Array, prompt: Prompt, start: Array, first: Array, table: Array
) -> tuple[Array, Prompt, Array]:
    """`Group.prefill`, shared in the same way."""
    return nnx.merge(definition, parameters).prefill(x, prompt, start, first, table)


def _write_keys(index: DsaIndex, anchor: Array, start: Array, keys: Array) -> DsaIndex:
    """Writes the index keys of a chunk, `[C, D]`, of the one prompt of `index`."""
    values, scale = store_keys(keys, index)
    new = lax.dynamic_update_slice(index.keys, values[None, None], (anchor, 0, start, 0))
    if scale is None or index.key_scale is None:
        return DsaIndex(new, None)
    return DsaIndex(new, lax.dynamic_update_slice(index.key_scale, scale[None, None], (anchor, 0, start)))


def _mask(ids: Array, tokens: int) -> Array:
    """int32 `[C, K]`, -1 padded, as bool `[C, tokens]`."""
    query = jnp.arange(len(ids))[:, None]
    return jnp.zeros((len(ids), tokens), jnp.bool_).at[query, jnp.where(ids >= 0, ids, tokens)].set(True, mode="drop")
