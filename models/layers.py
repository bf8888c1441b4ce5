# SPDX-License-Identifier: Apache-2.0
"""Pieces that families share: norms, rotary embedding, projections, MLP, attention of a prefill chunk."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from models.config import RopePairing


def precision(dtype: DTypeLike) -> lax.Precision | None:
    """float32 means float32 on every backend; narrower types take the backend's default."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def rms(x: Array, weight: Array, eps: float) -> Array:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, computed in float32, in the type of `x`."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32).reshape(*(1,) * (x.ndim - 1), -1)
    return (wide * scale * weight).astype(x.dtype)


def rope(x: Array, position: Array, *, theta: float, pairing: RopePairing) -> Array:
    """Rotates all channels of `x` by their position.

    Args:
      x: `[T, ..., C]`.
      position: int32 `[T]`.
      theta: base; channel pair j turns by `position * theta^(-2j/C)`.
      pairing: "pairs" rotates channels (2j, 2j + 1) together, "halves" (j, j + C/2).
    """
    channels = x.shape[-1]
    return rotate(x, position, theta ** (-jnp.arange(0, channels, 2, dtype=jnp.float32) / channels), pairing)


def rotate(x: Array, position: Array, frequency: Array, pairing: RopePairing, factor: float = 1.0) -> Array:
    """Rotates channel pair j of `x`, `[T, ..., C]`, by `position * frequency[j]` and multiplies it by `factor`."""
    angle = position.astype(jnp.float32)[:, None] * frequency[None]
    angle = angle.reshape(angle.shape[0], *(1,) * (x.ndim - 2), -1)
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    wide = x.astype(jnp.float32)
    if pairing == "pairs":
        a, b = wide[..., ::2], wide[..., 1::2]
    else:
        a, b = jnp.split(wide, 2, axis=-1)
    turned = a * cos - b * sin, b * cos + a * sin
    out = jnp.stack(turned, axis=-1).reshape(x.shape) if pairing == "pairs" else jnp.concatenate(turned, axis=-1)
    return out.astype(x.dtype)


def linear(inputs: int, outputs: int, *, bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Linear:
    """A projection whose parameters and arithmetic are of one type."""
    return nnx.Linear(
        inputs, outputs, use_bias=bias, dtype=dtype, param_dtype=dtype, precision=precision(dtype), rngs=rngs
    )


class RMSNorm(nnx.Module):
    """RMS norm over the last axis with a weight."""

    def __init__(self, width: int, eps: float, *, dtype: DTypeLike) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(width, dtype))

    def __call__(self, x: Array) -> Array:
        return rms(x, self.scale[...], self.eps)


class MLP(nnx.Module):
    """`(silu(x G) * (x U)) D`."""

    def __init__(self, hidden: int, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.gate = linear(hidden, width, dtype=dtype, rngs=rngs)
        self.up = linear(hidden, width, dtype=dtype, rngs=rngs)
        self.down = linear(width, hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def chunk_attention(query: Array, stored: Array, layer: Array, start: Array, *, scale: float) -> Array:
    """Causal attention of a chunk of one prompt over the history and itself, block by block.

    Args:
      query: `[C, G, heads, channels]`, at positions `start..start + C - 1`.
      stored: `[L, T, 2, G, channels]`, keys and values of all layers; T is a multiple of C, and so is `start`.
      layer: int32 scalar.
      start: int32 scalar.
      scale: factor of the logits.
    Returns:
      float32 `[C, G, heads, channels]`.
    """
    chunk, groups, heads, channels = query.shape
    position = jnp.arange(chunk)
    compute = {"preferred_element_type": jnp.float32, "precision": precision(query.dtype)}

    def block(number: Array) -> tuple[Array, Callable[[Array], Array]]:
        at = (layer, number * chunk, 0, 0, 0)
        kv = lax.dynamic_slice(stored, at, (1, chunk, 2, groups, channels))[0]
        logits = jnp.einsum("qghc,kgc->ghqk", query, kv[:, 0], **compute) * scale
        seen = number * chunk + position[None] <= (start + position)[:, None]

        def values(weight: Array) -> Array:
            return jnp.einsum("ghqk,kgc->ghqc", weight.astype(query.dtype), kv[:, 1], **compute)

        return jnp.where(seen[None, None], logits, -jnp.inf), values

    return jnp.moveaxis(attend_in_blocks(start // chunk + 1, (groups, heads, chunk), channels, block), 2, 0)


def attend_in_blocks(
    blocks: Array, queries: tuple[int, ...], width: int,
    block: Callable[[Array], tuple[Array, Callable[[Array], Array]]],
) -> Array:  # fmt: skip
    """Softmax attention over blocks of keys, one block in memory at a time.

    Args:
      blocks: int32 scalar, how many.
      queries: shape of the queries; each attends to at least one key of some block.
      width: channels of a value.
      block: from a block's number to its logits, float32 `[*queries, keys]` with -inf where a key is hidden, and a
        function from weights `[*queries, keys]` to sums of values, float32 `[*queries, width]`.
    Returns:
      float32 `[*queries, width]`.
    """

    def one(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        logits, values = block(number)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
        finite = jnp.where(jnp.isfinite(new_top), new_top, 0)  # a query may see nothing of the blocks so far
        weight, shrink = jnp.exp(logits - finite[..., None]), jnp.exp(top - finite)
        total = total * shrink + jnp.sum(weight, axis=-1)
        return new_top, total, out * shrink[..., None] + values(weight)

    state = jnp.full(queries, -jnp.inf), jnp.zeros(queries), jnp.zeros((*queries, width))
    with jax.named_scope("prefill_attention"):
        _, total, out = lax.fori_loop(0, blocks, one, state)
    return out / total[..., None]
