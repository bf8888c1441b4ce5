# SPDX-License-Identifier: Apache-2.0
"""Attention on the state of a cache: reads the records where resolve placed them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from hisparse_jax.cache.layout import Address
from hisparse_jax.cache.state import Cache
from hisparse_jax.resolve import Resolution
from pallas_kernels.common import Implementation
from pallas_kernels.row_format import RowFormat
from pallas_kernels.sparse_gqa import sparse_gqa
from pallas_kernels.sparse_mla import sparse_mla


def visible_tokens(cache: Cache, selected: Array) -> Array:
    """int32 `[R, K]`: how many tokens of each selected record exist; fewer than all only in the newest one."""
    size = cache.layout.record_tokens
    return jnp.where(selected >= 0, jnp.clip(cache.tokens[:, None] - selected * size, 0, size), 0)


def attend_pages(
    cache: Cache, address: Address, resolution: Resolution, query: Array, head_mask: Array | None = None, *,
    scale: float, dtype: DTypeLike, out_dtype: DTypeLike, implementation: Implementation = "auto",
) -> Array:  # fmt: skip
    """Attention of grouped query heads over the selected pages.

    Args:
      cache: the cache after resolve.
      address: whose rows.
      resolution: the places of the selected pages.
      query: `[R, G, heads, C]`, rotated.
      head_mask: bool `[R, G, heads, K]`, pages each head attends to, if they differ by head.
      scale: factor of the logits.
      dtype: type of the stored keys and values.
      out_dtype: of the result; sums are float32.
      implementation: of the kernel.
    Returns:
      `[R, G, heads, C]` of `out_dtype`.
    """
    with jax.named_scope("attention"):
        out, _ = sparse_gqa(
            query, cache.hot_rows[address.position], address.group, resolution.place,
            visible_tokens(cache, resolution.selected), head_mask, scale=scale, dtype=dtype, out_dtype=out_dtype,
            implementation=implementation,
        )  # fmt: skip
    return out


def attend_latents(
    cache: Cache, address: Address, resolution: Resolution, query: Array, *, row: RowFormat, scale: float,
    out_dtype: DTypeLike, implementation: Implementation = "auto",
) -> Array:  # fmt: skip
    """Attention of all heads over the selected latents.

    Args:
      cache: the cache after resolve.
      address: whose rows.
      resolution: the places of the selected tokens; an anchor's, for its followers too.
      query: `[R, N, latent + rope]`, absorbed and rotated.
      row: how a record is stored.
      scale: factor of the logits.
      out_dtype: of the result; sums are float32.
      implementation: of the kernel.
    Returns:
      `[R, N, latent]` of `out_dtype`.
    """
    with jax.named_scope("attention"):
        out, _ = sparse_mla(
            query, cache.hot_rows[address.position], address.group, resolution.place, row=row, scale=scale,
            out_dtype=out_dtype, implementation=implementation,
        )  # fmt: skip
    return out
