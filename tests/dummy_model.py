# SPDX-License-Identifier: Apache-2.0
"""A model of integers that drives the decode loop and the engine through the cache, and its plain Python twin.

A record is one token's `(token, position)`. The next token is a sum over the selected records, so one record that is
missing, stale or of another request changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from hisparse_jax.cache.append import append
from hisparse_jax.cache.layout import Address, Layout, Records
from hisparse_jax.cache.state import Cache
from hisparse_jax.resolve import resolve

VOCAB = 97
LAYERS = 2
SELECTED = 4
ADDRESSES = tuple(Address(layer, layer, 0, layer) for layer in range(LAYERS))


def _chosen(position: Any, layer: int) -> list[Any]:
    """The records that the query at `position` selects, -1 where it has fewer: the first, the newest, two others."""
    return [0 * position, (position * 5 + layer) // 7, (position * 2) // 3, position]


class IntegerModel:
    """Implements `hisparse_jax.decode.Model`; the only parameter is a number that every token adds."""

    def records(self, context_tokens: int) -> Records:
        return Records(record_tokens=1, row_bytes=8, group_sizes=(1,) * LAYERS, selected=SELECTED)

    def decode(self, params: Array, token: Array, cache: Cache) -> tuple[Array, Cache]:
        position = cache.tokens - 1
        row = jnp.stack([token, position], axis=1).astype(jnp.uint32)
        total = jnp.zeros_like(token)
        for layer, address in enumerate(ADDRESSES):
            cache = append(cache, address, row)
            ids = _distinct(jnp.stack(_chosen(position, layer), axis=1), cache.active)
            resolution, cache = resolve(cache, address, ids)
            rows = cache.hot_rows[0].at[layer, jnp.maximum(resolution.place, 0)].get(mode="clip").astype(jnp.int32)
            seen = jnp.where(ids >= 0, rows[..., 0] * (rows[..., 1] + layer + 1), 0)
            total += jnp.sum(seen, axis=1)
        return _one_hot(total + params), cache

    def prefill(self, params: Array, tokens: Array, start: Array, scratch: Array) -> tuple[Array, Array]:
        scratch = lax.dynamic_update_slice(scratch, tokens, (start,))
        position = start + jnp.arange(len(tokens), dtype=jnp.int32)
        total = jnp.zeros_like(tokens)
        for layer in range(LAYERS):
            ids = _distinct(jnp.stack(_chosen(position, layer), axis=1), jnp.ones_like(tokens, jnp.bool_))
            known = scratch.at[jnp.maximum(ids, 0)].get(mode="clip")
            total += jnp.sum(jnp.where(ids >= 0, known * (ids + layer + 1), 0), axis=1)
        return (total + params)[:, None], scratch

    def logits(self, params: Array, hidden: Array) -> Array:
        return _one_hot(hidden[..., 0])

    def new_index(self, layout: Layout) -> tuple[()]:
        return ()

    def new_scratch(self, layout: Layout, chunk: int) -> Array:
        return jnp.zeros(-(-layout.context_tokens // chunk) * chunk, jnp.int32)

    def rows(self, scratch: Array, space: Array, layout: Layout) -> Array:
        tokens = scratch[: layout.records]
        return jnp.stack([tokens, jnp.arange(layout.records, dtype=jnp.int32)], axis=1).astype(jnp.uint32)

    def index_of(self, scratch: Array, tokens: Array, layout: Layout) -> tuple[()]:
        return ()


def _distinct(ids: Array, active: Array) -> Array:
    """Ascending, each once, -1 padded."""
    ids = jnp.sort(ids, axis=1)
    again = jnp.concatenate([jnp.zeros_like(ids[:, :1], jnp.bool_), ids[:, 1:] == ids[:, :-1]], axis=1)
    never = jnp.iinfo(jnp.int32).max
    ids = jnp.sort(jnp.where(again | ~active[:, None], never, ids), axis=1)
    return jnp.where(ids == never, -1, ids)


def _one_hot(total: Array) -> Array:
    return jax.nn.one_hot(total % VOCAB, VOCAB)


def expected(prompt: Sequence[int], count: int, added: int = 0) -> list[int]:
    """What the model generates, in plain Python."""
    tokens = list(prompt)
    for _ in range(count):
        position = len(tokens) - 1
        total = added
        for layer in range(LAYERS):
            total += sum(tokens[i] * (i + layer + 1) for i in set(_chosen(position, layer)))
        tokens.append(total % VOCAB)
    return tokens[len(prompt) :]
