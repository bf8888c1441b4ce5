# SPDX-License-Identifier: Apache-2.0
"""A synthetic workload: scores of a random process with a stated locality, in place of an indexer's scores.

Random weights select without any locality, so a model whose weights are not to be had would miss far more than it
does. Here the model runs as it is, its indexer included, and only the numbers that the top-k sees are replaced. What
is measured with them is a time, never a quality, and has to be called synthetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

_FRACTION = 18  # bits of a score behind the point; everything is an integer, so that every program gets the same bits
_TURN = 16  # bits of a turn: a noise is drawn anew once a turn


@jax.tree_util.register_static
@dataclass(frozen=True)
class Noise:
    """A part of the score that is drawn anew for each token every so many steps, at moments of the token's own.

    Attributes:
      octaves: standard deviation.
      steps: how long a value holds, at least 1.
    """

    octaves: float
    steps: float


@jax.tree_util.register_static
@dataclass(frozen=True)
class Locality:
    """How much a selection is like the one before; octaves are the unit of scores, see `synthetic_scores`.

    Attributes:
      noises: parts that change.
      recency_octaves: what the newest token has on top; it falls by the same amount with each doubling of the age.
      recency_tokens: from this age on there is nothing on top.
      table_spread: tables differ: their noises are this share larger or smaller at most.
      seed: another process of the same kind.
    """

    noises: tuple[Noise, ...]
    recency_octaves: float
    recency_tokens: int
    table_spread: float
    seed: int = 0


FITTED = Locality(
    noises=(Noise(0.80, 1.0), Noise(1.36, 7.4), Noise(0.47, 39.0)),
    recency_octaves=6.0,
    recency_tokens=1024,
    table_spread=0.5,
)


def synthetic_scores(scores: Array, length: Array, table: Array | int, locality: Locality = FITTED) -> Array:
    """Scores with the locality that is asked for, in place of an indexer's.

    ```
    score(i, t) = popularity(i) + sum_n noise_n(i, turn_n(i, t)) + recency(t - i)
    turn_n(i, t) = floor(t / steps_n + phase(i))
    ```

    for token i at length t. Popularity is exponential: one octave more, half as many tokens. Everything is drawn by
    hashing request, table, token and turn, so the result depends on these and the length alone, not on what else runs,
    and its bits are the same on every device. NaN stays NaN: XLA has to compute the scores that are given.

    Args:
      scores: float32 `[R, S]`.
      length: int32 `[R]`, records including the newest one; what comes after it means nothing.
      table: int32 scalar.
      locality: parameters of the process.
    Returns:
      float32 `[R, S]`, multiples of 2^-18.
    """
    requests, records = scores.shape
    token = jnp.arange(records, dtype=jnp.uint32)[None]
    step = length.astype(jnp.uint32)[:, None]
    table = jnp.asarray(table, jnp.int32).astype(jnp.uint32)
    row = jnp.arange(requests, dtype=jnp.uint32)[:, None]
    stream = _mix(_mix(_mix(jnp.uint32(locality.seed)) + table) + row)
    drawn = _mix(token + stream)

    # The exponent and the mantissa of a uniform number, read as one fixed-point number, are its logarithm.
    total = (127 + 24 << _FRACTION) - _log2(lax.shift_right_logical(drawn, jnp.uint32(8)) | jnp.uint32(1))
    place = (table * jnp.uint32(0x9E3779B9)) >> jnp.uint32(_TURN)  # spread evenly over any number of tables
    away = place.astype(jnp.int32) - jnp.int32(1 << 15)
    noise = jnp.int32(0)
    for number, part in enumerate(locality.noises):
        # A difference of two uniform numbers of 16 bits has a deviation of 2^16 / sqrt(6).
        size = part.octaves * 6**0.5 * 2**9
        scale = jnp.int32(round(size)) + ((jnp.int32(round(size * locality.table_spread)) * away) >> jnp.int32(15))
        rate, phase = round((1 << _TURN) / part.steps), drawn << jnp.uint32(number)
        turn = (step * jnp.uint32(rate) + (phase & jnp.uint32(0xFFFF))) >> jnp.uint32(_TURN)
        bits = _scramble(drawn + (turn + jnp.uint32(number << _TURN)) * jnp.uint32(0x9E3779B9))
        high, low = bits >> jnp.uint32(16), bits & jnp.uint32(0xFFFF)
        noise += scale * (high.astype(jnp.int32) - low.astype(jnp.int32))
    total += noise >> jnp.int32(_TURN + 9 - _FRACTION)

    age = jnp.maximum(length[:, None] - token.astype(jnp.int32), 1)
    far = (127 << _FRACTION) + _fixed(_log2_of(locality.recency_tokens))
    slope = round(256 * locality.recency_octaves / _log2_of(locality.recency_tokens))
    total += (jnp.maximum(far - _log2(age), 0) >> jnp.int32(8)) * jnp.int32(slope)
    return jnp.where(jnp.isnan(scores), scores, total.astype(jnp.float32) * jnp.float32(2.0**-_FRACTION))


def _log2(value: Array) -> Array:
    """127 more than the logarithm to base 2 of integers from 1 to 2^24, in fixed point; linear between powers."""
    bits = lax.bitcast_convert_type(value.astype(jnp.float32), jnp.int32)
    return bits >> jnp.int32(23 - _FRACTION)


def _log2_of(value: int) -> float:
    exponent = value.bit_length() - 1
    return exponent + value / 2**exponent - 1


def _fixed(value: float) -> int:
    return round(value * 2**_FRACTION)


def _scramble(bits: Array) -> Array:
    bits = bits ^ (bits >> jnp.uint32(15))
    return bits * jnp.uint32(0x2C1B3C6D)


def _mix(bits: Array) -> Array:
    """A hash of 32 bits: each bit of the result depends on all of them."""
    bits = bits ^ (bits >> jnp.uint32(16))
    bits = bits * jnp.uint32(0x21F0AAAD)
    bits = bits ^ (bits >> jnp.uint32(15))
    bits = bits * jnp.uint32(0x735A2D97)
    return bits ^ (bits >> jnp.uint32(15))
