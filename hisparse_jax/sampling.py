# SPDX-License-Identifier: Apache-2.0
"""Sampling: logits to the next token, with settings and a seed of each request's own.

A token depends on its request's logits, settings, seed and position alone, so it is the same in every residency and
whatever the neighbours in the batch do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from hisparse_jax.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens.

    Attributes:
      temperature: 0 takes the most likely token; otherwise logits are divided by it.
      top_k: only this many of the most likely tokens are drawn from; 0 for all.
      top_p: only the most likely of those, as few as have this much of their probability together.
      seed: the same seed draws the same tokens.
      repetition_penalty: logits of tokens that the prompt or the output has already are divided by it where positive,
        multiplied where negative (CTRL, arXiv:1909.05858, section 4.1).
      banned: ids that are never chosen.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    banned: tuple[int, ...] = ()

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn; else the most likely one is taken."""
        return self.temperature > 0

    def check(self, vocab: int) -> None:
        """Raises UserError for a value that makes no sense."""
        limits = (
            ("temperature", self.temperature, self.temperature >= 0, "0 or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("top_k", self.top_k, 0 <= self.top_k < 2**31, "0 or more and less than 2^31"),
            ("seed", self.seed, 0 <= self.seed < 2**32, "between 0 and 2^32 - 1"),
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "more than 0"),
        )
        for name, value, fits, expected in limits:
            if not fits:
                raise UserError(f"{name} must be {expected}, got {value}")
        wrong = [token for token in self.banned if not 0 <= token < vocab]
        if wrong:
            raise UserError(f"banned has token ids out of range 0..{vocab - 1}: {wrong[:5]}")
        if len(set(self.banned)) >= vocab:
            raise UserError("banned leaves no token to choose")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """Sampling settings of all request slots.

    Attributes:
      temperature, top_p, repetition_penalty: float32 `[R]`.
      top_k: int32 `[R]`.
      seed: uint32 `[R]`.
      seen: bool `[R, V]`, tokens of each request's prompt and output.
      banned: bool `[R, V]`.
    """

    temperature: Array
    top_p: Array
    top_k: Array
    seed: Array
    repetition_penalty: Array
    seen: Array
    banned: Array


def greedy(requests: int, vocab: int) -> Sampling:
    """Settings under which every request takes its most likely token."""
    return Sampling(
        temperature=jnp.zeros(requests, jnp.float32),
        top_p=jnp.ones(requests, jnp.float32),
        top_k=jnp.zeros(requests, jnp.int32),
        seed=jnp.zeros(requests, jnp.uint32),
        repetition_penalty=jnp.ones(requests, jnp.float32),
        seen=jnp.zeros((requests, vocab), jnp.bool_),
        banned=jnp.zeros((requests, vocab), jnp.bool_),
    )


def with_request(sampling: Sampling, slot: Array | int, params: SamplingParams, prompt: Sequence[int]) -> Sampling:
    """The settings with those of one request slot replaced."""
    vocab = sampling.seen.shape[1]

    def mask(ids: Sequence[int]) -> np.ndarray:
        marked = np.zeros(vocab, np.bool_)
        marked[list(ids)] = True
        return marked

    return Sampling(
        temperature=sampling.temperature.at[slot].set(params.temperature),
        top_p=sampling.top_p.at[slot].set(params.top_p),
        top_k=sampling.top_k.at[slot].set(params.top_k),
        seed=sampling.seed.at[slot].set(jnp.uint32(params.seed)),
        repetition_penalty=sampling.repetition_penalty.at[slot].set(params.repetition_penalty),
        seen=sampling.seen.at[slot].set(mask(prompt)),
        banned=sampling.banned.at[slot].set(mask(params.banned)),
    )


def sample(
    logits: Array, sampling: Sampling, position: Array, active: Array, *, draws: bool = True
) -> tuple[Array, Sampling]:
    """The next token of each request.

    Args:
      logits: float32 `[R, V]`.
      sampling: settings.
      position: int32 `[R]`, position of the token that is chosen.
      active: bool `[R]`; only these are marked as having seen their token.
      draws: whether an active request may have a temperature above 0. If not, temperatures are not looked at and
        nothing is sorted, which costs more than a small model's step. A condition in the program, instead of this one
        outside, would have the host look at it in every step.
    Returns:
      int32 `[R]`, and the settings with the token seen.
    """
    logits = lax.optimization_barrier(logits)  # what comes before is the same program, whoever draws
    penalty = sampling.repetition_penalty[:, None]
    penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(sampling.seen, penalised, logits)
    logits = jnp.where(sampling.banned, -jnp.inf, logits)
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if draws:
        token = jnp.where(sampling.temperature > 0, _draw(logits, sampling, position), token)
    rows = jnp.arange(len(token))
    seen = sampling.seen.at[rows, token].max(active)
    return token, Sampling(**{**vars(sampling), "seen": seen})


def _draw(logits: Array, sampling: Sampling, position: Array) -> Array:
    settings = sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed
    return jax.vmap(_draw_one)(logits, *settings, position)


def _draw_one(logits: Array, temperature: Array, top_p: Array, top_k: Array, seed: Array, position: Array) -> Array:
    vocab = logits.shape[0]
    scaled = logits / jnp.where(temperature > 0, temperature, 1)
    order = jnp.argsort(-scaled, stable=True)  # equal logits: the lower id first
    kept = jnp.where(jnp.arange(vocab) < jnp.where(top_k > 0, top_k, vocab), scaled[order], -jnp.inf)
    probability = jax.nn.softmax(kept)
    before = jnp.cumsum(probability) - probability
    key = jax.random.fold_in(jax.random.key(seed), position)
    chosen = jax.random.categorical(key, jnp.where(before < top_p, kept, -jnp.inf))
    return order[chosen].astype(jnp.int32)
