# SPDX-License-Identifier: Apache-2.0
"""Engine and decode loop, driven by a model of integers whose every output depends on the right records."""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.memory import HOST_KIND
from hisparse_jax.cache.state import create
from hisparse_jax.decode import DecodeState, compile_decode, place
from hisparse_jax.engine.engine import Engine, Events
from hisparse_jax.engine.requests import Request, pages_needed
from hisparse_jax.errors import UserError
from hisparse_jax.sampling import SamplingParams, greedy
from tests.dummy_model import SELECTED, VOCAB, IntegerModel, expected

MODEL, ADDED = IntegerModel(), jnp.int32(5)


def layout(residency: str = "hisparse", requests: int = 3, host_pages: int | None = None, **changes: int) -> Layout:
    sizes = {"context_tokens": 96, "hot_slots": SELECTED + 1, "ring_slots": 2, "page_records": 8, **changes}
    pages = -(-sizes["context_tokens"] // sizes["page_records"]) * requests
    return Layout(
        residency=residency, request_slots=requests, host_pages=host_pages or pages,
        **sizes, **MODEL.records(sizes["context_tokens"])._asdict(),
    )  # fmt: skip


def requests(count: int, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(tuple(rng.integers(0, VOCAB, rng.integers(1, 60)).tolist()), int(rng.integers(1, 30)))
        for _ in range(count)
    ]


def engine(layout: Layout, **options: object) -> Engine:
    return Engine(MODEL, ADDED, layout, vocab=VOCAB, steps=4, prefill_chunk=16, **options)


@pytest.mark.parametrize("residency", ["full", "hisparse"])
def test_continuous_batching_gives_every_request_its_own_tokens(residency: str) -> None:
    run = engine(layout(residency))
    asked = requests(11)
    for request in asked:
        run.submit(request)
    done = run.run()
    assert [one.tokens for one in done] == [expected(one.prompt, one.max_new_tokens, 5) for one in asked]
    assert {one.finish for one in done} == {"length"}
    assert run.metrics.prefill_tokens == sum(len(one.prompt) for one in asked)
    assert run.metrics.decode_tokens == sum(one.max_new_tokens - 1 for one in asked)


def test_misses_are_counted_and_fetched() -> None:
    run = engine(layout())
    run.submit(Request(tuple(range(60)), 20))
    run.run()
    by_step = run.metrics.by_step()
    assert by_step.shape == (19, 2, 3)
    assert (run.metrics.misses_by_table() > 0).all()
    assert run.metrics.fetched_bytes(8, (1, 1)) == 8 * int(by_step[..., 2].sum())


def test_no_io_moves_nothing_and_is_wrong() -> None:
    right, wrong = engine(layout()), engine(layout("no_io"))
    for run in (right, wrong):
        run.submit(Request(tuple(range(60)), 20))
        run.run()
    assert right.completions[0].tokens != wrong.completions[0].tokens
    assert not np.asarray(wrong._state.cache.pool).any()
    assert np.asarray(right._state.cache.pool).any()


def test_few_host_pages_make_requests_wait() -> None:
    asked = requests(6, seed=1)
    most = max(pages_needed(one, 1, 8) for one in asked)
    run = engine(layout(host_pages=max(most, 12)))
    for request in asked:
        run.submit(request)
    assert [one.tokens for one in run.run()] == [expected(one.prompt, one.max_new_tokens, 5) for one in asked]
    assert run._pages.free == max(most, 12)


def test_stop_tokens_end_a_request() -> None:
    prompt = (3, 1, 4, 1, 5)
    whole = expected(prompt, 20, 5)
    stop = whole[7]
    run = engine(layout(), stop_tokens=[stop])
    run.submit(Request(prompt, 20))
    [done] = run.run()
    assert done.finish == "stop"
    assert done.tokens == whole[: whole.index(stop) + 1]


def test_cancelled_requests_keep_what_they_have_and_free_their_slot() -> None:
    run = engine(layout(requests=1))
    first, second, third = (run.submit(Request((7, 8, 9), 40)) for _ in range(3))
    run.step()
    run.cancel(first)
    run.cancel(second)
    done = run.run()
    assert [done[n].finish for n in (first, second, third)] == ["cancelled", "cancelled", "length"]
    assert done[first].tokens == expected((7, 8, 9), 40, 5)[: len(done[first].tokens)]
    assert len(done[first].tokens) == 5
    assert not done[second].tokens
    assert done[third].tokens == expected((7, 8, 9), 40, 5)


def test_events_report_every_token_in_order() -> None:
    seen: dict[int, list[int]] = {}
    prefilled: list[tuple[int, int]] = []
    events = Events(lambda *at: prefilled.append(at), lambda number, token: seen.setdefault(number, []).append(token))
    run = engine(layout(), events=events)
    run.submit(Request(tuple(range(40)), 9))
    run.submit(Request((1,), 5))
    done = run.run()
    assert [seen[0], seen[1]] == [one.tokens for one in done]
    assert prefilled == [(16, 40), (32, 40), (40, 40), (1, 1)]


def test_logits_are_kept_on_request() -> None:
    run = engine(layout(), keep_logits=True)
    run.submit(Request((1, 2, 3), 6))
    [done] = run.run()
    assert [int(one.argmax()) for one in done.logits] == done.tokens


@pytest.mark.parametrize(
    ("prompt", "new", "says"),
    [
        ((), 3, "empty"),
        ((1, VOCAB), 3, "out of range 0..96: [97]"),
        ((-1,), 3, "out of range"),
        ((1,), 0, "at least 1"),
        (tuple(range(90)), 7, "97 in all; the context holds 96"),
    ],
)
def test_requests_that_cannot_be_served(prompt: tuple[int, ...], new: int, says: str) -> None:
    with pytest.raises(UserError, match=says.replace("[", r"\[").replace("]", r"\]")):
        engine(layout()).submit(Request(prompt, new))


def test_the_loop_compiles_once_while_lengths_grow_and_keeps_the_pool_in_place() -> None:
    sizes = layout()
    pages = jnp.arange(3 * sizes.pages_per_request, dtype=jnp.int32).reshape(3, -1)
    cache = create(sizes).replace(page_table=pages)
    state = place(
        DecodeState(cache, jnp.array([1, 2, 3], jnp.int32), jnp.array([60, 20, 0], jnp.int32), greedy(3, VOCAB))
    )

    class Counted(IntegerModel):
        decode = chex.assert_max_traces(IntegerModel.decode, n=1)

    step = compile_decode(Counted(), state, steps=4)
    pointer = state.cache.pool.unsafe_buffer_pointer()
    tokens = []
    for _ in range(15):
        state, out = step(ADDED, state)
        tokens.append(np.asarray(out.token))
        assert state.cache.pool.sharding.memory_kind == HOST_KIND
        assert state.cache.pool.unsafe_buffer_pointer() == pointer
    tokens = np.concatenate(tokens)
    assert tokens[:, 0].tolist() == expected((1,), 60, 5)
    assert tokens[:20, 1].tolist() == expected((2,), 20, 5)
    assert (tokens[20:, 1] == -1).all() and (tokens[:, 2] == -1).all()


def test_a_true_event_ends_a_request_at_that_token() -> None:
    whole = expected((3, 1, 4), 30, 5)
    heard: list[int] = []

    def decode(number: int, token: int) -> bool:
        heard.append(token)
        return len(heard) == 6

    run = engine(layout(), events=Events(decode=decode))
    run.submit(Request((3, 1, 4), 30))
    [done] = run.run()
    assert (done.finish, done.tokens, heard) == ("stop", whole[:6], whole[:6])


def test_sampled_tokens_are_the_same_in_every_residency_and_batch() -> None:
    asked = [
        Request(one.prompt, one.max_new_tokens, SamplingParams(temperature=1.0, top_k=20, seed=number))
        for number, one in enumerate(requests(5, seed=4))
    ]
    runs = [engine(layout(residency, requests=slots)) for residency, slots in (("full", 3), ("hisparse", 3))]
    alone = engine(layout(requests=1))
    for run in (*runs, alone):
        for request in asked:
            run.submit(request)
        run.run()
    for number, request in enumerate(asked):
        first = alone.completions[number].tokens
        assert first != expected(request.prompt, request.max_new_tokens, 5)
        assert all(run.completions[number].tokens == first for run in runs)


def test_a_chunk_draws_only_while_a_request_does(monkeypatch) -> None:
    """Others' tokens stay theirs, before, beside and after it; each program is compiled once, when it is needed."""
    compiled: list[bool] = []
    ran: list[bool] = []

    class Program:
        def __init__(self, jitted, draws: bool) -> None:
            self.jitted, self.draws = jitted, draws

        def lower(self, *args):
            compiled.append(self.draws)
            return Program(self.jitted.lower(*args), self.draws)

        def compile(self):
            return Program(self.jitted.compile(), self.draws)

        def __call__(self, *args):
            ran.append(self.draws)
            return self.jitted(*args)

    def counted(*args, draws: bool, **options):
        return Program(compile_decode(*args, draws=draws, **options), draws)

    monkeypatch.setattr("hisparse_jax.engine.engine.compile_decode", counted)
    drawing = SamplingParams(temperature=1.0)
    run = engine(layout())
    assert compiled == []
    first = run.submit(Request((3, 1, 4), 12))
    run.run()
    assert (compiled, set(ran)) == ([False], {False})
    second, third = run.submit(Request((1, 5), 40)), run.submit(Request((9, 2), 8, drawing))
    ran.clear()
    run.run()
    assert compiled == [False, True]
    assert ran[0] and not ran[-1] and ran == sorted(ran, reverse=True), "while it runs, and no longer"
    assert run.completions[first].tokens == expected((3, 1, 4), 12, 5)
    assert run.completions[second].tokens == expected((1, 5), 40, 5)
    assert run.completions[third].tokens != expected((9, 2), 8, 5)
