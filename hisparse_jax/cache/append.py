# SPDX-License-Identifier: Apache-2.0
"""Append: the new token's bytes to the hot slot of the newest record."""

from __future__ import annotations

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
        newest = cache.newest
        if layout.request_slots == 1 and choose("auto", "append", None) == "xla":
            # XLA makes of one update a slice to overwrite, and on a CPU does that anew for each reader, in a copy of
            # all rows. Two equal updates stay a scatter in place.
            newest, offset, token = (jnp.broadcast_to(x, (2, *x.shape[1:])) for x in (newest, offset, token))
        by_token = by_token.at[address.group, newest, offset].set(token, mode="drop")
    return with_rows(cache, address.position, by_token.reshape(rows.shape))


def with_rows(cache: Cache, position: int, rows: Array) -> Cache:
    """The cache with one hot buffer replaced."""
    return cache.replace(hot_rows=(*cache.hot_rows[:position], rows, *cache.hot_rows[position + 1 :]))
