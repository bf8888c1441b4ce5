# SPDX-License-Identifier: Apache-2.0
"""A synthetic workload: scores of a random process with a stated locality, in place of an indexer's scores.

Random weights select without the locality of trained ones, so that a model whose weights are not to be had would miss
much more than it does. Here it runs as it is, its indexer included, and only the numbers that the top-k sees are
replaced. What is measured with them is a time, never a quality, and must be called synthetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

_FRACTION = 18  # bits of a score behind the point; all of it is integers, so that every program gets the same bits
_NOISE_FRACTION = 9  # bits of a noise's size behind the point
_LARGEST = 20.0  # octaves of all noises together: what 32 bits hold
_GOLDEN = 0x9E3779B9  # the golden section of 2^32


@jax.tree_util.register_static
@dataclass(frozen=True)
class Noise:
    """A part of every token's score that is drawn anew each `steps` steps, for each token at moments of its own.

    Attributes:
      octaves: standard deviation.
      steps: how long a value holds, at least 1.
    """

    octaves: float
    steps: float


@jax.tree_util.register_static
@dataclass(frozen=True)
class Locality:
    """How much a selection is like the one before. Scores are in octaves: one more, half as many tokens.

    Attributes:
      noises: what changes from step to step.
      recency_fall: octaves that recency loses with each doubling of the age; more than 0. It reaches back
        `length^(1 / recency_fall)` tokens.
      table_spread: tables differ: noises are up to this share larger or smaller, from 0 to 1.
      seed: another process of the same kind.
      first_table: added to the numbers of tables: what the first one is called in the whole model if only some of its
        layers are there.
    """

    noises: tuple[Noise, ...]
    recency_fall: float = 2.0
    table_spread: float = 0.4
    seed: int = 0
    first_table: int = 0

    def __post_init__(self) -> None:
        largest = sum(noise.octaves for noise in self.noises) * (1 + self.table_spread)
        if any(noise.octaves < 0 or noise.steps < 1 for noise in self.noises) or largest > _LARGEST:
            raise ValueError(f"noises need octaves >= 0, {_LARGEST} together, and steps >= 1, got {self.noises}")
        if not (0 < self.recency_fall <= 16 and 0 <= self.table_spread <= 1):
            raise ValueError(f"recency_fall must be in (0, 16] and table_spread in [0, 1], got {self}")
        if not (0 <= self.seed < 2**32 and 0 <= self.first_table < 2**31):
            raise ValueError(f"seed must be in [0, 2^32) and first_table in [0, 2^31), got {self}")


# Fitted to miss rates of a trace: `benchmarks/fit_workload.py`, docs/workload.md.
FITTED = Locality((Noise(0.76, 1.0), Noise(1.34, 6.56), Noise(0.98, 29.94)))


def synthetic_scores(
    scores: Array, length: Array, table: Array | int, locality: Locality = FITTED, *, clock: Array | None = None
) -> Array:
    """Scores with a given locality, in place of an indexer's.

    ```
    score(i, t)   = popularity(i) + sum_n noise_n(i, floor(t / steps_n + phase_n(i))) + recency(i, t)
    popularity(i) = -log2(u(i))                                          u uniform in (0, 1)
    recency(i, t) = max(0, log2(t) - recency_fall log2(t - i))
    ```

    for token i at length t. What is random is a hash of request, table, token and turn: the result depends on these and
    the length alone, has the same bits in every program and on every device, and nothing is kept. NaN stays NaN, so XLA
    has to compute the scores that are given.

    Args:
      scores: float32 `[R, S]`.
      length: int32 `[R]`, records including the newest one; what comes after it means nothing. S < 2^24.
      table: int32 scalar.
      locality: the process.
      clock: int32 `[R]`, the t of noises, one more each step; the length if not given. Records of several tokens need
        it: their number does not grow with every step.
    Returns:
      float32 `[R, S]`, multiples of 2^-18.
    """
    requests, records = scores.shape
    token = jnp.arange(records, dtype=jnp.int32)[None]
    row = jnp.arange(requests, dtype=jnp.uint32)[:, None]
    table = (jnp.asarray(table, jnp.int32) + jnp.int32(locality.first_table)).astype(jnp.uint32)
    time = (length if clock is None else clock)[:, None]
    length = length[:, None]
    stream = _mix(_mix(_mix(jnp.uint32(locality.seed)) + table) + row)
    drawn = _mix(stream + token.astype(jnp.uint32))

    popularity = 24 * 2**_FRACTION - _log2((drawn >> jnp.uint32(8) | jnp.uint32(1)).astype(jnp.int32))

    fall = (_log2(length - token) >> jnp.int32(8)) * jnp.int32(round(2**8 * locality.recency_fall))
    recency = jnp.maximum(_log2(length) - fall, 0)

    # Multiples of the golden section lie evenly between -2^15 and 2^15, however many tables there are.
    place = (table * jnp.uint32(_GOLDEN)).astype(jnp.int32) >> jnp.int32(16)
    noise = jnp.int32(0)
    for number, part in enumerate(locality.noises):
        turn = time.astype(jnp.uint32)
        if part.steps > 1:  # the lower 16 bits are the part of a turn that has gone by
            phase = drawn << jnp.uint32(number)
            turn = turn * jnp.uint32(round(2**16 / part.steps)) + phase >> jnp.uint32(16)
        bits = drawn + turn * jnp.uint32((2 * number + 1) * _GOLDEN % 2**32)
        bits = (bits ^ (bits >> jnp.uint32(15))) * jnp.uint32(0x2C1B3C6D)
        value = (bits >> jnp.uint32(16)).astype(jnp.int32) - (bits & jnp.uint32(0xFFFF)).astype(jnp.int32)
        size = part.octaves * 6**0.5 * 2**_NOISE_FRACTION  # such a difference has a deviation of 2^16 / sqrt(6)
        noise += value * (round(size) + (round(size * locality.table_spread) * place >> jnp.int32(15)))

    total = popularity + recency + (noise >> jnp.int32(16 + _NOISE_FRACTION - _FRACTION))
    return jnp.where(jnp.isnan(scores), scores, total.astype(jnp.float32) * jnp.float32(2.0**-_FRACTION))


def _log2(value: Array) -> Array:
    """The logarithm to base 2 of integers from 1 to 2^24 in fixed point, linear between powers of two.

    It is the exponent and the mantissa of a float32, read as one number.
    """
    bits = lax.bitcast_convert_type(value.astype(jnp.float32), jnp.int32)
    return (bits >> jnp.int32(23 - _FRACTION)) - jnp.int32(127 << _FRACTION)


def _mix(bits: Array) -> Array:
    """A hash of 32 bits, every one of which depends on every bit that goes in."""
    bits = (bits ^ (bits >> jnp.uint32(16))) * jnp.uint32(0x21F0AAAD)
    bits = (bits ^ (bits >> jnp.uint32(15))) * jnp.uint32(0x735A2D97)
    return bits ^ (bits >> jnp.uint32(15))
