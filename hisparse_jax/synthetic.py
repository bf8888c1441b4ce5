# SPDX-License-Identifier: Apache-2.0
"""Requests that were never prefilled: a cache of full histories of random rows, to time decoding with.

The rows of a request are a hash of space, request and token: the same in every residency, so that outputs can be
compared, and made on the device, so that a large pool fills as fast as the link takes it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from hisparse_jax.cache.admission import admit
from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.state import Cache, entering, placements
from hisparse_jax.decode import DecodeState
from hisparse_jax.sampling import greedy

_SEED = 20


def state_of(layout: Layout, cache: Cache, vocab: int, steps: int) -> DecodeState:
    """Every request slot decodes `steps` tokens."""
    token = jnp.arange(layout.request_slots, dtype=jnp.int32) % vocab
    remaining = jnp.full(layout.request_slots, steps, jnp.int32)
    return DecodeState(cache, token, remaining, greedy(layout.request_slots, vocab))


def random_index(index: Any) -> Any:
    """Index state of the same shapes and types, standard normal."""
    leaves, structure = jax.tree.flatten(index)
    keys = jax.random.split(jax.random.key(_SEED), len(leaves))
    random = [_normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, random)


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


def random_rows(space: Array, request: Array, layout: Layout) -> Array:
    """uint32 `[S, words]`: pairs of bfloat16 numbers between 1/8 and 2, of either sign."""
    record = jnp.arange(layout.records, dtype=jnp.uint32)[:, None]
    word = jnp.arange(layout.words, dtype=jnp.uint32)[None]
    bits = (record * jnp.uint32(0x9E3779B1)) ^ (word * jnp.uint32(0x85EBCA77))
    bits += space.astype(jnp.uint32) * jnp.uint32(0xC2B2AE3D) + request.astype(jnp.uint32) * jnp.uint32(0x27D4EB2F)
    bits = (bits ^ (bits >> jnp.uint32(15))) * jnp.uint32(0x2C1B3C6D)
    bits ^= bits >> jnp.uint32(13)
    return (bits & jnp.uint32(0x81FF81FF)) | jnp.uint32(0x3E003E00)


def compile_admission(cache: Cache) -> Any:
    """The compiled admission of one request: cache, slot and tokens to the new cache; the cache given is donated.

    Request slot r has the r-th stretch of host pages, in every residency.

    Args:
      cache: an example, possibly abstract.
    """
    layout, pages = cache.layout, cache.layout.pages_per_request

    def one(cache: Cache, slot: Array, tokens: Array) -> Cache:
        cache = entering(cache)
        table = slot * pages + jnp.arange(pages, dtype=jnp.int32)
        index = jax.tree.map(lambda leaf: leaf[:, slot], cache.index)
        return admit(cache, slot, table, tokens, lambda space: random_rows(space, slot, layout), index)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.jit(one, donate_argnums=0, out_shardings=placements(cache)).lower(cache, number, number).compile()
