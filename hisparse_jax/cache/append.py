# SPDX-License-Identifier: Apache-2.0
"""Append: the new token's bytes to the hot slot of the newest record."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from hisparse_jax.cache.layout import Address
from hisparse_jax.cache.state import Cache
from pallas_kernels.common import choose


def append(cache: Cache, address: Address, token: Array) -> Cache:
    """Writes one token of each active request into its newest record, which may still be open.

    Args:
      cache: the cache of a step that has begun.
      address: whose rows.
      token: uint32 `[R, words / record_tokens]`, this token's part of a row.
    Raises:
      ValueError: a token of the wrong size.
    """
    layout = cache.layout
    want = (layout.request_slots, layout.words // layout.record_tokens)
    if token.shape != want:
        raise ValueError(f"append: token must have shape {list(want)}, got {list(token.shape)}")
    rows = cache.hot_rows[address.position]
    # Written behind a barrier: both residencies then store the same bits, whatever the shape of the hot rows.
    token = lax.optimization_barrier(token)
    with jax.named_scope("append"):
        by_token = rows.reshape(*rows.shape[:2], layout.record_tokens, -1)
        offset = (cache.tokens - 1) % layout.record_tokens
        by_token = write_each(by_token, address.group, (cache.newest, offset), token)
    return with_rows(cache, address.position, by_token.reshape(rows.shape))


def write_each(buffer: Array, group: Array | int, at: Sequence[Array], values: Array) -> Array:
    """One value of each request into one group of a buffer, in place; places out of range are left out.

    Args:
      buffer: `[groups, ...]`.
      group: int32 scalar.
      at: int32 `[R]` each, places along the next dimensions.
      values: `[R, ...]` of the buffer's type.
    """
    if len(values) == 1 and choose("auto", "write_each", None) == "xla":
        # XLA makes of one update a slice to overwrite, and on a CPU does that anew for each reader, in a copy of the
        # buffer. Two equal updates stay a scatter in place.
        *at, values = (jnp.broadcast_to(x, (2, *x.shape[1:])) for x in (*at, values))
    return buffer.at[group, *at].set(values, mode="drop")


def with_rows(cache: Cache, position: int, rows: Array) -> Cache:
    """The cache with one hot buffer replaced."""
    return cache.replace(hot_rows=(*cache.hot_rows[:position], rows, *cache.hot_rows[position + 1 :]))
