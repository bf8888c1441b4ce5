# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer of DeepSeek Sparse Attention, usable inside any Flax model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from models.dsa_config import DsaConfig
from models.layers import linear, precision, rotate

_KEY_NORM_EPS = 1e-6  # whatever the config says of other norms


class LayerNorm(nnx.Module):
    """Layer norm over the last axis with weight and bias, computed in float32."""

    def __init__(self, width: int, eps: float, *, dtype: DTypeLike) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(width, dtype))
        self.bias = nnx.Param(jnp.zeros(width, dtype))

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        out = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        scale, bias = (jnp.broadcast_to(p[...].astype(jnp.float32), x.shape) for p in (self.scale, self.bias))
        return (out * scale + bias).astype(x.dtype)


class Indexer(nnx.Module):
    """Projections of the indexer (DeepSeek-V3.2 report, section 2.1). Its queries come from the query latent.

    Args:
      config: shapes.
      frequency: rotary frequencies, float32 `[rope / 2]`.
      factor: multiplies sine and cosine.
      dtype: type of parameters and arithmetic.
      rngs: for the initial parameters.
    """

    def __init__(
        self, config: DsaConfig, frequency: tuple[float, ...], factor: float, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.config, self.frequency, self.factor = config, frequency, factor
        self.query = linear(config.query_latent, config.index_heads * config.index_dim, dtype=dtype, rngs=rngs)
        self.key = linear(config.hidden, config.index_dim, dtype=dtype, rngs=rngs)
        self.key_norm = LayerNorm(config.index_dim, _KEY_NORM_EPS, dtype=dtype)
        self.weight = linear(config.hidden, config.index_heads, dtype=dtype, rngs=rngs)

    @property
    def scale(self) -> float:
        """Factor of the products of query and key."""
        return self.config.index_dim**-0.5

    def __call__(self, x: Array, query_latent: Array, position: Array) -> tuple[Array, Array, Array]:
        """Normed `[T, D]` and query latents `[T, Q]` to queries `[T, N, D]`, weights `[T, N]` and keys `[T, D]`.

        Weights are float32 and may be negative.
        """
        config = self.config
        with jax.named_scope("index_project"):
            query = self.query(query_latent).reshape(len(x), config.index_heads, config.index_dim)
            query, key = self._rotate(query, position), self._rotate(self.key_norm(self.key(x)), position)
            weight = jnp.matmul(
                x, self.weight.kernel[...], precision=precision(x.dtype), preferred_element_type=jnp.float32
            )
        return query, weight * config.index_heads**-0.5, key

    def _rotate(self, x: Array, position: Array) -> Array:
        """Rotates the first channels, as many as the main attention rotates."""
        width, frequency = self.config.rope, jnp.asarray(self.frequency, jnp.float32)
        turned = rotate(x[..., :width], position, frequency, self.config.index_pairing, self.factor)
        return jnp.concatenate([turned, x[..., width:]], axis=-1)
