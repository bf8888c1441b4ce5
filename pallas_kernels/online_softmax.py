# SPDX-License-Identifier: Apache-2.0
"""Softmax attention tile by tile on the tensor cores, and the merge of its parts: shared by the attention kernels.

A warpgroup holds 64 rows (heads) of the output in registers. Logits are kept in units of log2, and the running maximum
starts at a finite number, so that nothing is NaN where nothing has been attended yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.indexed import interpreting

HEADS = 64  # rows of a wgmma tile
TOKENS = 64  # records (or tokens) of a tile
PROCESSORS = 132  # of an H100 or H200; a constant, so that the order of sums depends on shapes alone
MAX_PARTS = 32  # that are merged
# exp2, log2 and reciprocal of the hardware (2 ulp); no sum needs shared memory, which the tiles take all of.
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0)
_NOTHING = -1e30  # maximum before anything is attended, in units of log2
_ROW, _COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
_LOG2_E = math.log2(math.e)


def needs_hopper() -> str | None:
    """Why the device of this process has no `wgmma`, or None; kernels may be lowered for any GPU that a mesh names."""
    device = jax.devices()[0]
    if jax.sharding.get_abstract_mesh().abstract_device is not None or device.platform not in ("gpu", "cuda"):
        return None
    capability = str(getattr(device, "compute_capability", "9.0"))
    if capability.startswith("9."):
        return None
    return f"it is written for compute capability 9, {device.device_kind} has {capability}"


class Split(NamedTuple):
    """How K tiles are shared out: each of `parts` programs takes `tiles` of them, the last ones past the end."""

    parts: int
    tiles: int


def split(programs: int, tokens: int) -> Split:
    """Parts that so many programs are split into, by shape only: those that take the fewest tiles' time.

    Programs run in waves of `PROCESSORS`. A wave takes the tiles of a part, at least two where there are as many, and
    about two more for its first rows and its results; merging takes about two once.

    Args:
      programs: there would be without splitting.
      tokens: keys that each of them attends to.
    """
    tiles = max(1, -(-tokens // TOKENS))

    def of(parts: int) -> Split:
        each = -(-tiles // parts)
        return Split(-(-tiles // each), each)

    def cost(how: Split) -> int:
        return -(-programs * how.parts // PROCESSORS) * (how.tiles + 2) + 2 * (how.parts > 1)

    return min((of(parts) for parts in range(1, max(1, min(tiles // 2, MAX_PARTS)) + 1)), key=cost)


class Softmax(NamedTuple):
    """Sum of values weighted by `exp2(logit - top)`, `[64, C]`; largest logit so far and sum of weights, `[64]`."""

    out: Array
    top: Array
    total: Array


def start(columns: int) -> Softmax:
    """Nothing attended yet."""
    out = plgpu.layout_cast(jnp.zeros((HEADS, columns), jnp.float32), plgpu.Layout.WGMMA)
    top = plgpu.layout_cast(jnp.full((HEADS,), _NOTHING, jnp.float32), _ROW)
    return Softmax(out, top, plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), _ROW))


def with_sink(state: Softmax, logit: Array, here: Array) -> Softmax:
    """`state`, where nothing has been attended yet, with a key that has no value, of logits `[64]`; only if `here`."""
    logit = logit + jnp.where(here, jnp.float32(0), -jnp.inf)
    top, total = jnp.maximum(logit * _LOG2_E, _NOTHING), jnp.where(logit > -jnp.inf, 1.0, 0.0)
    return Softmax(state.out, top, total)


def per_token(ref: Any) -> Array:
    """`[64]` of SMEM, one for each column of the logits."""
    return plgpu.load(ref, layout=_COLUMN, optimized=False)


def per_head(ref: Any) -> Array:
    """`[64]` of SMEM or GMEM, one for each row of the logits."""
    return plgpu.load(ref, layout=_ROW, optimized=False)


def weigh(
    top: Array, total: Array, query: Any, key: Any, shown: Callable[[], Array], scale: float
) -> tuple[Array, Array, Array, Array]:
    """Weights of a tile's tokens.

    Args:
      top, total: as in `Softmax`, so far.
      query: bf16 `[64, D]` and key: bf16 `[64, D]` in SMEM.
      shown: gives bool `[64, 64]`, which head may see which token.
      scale: factor of the logits.
    Returns:
      bf16 weights `[64, 64]`, what the sums so far are to be multiplied by `[64]`, and the new `top` and `total`.
    """

    def logits(acc: Any) -> Array:
        plgpu.wgmma(acc, query, key.transpose((1, 0)))
        return acc[...]

    products = pl.run_scoped(logits, plgpu.ACC((HEADS, TOKENS), jnp.float32))
    products = jnp.where(shown(), products * (scale * _LOG2_E), -jnp.inf)
    new_top = jnp.maximum(top, products.max(axis=1))
    shrink = jnp.exp2(top - new_top)
    weight = jnp.exp2(products - lax.broadcast_in_dim(new_top, products.shape, [0]))
    return weight.astype(jnp.bfloat16), shrink, new_top, total * shrink + weight.sum(axis=1)


def add(out: Array, shrink: Array, weight: Any, value: Any) -> Array:
    """`out * shrink + weight @ value`, the sum in place in the tensor cores' registers.

    Args:
      weight: bf16 `[64, 64]` in registers or SMEM; value: bf16 `[64, C]` in SMEM.
    """
    out = out * lax.broadcast_in_dim(shrink, out.shape, [0])
    if interpreting():  # has no run_state
        return out + jnp.dot(weight[...].astype(jnp.float32), value[...].astype(jnp.float32))
    multiply: Any = pl.run_state(lambda acc: plgpu.wgmma(acc, weight, value))
    return multiply(plgpu.ACC.init(out))


def step(state: Softmax, query: Any, key: Any, value: Any, shown: Callable[[], Array], scale: float) -> Softmax:
    """Attends to a tile; see `weigh` and `add`."""
    weight, shrink, top, total = weigh(state.top, state.total, query, key, shown, scale)
    return Softmax(add(state.out, shrink, weight, value), top, total)


def mean(out: Array, total: Array) -> Array:
    """Mean of the values `[64, C]`, 0 where nothing was attended."""
    return out * lax.broadcast_in_dim(1.0 / jnp.where(total > 0, total, 1.0), out.shape, [0])


def log_sum_exp(top: Array, total: Array) -> Array:
    """Natural logarithm of the sum of exponentials `[64]`, -inf where nothing was attended."""
    some = total > 0
    return jnp.where(some, top * math.log(2) + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)


def merge(outs: Array, sums: Array, dtype: DTypeLike = jnp.float32) -> tuple[Array, Array]:
    """Means and log-sum-exps of parts, float32 `[parts, ..., C]` and `[parts, ...]`, as those of the whole.

    Parts are added in their order, so the result is the same to the last bit whatever program this is compiled into.
    The mean is rounded to `dtype` inside the barrier: outside, that would be a kernel of its own.
    """
    parts = sums.shape[0]
    if parts == 1:
        return outs[0].astype(dtype), sums[0]
    outs, sums = lax.optimization_barrier((outs, sums))
    top = jnp.max(sums, axis=0)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(sums - top[None])
    total, out = weights[0], weights[0, ..., None] * outs[0]
    for i in range(1, parts):
        total, out = total + weights[i], out + weights[i, ..., None] * outs[i]
    out = (out / jnp.where(total > 0, total, 1)[..., None]).astype(dtype)
    return lax.optimization_barrier((out, jnp.log(total) + top))
