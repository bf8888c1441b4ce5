# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over selected tokens, usable inside any Flax model.

Decoding uses the absorbed form: the key half of the up-projection goes into the query, so that every head reads the
same stored record. Prefill uses the materialised form: keys and values of a block are expanded once for all queries of
a chunk, which costs less than the wider products of the absorbed form when a chunk has a few hundred queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from hisparse_jax.attention import attend_latents
from hisparse_jax.cache.layout import Address
from hisparse_jax.cache.state import Cache
from hisparse_jax.records import read_rows, write_rows
from hisparse_jax.resolve import Resolution
from models.dsa_config import DsaConfig
from models.layers import RMSNorm, attend_in_blocks, linear, precision, rotate
from pallas_kernels.common import Implementation
from pallas_kernels.row_format import RowFormat


class Projected(NamedTuple):
    """What a layer computes of its tokens before attention.

    Attributes:
      query_latent: `[T, Q]`, normed; queries come from it, those of the indexer too.
      record: uint32 `[T, words]`, the record to store.
    """

    query_latent: Array
    record: Array


def rope_frequencies(config: DsaConfig) -> tuple[float, ...]:
    """Turns per position of each rotated channel pair, stretched by YaRN (arXiv:2309.00071, section 3.2) if set."""
    pairs = np.arange(config.rope // 2)
    plain = config.rope_theta ** (-2.0 * pairs / config.rope)
    if config.yarn is None:
        return tuple(plain.tolist())
    yarn = config.yarn

    def channel(turns: float) -> float:
        ratio = yarn.original_tokens / (2 * math.pi * turns)
        return config.rope * math.log(ratio) / (2 * math.log(config.rope_theta))

    low = max(math.floor(channel(yarn.beta_fast)), 0)
    high = min(math.ceil(channel(yarn.beta_slow)), config.rope - 1)
    ramp = np.clip((pairs - low) / (high - low if high != low else 0.001), 0, 1)
    return tuple((plain / yarn.factor * ramp + plain * (1 - ramp)).tolist())


class LatentAttention(nnx.Module):
    """One attention layer. `attend` reads a cache, `attend_in_prompt` the stored records of one prompt.

    Args:
      config: shapes.
      row: how a record is stored.
      dtype: type of parameters and arithmetic.
      rngs: for the initial parameters.
      implementation: of the kernels.
    """

    def __init__(
        self, config: DsaConfig, row: RowFormat, *, dtype: DTypeLike, rngs: nnx.Rngs,
        implementation: Implementation = "auto",
    ) -> None:  # fmt: skip
        self.config, self.row, self.implementation = config, row, implementation
        self.frequency = rope_frequencies(config)
        self.factor = config.yarn.rotation_factor if config.yarn else 1.0
        heads, eps = config.heads, config.latent_norm_eps
        make = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=0)
        self.query_down = linear(config.hidden, config.query_latent, dtype=dtype, rngs=rngs)
        self.query_norm = RMSNorm(config.query_latent, eps, dtype=dtype)
        self.query_up = linear(config.query_latent, heads * (config.nope + config.rope), dtype=dtype, rngs=rngs)
        self.latent_down = linear(config.hidden, config.latent + config.rope, dtype=dtype, rngs=rngs)
        self.latent_norm = RMSNorm(config.latent, eps, dtype=dtype)
        self.key_up = nnx.Param(make(rngs.params(), (heads, config.nope, config.latent), dtype))
        self.value_up = nnx.Param(make(rngs.params(), (heads, config.value, config.latent), dtype))
        self.out = linear(heads * config.value, config.hidden, dtype=dtype, rngs=rngs)

    def project(self, x: Array, position: Array) -> Projected:
        """Normed `[T, D]` to query latents and records."""
        with jax.named_scope("project"):
            query_latent = self.query_norm(self.query_down(x))
            latent, rope = jnp.split(self.latent_down(x), [self.config.latent], axis=-1)
            record = write_rows(self.latent_norm(latent), self._rotate(rope, position), self.row)
            return Projected(query_latent, record)

    def attend(
        self, cache: Cache, address: Address, resolution: Resolution, query_latent: Array, position: Array
    ) -> Array:
        """One token of each request over the selected records: `[R, D]`."""
        nope, rope = self._queries(query_latent, position)
        with jax.named_scope("project"):
            absorbed = self._einsum("rnd,ndc->rnc", nope, self.key_up[...])
            query = jnp.concatenate([absorbed.astype(rope.dtype), rope], axis=-1)
        latent = attend_latents(
            cache, address, resolution, query, row=self.row, scale=self.config.softmax_scale,
            out_dtype=self.value_up[...].dtype, implementation=self.implementation,
        )  # fmt: skip
        with jax.named_scope("project"):
            value = self._einsum("rnc,nvc->rnv", latent, self.value_up[...])
            return self.out(value.reshape(len(value), -1).astype(latent.dtype))

    def attend_in_prompt(
        self, stored: Array, layer: Array | int, start: Array, selected: Array, query_latent: Array
    ) -> Array:
        """A chunk of one prompt over the selected stored records, block by block: `[C, D]`.

        Args:
          stored: uint32 `[L, T, words]`, the chunk's own records included; T is a multiple of the chunk.
          layer: int32 scalar.
          start: int32 scalar, position of the chunk's first token, a multiple of the chunk.
          selected: bool `[C, T]`, what each query attends to, at least one token each.
          query_latent: `[C, Q]` of the chunk.
        """
        config, dtype = self.config, self.value_up[...].dtype
        chunk, heads = len(selected), config.heads
        query_nope, query_rope = self._queries(query_latent, start + jnp.arange(chunk, dtype=jnp.int32))

        def block(number: Array) -> tuple[Array, Callable[[Array], Array]]:
            at = number * chunk
            words = lax.dynamic_slice(stored, (layer, at, 0), (1, chunk, self.row.words))[0]
            shown = lax.dynamic_slice(selected, (0, at), (chunk, chunk))[None]
            latent, rope = jnp.split(read_rows(words, self.row).astype(dtype), [config.latent], axis=-1)
            key = self._einsum("kc,ndc->knd", latent, self.key_up[...]).astype(dtype)
            value = self._einsum("kc,nvc->knv", latent, self.value_up[...]).astype(dtype)
            logits = self._einsum("qnd,knd->nqk", query_nope, key)
            logits = (logits + self._einsum("qnd,kd->nqk", query_rope, rope)) * config.softmax_scale

            def values(weight: Array) -> Array:
                return self._einsum("nqk,knv->nqv", weight.astype(dtype), value)

            return jnp.where(shown, logits, -jnp.inf), values

        out = jnp.moveaxis(attend_in_blocks(start // chunk + 1, (heads, chunk), config.value, block), 0, 1)
        return self.out(out.reshape(chunk, -1).astype(dtype))

    def _queries(self, query_latent: Array, position: Array) -> tuple[Array, Array]:
        """Query latents `[T, Q]` to queries, `[T, N, nope]` and, rotated, `[T, N, rope]`."""
        with jax.named_scope("project"):
            query = self.query_up(query_latent).reshape(len(query_latent), self.config.heads, -1)
            nope, rope = jnp.split(query, [self.config.nope], axis=-1)
            return nope, self._rotate(rope, position)

    def _rotate(self, x: Array, position: Array) -> Array:
        return rotate(x, position, jnp.asarray(self.frequency, jnp.float32), self.config.rope_pairing, self.factor)

    @staticmethod
    def _einsum(equation: str, a: Array, b: Array) -> Array:
        """Added up in float32. XLA has no such product of batches of bfloat16 on the CPU: there they are widened."""

        def product(a: Array, b: Array) -> Array:
            return jnp.einsum(equation, a, b, precision=precision(b.dtype), preferred_element_type=jnp.float32)

        if b.dtype != jnp.bfloat16:
            return product(a, b)
        return lax.platform_dependent(
            a, b, cpu=lambda a, b: product(a.astype(jnp.float32), b.astype(jnp.float32)), default=product
        )
