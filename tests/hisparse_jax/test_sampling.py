# SPDX-License-Identifier: Apache-2.0
"""Sampling: what may be drawn, how often, and that nothing but a request's own settings matters."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hisparse_jax.errors import UserError
from hisparse_jax.sampling import SamplingParams, greedy, sample, with_request

VOCAB = 12
LOGITS = jnp.asarray(np.random.default_rng(3).normal(0, 2, (1, VOCAB)), jnp.float32)
sample_ = jax.jit(sample, static_argnames="draws")


def settings(requests: int, *params: SamplingParams, prompt: tuple[int, ...] = ()):
    sampling = greedy(requests, VOCAB)
    for slot, one in enumerate(params):
        sampling = with_request(sampling, slot, one, prompt)
    return sampling


def draws(params: SamplingParams, count: int, logits: jax.Array = LOGITS, prompt: tuple[int, ...] = ()) -> np.ndarray:
    """Tokens at positions 0..count - 1."""
    one = settings(1, params, prompt=prompt)
    at = jax.vmap(lambda position: sample(logits, one, position[None], jnp.array([True]))[0][0])
    return np.asarray(jax.jit(at)(jnp.arange(count)))


def probabilities(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    weight = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    return weight / weight.sum()


def test_zero_temperature_takes_the_most_likely_token_and_the_lower_of_two_equal_ones() -> None:
    logits = jnp.array([[1.0, 3.0, 3.0, -1.0] + [0.0] * 8])
    token, _ = sample_(logits, settings(1, SamplingParams()), jnp.zeros(1, jnp.int32), jnp.array([True]))
    assert token.tolist() == [1]


def test_without_draws_the_most_likely_tokens_are_chosen_alike_and_nothing_is_sorted() -> None:
    logits = jnp.asarray(np.random.default_rng(5).normal(0, 2, (3, VOCAB)), jnp.float32)
    sampling = settings(3, SamplingParams(), SamplingParams(repetition_penalty=2.0), SamplingParams(banned=(0, 1, 2)))
    args = logits, sampling, jnp.arange(3), jnp.array([True, True, False])
    for one, other in zip(jax.tree.leaves(sample_(*args)), jax.tree.leaves(sample_(*args, draws=False)), strict=True):
        np.testing.assert_array_equal(one, other)
    greedy_only, drawing = (str(jax.make_jaxpr(partial(sample, draws=draws))(*args)) for draws in (False, True))
    assert "sort[" in drawing and "sort[" not in greedy_only
    assert not any(name in text for name in ("cond[", "while[") for text in (greedy_only, drawing)), "the host decides"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    count = 20000
    got = np.bincount(draws(SamplingParams(temperature=temperature), count), minlength=VOCAB) / count
    want = probabilities(np.asarray(LOGITS[0]), temperature)
    # Five standard deviations of a binomial count, for each of 12 tokens.
    assert (np.abs(got - want) < 5 * np.sqrt(want * (1 - want) / count) + 1e-4).all()


@pytest.mark.parametrize("top_k", [1, 3, VOCAB, 100])
def test_top_k(top_k: int) -> None:
    best = np.argsort(-np.asarray(LOGITS[0]))[:top_k]
    assert set(draws(SamplingParams(temperature=5.0, top_k=top_k), 3000)) == set(best)


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 1.0])
def test_top_p_keeps_the_fewest_tokens_that_have_it_together(top_p: float) -> None:
    order = np.argsort(-np.asarray(LOGITS[0]))
    total = np.cumsum(probabilities(np.asarray(LOGITS[0]))[order])
    kept = order[: min(int(np.searchsorted(total, top_p)) + 1, VOCAB)]
    seen = set(draws(SamplingParams(temperature=1.0, top_p=top_p), 20000))
    assert seen <= set(kept)
    likely = {t for t in kept if probabilities(np.asarray(LOGITS[0]))[t] > 2e-3}
    assert likely <= seen


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    order = np.argsort(-np.asarray(LOGITS[0]))
    share = np.cumsum(probabilities(np.asarray(LOGITS[0])[order[:4]]))
    top_p = float(share[1] + share[2]) / 2  # three of the four; of all twelve it would be more
    assert set(draws(SamplingParams(temperature=1.0, top_k=4, top_p=top_p), 20000)) == set(order[:3])


def test_banned_tokens_are_never_chosen_and_banning_the_best_gives_the_second() -> None:
    order = np.argsort(-np.asarray(LOGITS[0])).tolist()
    assert set(draws(SamplingParams(banned=(order[0],)), 5)) == {order[1]}
    assert not set(draws(SamplingParams(temperature=3.0, banned=tuple(order[:6])), 3000)) & set(order[:6])


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens() -> None:
    logits = jnp.array([[2.0, 1.5, -1.0, -1.1] + [-9.0] * 8])
    assert set(draws(SamplingParams(repetition_penalty=2.0), 3, logits, prompt=(0,))) == {1}
    assert set(draws(SamplingParams(repetition_penalty=2.0), 3, logits, prompt=(0, 1))) == {0}
    assert set(draws(SamplingParams(repetition_penalty=2.0, banned=(0, 1)), 3, logits, prompt=(2,))) == {3}


def test_an_emitted_token_counts_as_seen_if_its_request_takes_part() -> None:
    sampling = settings(2, SamplingParams(repetition_penalty=4.0), SamplingParams(repetition_penalty=4.0))
    logits = jnp.tile(jnp.array([[2.0, 1.5] + [-9.0] * 10]), (2, 1))
    active = jnp.array([True, False])
    first, sampling = sample_(logits, sampling, jnp.zeros(2, jnp.int32), active)
    second, _ = sample_(logits, sampling, jnp.ones(2, jnp.int32), active)
    assert first.tolist() == [0, 0]
    assert second.tolist() == [1, 0]


def test_a_token_depends_on_its_own_row_seed_and_position_alone() -> None:
    rng = np.random.default_rng(0)
    mine = SamplingParams(temperature=1.3, top_p=0.9, seed=7)
    alone = draws(mine, 50)
    sampling = settings(3, SamplingParams(temperature=2.0, seed=7), mine, SamplingParams())
    for position in range(50):
        logits = jnp.asarray(rng.normal(0, 2, (3, VOCAB)), jnp.float32).at[1].set(LOGITS[0])
        others = jnp.array([position + 3, position, 0], jnp.int32)
        token, _ = sample_(logits, sampling, others, jnp.array([True, True, bool(position % 2)]))
        assert token[1] == alone[position]
    assert (draws(mine, 50) == alone).all()
    assert (draws(SamplingParams(temperature=1.3, top_p=0.9, seed=8), 50) != alone).any()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"temperature": -1.0}, "temperature must be 0 or more, got -1.0"),
        ({"top_p": 0.0}, "top_p must be more than 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2**31}, "top_k must be 0 or more and less than"),
        ({"seed": 2**32}, "seed must be between"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"banned": (VOCAB,)}, "out of range 0..11: "),
        ({"banned": tuple(range(VOCAB))}, "leaves no token"),
    ],
)
def test_settings_that_make_no_sense(changes: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        SamplingParams(**changes).check(VOCAB)
