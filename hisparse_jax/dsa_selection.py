# SPDX-License-Identifier: Apache-2.0
"""Selection by the lightning indexer of DeepSeek Sparse Attention: index keys to token ids."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from hisparse_jax.cache.append import write_each
from hisparse_jax.cache.state import Cache
from hisparse_jax.records import quantise_keys
from hisparse_jax.workload import Locality, synthetic_scores
from pallas_kernels.common import Implementation
from pallas_kernels.index_scores import dsa_scores, key_scores
from pallas_kernels.index_topk import index_topk
from pallas_kernels.row_format import RecordType


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DsaIndex:
    """Index keys of every token at the anchor layers, as stored.

    Attributes:
      keys: `[anchors, R, S, D]`, float32, bfloat16 or e4m3.
      key_scale: float32 `[anchors, R, S]` beside e4m3 keys, else None.
    """

    keys: Array
    key_scale: Array | None


def dsa_index(anchors: int, requests: int, tokens: int, channels: int, record: RecordType) -> DsaIndex:
    """Empty index state for `requests` histories of up to `tokens`."""
    dtype = jnp.float8_e4m3fn if record == "fp8" else jnp.dtype(record)
    scale = jnp.zeros((anchors, requests, tokens), jnp.float32) if record == "fp8" else None
    return DsaIndex(jnp.zeros((anchors, requests, tokens, channels), dtype), scale)


def store_keys(keys: Array, like: DsaIndex) -> tuple[Array, Array | None]:
    """Index keys `[..., D]` in the stored type, with scales `[...]` if that type has any.

    Behind a barrier: whoever stores them then stores the same bits, whatever the program around it.
    """
    keys = lax.optimization_barrier(keys)
    return (keys.astype(like.keys.dtype), None) if like.key_scale is None else quantise_keys(keys)


def append_index_key(index: DsaIndex, cache: Cache, anchor: Array | int, key: Array) -> DsaIndex:
    """Writes each active request's newest index key, `[R, D]`."""
    requests = jnp.arange(cache.layout.request_slots)
    token = jnp.where(cache.active, cache.tokens - 1, cache.layout.records)
    with jax.named_scope("append"):
        values, scale = store_keys(key, index)
        keys = write_each(index.keys, anchor, (requests, token), values)
        if scale is None or index.key_scale is None:
            return DsaIndex(keys, None)
        return DsaIndex(keys, write_each(index.key_scale, anchor, (requests, token), scale))


def select_tokens(
    index: DsaIndex, cache: Cache, anchor: Array | int, query: Array, weight: Array, count: int, *, scale: float,
    workload: Locality | None = None, busy: int | None = None, implementation: Implementation = "auto",
) -> Array:  # fmt: skip
    """The `count` best tokens of each request; all of them where there are fewer. The newest is not forced in.

    Args:
      index: index keys, the newest included.
      cache: the cache of a step that has begun.
      anchor: int32 scalar, which layer of the index.
      query: `[R, N, D]`, rotated.
      weight: float32 `[R, N]`.
      count: how many; no more than the selection that the cache was made for.
      scale: factor of the products.
      workload: a synthetic process whose scores stand for those just computed.
      busy: about how many requests are active, for the launch; all of them if None.
      implementation: of the kernels.
    Returns:
      int32 `[R, K]`, ascending, -1 padded; K is what the cache was made for.
    Raises:
      ValueError: the cache was made for fewer.
    """
    width, records = cache.layout.selected, cache.layout.records
    if min(count, records) > width:
        raise ValueError(f"select_tokens: the layout has selected = {width}, the model selects {min(count, records)}")
    with jax.named_scope("index_scores"):
        scores = dsa_scores(
            query, weight, index.keys, index.key_scale, anchor, scale=scale, length=cache.length,
            busy=busy, implementation=implementation,
        )  # fmt: skip
    with jax.named_scope("selection"):
        if workload is not None:
            scores = synthetic_scores(scores, cache.length, jnp.asarray(anchor, jnp.int32), workload)
        ids = index_topk(scores, cache.length, min(count, width), busy=busy, implementation=implementation)
    return jnp.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=-1)


def select_in_prompt(
    index: DsaIndex, anchor: Array | int, query: Array, weight: Array, start: Array, count: int, *, scale: float,
    implementation: Implementation = "auto",
) -> Array:  # fmt: skip
    """The tokens that each query of a chunk of one prompt attends to, by the same scores, block by block.

    Args:
      index: index keys of one prompt, `[anchors, 1, T, D]`, the chunk's own included; T is a multiple of the chunk.
      anchor: int32 scalar, which layer of the index.
      query: `[C, N, D]`, rotated, at positions `start..start + C - 1`.
      weight: float32 `[C, N]`.
      start: int32 scalar, a multiple of the chunk.
      count: how many.
      scale: factor of the products.
      implementation: of the kernels.
    Returns:
      int32 `[C, min(count, T)]`, ascending, -1 padded.
    """
    chunk, channels, tokens = query.shape[0], query.shape[2], index.keys.shape[2]

    def block(number: Array, scores: Array) -> Array:
        at = number * chunk
        keys = lax.dynamic_slice(index.keys, (anchor, 0, at, 0), (1, 1, chunk, channels))[0, 0]
        key_scale = None
        if index.key_scale is not None:
            key_scale = lax.dynamic_slice(index.key_scale, (anchor, 0, at), (1, 1, chunk))[0, 0]
        part = key_scores(query, weight, keys, key_scale, scale=scale)
        return lax.dynamic_update_slice(scores, part, (jnp.int32(0), at))

    with jax.named_scope("index_scores"):
        scores = lax.fori_loop(0, start // chunk + 1, block, jnp.full((chunk, tokens), -jnp.inf))
    with jax.named_scope("selection"):
        visible = start + 1 + jnp.arange(chunk, dtype=jnp.int32)
        return index_topk(scores, visible, min(count, tokens), implementation=implementation)
