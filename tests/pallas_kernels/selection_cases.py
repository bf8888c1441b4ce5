# SPDX-License-Identifier: Apache-2.0
"""Scores that a top-k gets wrong, and inputs of the index scores."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hisparse_jax.records import quantise_keys
from tests import oracles
from tests.helpers import int32


def _choice(*values: float):
    return lambda rng, shape: rng.choice(np.asarray(values, np.float32), shape)


def _one_digit(rng, shape):
    """All keys begin alike: the threshold is in the last digit."""
    return (np.float32(1) + rng.integers(0, 512, shape) * np.finfo(np.float32).eps).astype(np.float32)


def _zeros_between(rng, shape):
    """Many zeros of both signs among a few others, as of a relu and weights of both signs."""
    values = np.where(rng.random(shape) < 0.9, 0.0, rng.standard_normal(shape)).astype(np.float32)
    return np.copysign(values, rng.standard_normal(shape).astype(np.float32) * (values == 0) + values)


SCORES = {
    "normal": lambda rng, shape: rng.standard_normal(shape).astype(np.float32),
    "positive": lambda rng, shape: (5 + rng.random(shape)).astype(np.float32),
    "wide": lambda rng, shape: np.ldexp(rng.standard_normal(shape), rng.integers(-90, 90, shape)).astype(np.float32),
    "ties": lambda rng, shape: rng.integers(-2, 3, shape).astype(np.float32),
    "all equal": lambda rng, shape: np.full(shape, -3.5, np.float32),
    "one digit": _one_digit,
    "zeros": _zeros_between,
    "infinities": _choice(np.inf, -np.inf, 0.0, -0.0, 1.0, np.finfo(np.float32).max, -np.finfo(np.float32).max),
    "minus infinity": _choice(-np.inf),
    "infinity": _choice(np.inf),
    "ascending": lambda rng, shape: np.broadcast_to(np.arange(shape[1], dtype=np.float32), shape).copy(),
    "descending": lambda rng, shape: np.broadcast_to(-np.arange(shape[1], dtype=np.float32), shape).copy(),
}


def poison(scores: np.ndarray, length, newest: int = 0) -> np.ndarray:
    """What lies past the length may hold anything, and so may the newest, which are chosen whatever their scores."""
    out = scores.copy()
    for row, n in zip(out, length, strict=True):
        others = max(n - newest, 0)
        row[others:] = np.resize(np.asarray([np.nan, np.inf, -np.nan, 3e38], np.float32), len(row) - others)
    return out


def expected_topk(scores: np.ndarray, length, k: int, newest: int = 0) -> np.ndarray:
    return np.stack([oracles.top_k(row, n, k, newest) for row, n in zip(scores, length, strict=True)])


def dsa_inputs(kind: str, rows: int, heads: int, records: int):
    """Query, weight, keys and scales of two layers, values about 1."""
    rng = np.random.default_rng(records + heads)
    query = jnp.asarray(rng.standard_normal((rows, heads, 128)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((rows, heads)), jnp.float32)
    keys = jnp.asarray(rng.standard_normal((2, rows, records, 128), np.float32))
    if kind == "float8_e4m3fn":
        return query, weight, *quantise_keys(keys)
    return query, weight, keys.astype(kind), None


def quest_inputs(rows: int, groups: int, heads: int, pages: int):
    """Query, minima and maxima of two layers."""
    rng = np.random.default_rng(pages)
    query = jnp.asarray(rng.standard_normal((rows, groups, heads, 128)), jnp.bfloat16)
    low = jnp.asarray(rng.standard_normal((2, rows, pages, groups, 128)), jnp.bfloat16)
    return query, low, low + jnp.asarray(rng.random(low.shape), jnp.bfloat16)


class MsaCase(NamedTuple):
    """Arguments of `msa_scores` with NaN and infinities past the lengths, and what they should give in float64."""

    query: jax.Array
    keys: jax.Array
    length: np.ndarray
    block_tokens: int

    def run(self, function, **options) -> np.ndarray:
        options = {"block_tokens": self.block_tokens} | options
        run = jax.jit(functools.partial(function, **options))
        return np.asarray(run(self.query, self.keys, jnp.int32(1), int32(self.length)))

    def check(self, got: np.ndarray) -> None:
        """A float32 sum of 128 products rounds by at most 128 eps of its absolute terms, and so does a maximum."""
        (rows, heads, _), records = self.query.shape, self.keys.shape[2]
        blocks = -(-records // self.block_tokens)
        assert got.shape == (rows, heads, blocks) and got.dtype == np.float32
        query, keys = (np.asarray(x.astype(jnp.float32), np.float64) for x in (self.query, self.keys[1]))
        for r, b in np.ndindex(rows, blocks):
            own = keys[r, b * self.block_tokens : min((b + 1) * self.block_tokens, self.length[r])]
            if len(own):
                error = np.abs(got[r, :, b] - (query[r] @ own.T).max(1))
                terms = (np.abs(query[r]) @ np.abs(own).T).max(1)
                assert np.all(error <= 128 * np.finfo(np.float32).eps * terms), (r, b, error)
            else:
                assert np.all(got[r, :, b] == -np.inf), (r, b)


def msa_case(heads: int, records: int, length, *, block_tokens: int = 128, shift: float = 0.0) -> MsaCase:
    """Keys about `shift`, so that all products can be of one sign; the other layer is NaN."""
    rng = np.random.default_rng(records + heads)
    rows = len(length)
    query = rng.standard_normal((rows, heads, 128)) + shift
    keys = rng.standard_normal((2, rows, records, 128)) - shift
    poison = np.resize([np.nan, np.inf, -np.inf, 3e38], (records, 128))
    keys[0] = np.nan
    for row, n in zip(keys[1], length, strict=True):
        row[n:] = poison[n:]
    return MsaCase(jnp.asarray(query, jnp.bfloat16), jnp.asarray(keys, jnp.bfloat16), np.asarray(length), block_tokens)
