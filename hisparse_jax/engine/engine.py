# SPDX-License-Identifier: Apache-2.0
"""Continuous batching over a fixed set of request slots."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hisparse_jax.cache.admission import admit, release
from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.pages import HostPages
from hisparse_jax.cache.state import Cache, create, entering, placements
from hisparse_jax.compiler_options import decode_options
from hisparse_jax.decode import DecodeState, Model, Params, compile_decode, place
from hisparse_jax.engine.metrics import Metrics
from hisparse_jax.engine.requests import Completion, Request, pad_to, pages_needed
from hisparse_jax.errors import UserError
from hisparse_jax.profiling import operation_names, stage_us, traced
from hisparse_jax.sampling import Sampling, greedy, sample, with_request
from pallas_kernels.common import Implementation


@dataclass(frozen=True)
class Events:
    """Callbacks of a run, for progress.

    Attributes:
      prefill: prompt tokens done and in all, of the request being admitted.
      decode: a request's number and its new token; a true result ends the request there, as a stop token would.
    """

    prefill: Callable[[int, int], None] = lambda done, total: None
    decode: Callable[[int, int], bool | None] = lambda number, token: None


@dataclass
class _Slot:
    """A request that is being decoded."""

    number: int
    pages: list[int] = field(default_factory=list)


class Engine:
    """Runs requests through one model and one cache.

    A request is admitted when a slot and all host pages of its longest history are free, prefilled, committed to the
    cache, and decoded together with the others, a chunk of steps at a time.

    Args:
      model: what decodes; see `hisparse_jax.decode.Model`.
      params: its parameters.
      layout: sizes of the cache.
      vocab: token ids are below it.
      steps: decode steps of one jitted call.
      prefill_chunk: prompt tokens of one jitted call.
      stop_tokens: ids that end a request.
      keep_logits: keep the logits of every generated token.
      implementation: of the kernels that admission and decode loop call themselves.
      events: callbacks.
      profile: a folder for a trace of one chunk of decode steps, the second; see `hisparse_jax.profiling`.
    """

    def __init__(
        self, model: Model, params: Params, layout: Layout, *, vocab: int, steps: int = 8, prefill_chunk: int = 512,
        stop_tokens: Sequence[int] = (), keep_logits: bool = False, implementation: Implementation = "auto",
        events: Events | None = None, profile: Path | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.metrics, self.completions = layout, Metrics(layout.tables), list[Completion]()
        self._model, self._params, self._vocab, self._chunk = model, params, vocab, prefill_chunk
        self._stop_tokens, self._events = frozenset(stop_tokens), events or Events()
        self._keep_logits = keep_logits
        self._waiting: deque[int] = deque()
        self._slots: list[_Slot | None] = [None] * layout.request_slots
        self._pages = HostPages(0 if layout.is_full else layout.host_pages)
        nobody, sampling = jnp.zeros(layout.request_slots, jnp.int32), greedy(layout.request_slots, vocab)
        self._state = place(DecodeState(create(layout, model.new_index(layout)), nobody, nobody, sampling))
        self._scratch = model.new_scratch(layout, prefill_chunk)

        started = time.perf_counter()
        cache_placed = placements(self._state.cache)
        scalar, prompt_pages = jnp.int32(0), jnp.zeros(self._state.cache.page_table.shape[1], jnp.int32)
        tokens = jnp.zeros(prefill_chunk, jnp.int32)
        self._prefill = _jitted_prefill(model).lower(params, tokens, scalar, self._scratch).compile()
        hidden = jax.eval_shape(model.prefill, params, tokens, scalar, self._scratch)[0]
        first = jax.jit(partial(_first_token, model))
        self._first = first.lower(params, hidden, scalar, scalar, scalar, self._state.sampling).compile()
        commit = jax.jit(partial(_commit, model, implementation), donate_argnums=0, out_shardings=cache_placed)
        self._commit = commit.lower(self._state.cache, self._scratch, scalar, prompt_pages, scalar).compile()
        self._release = jax.jit(release, donate_argnums=0, out_shardings=cache_placed)
        self.metrics.compile_s = time.perf_counter() - started
        self._jit_decode = partial(
            compile_decode, model, steps=steps, stop_tokens=stop_tokens, keep_logits=keep_logits,
            implementation=implementation, compiler_options=decode_options(graphs=profile is None),
        )  # fmt: skip
        self._decoders: dict[bool, jax.stages.Compiled] = {}
        self._profiled: jax.stages.Compiled | None = None
        self._profile, self._chunks, self._steps = profile, 0, steps

    def submit(self, request: Request) -> int:
        """Queues a request and gives back its number.

        Raises:
          UserError: it can't be served by this model and cache.
        """
        request.check(self._vocab, self.layout.context_tokens)
        if not self.layout.is_full and self._needed(request) > self.layout.host_pages:
            raise UserError(
                f"the request needs {self._needed(request)} host pages and the pool has {self.layout.host_pages}: "
                "raise cache.host_pages"
            )
        self.completions.append(Completion(request))
        self._waiting.append(len(self.completions) - 1)
        return len(self.completions) - 1

    def cancel(self, number: int) -> None:
        """Ends a request that waits or runs; what it has generated stays."""
        if self.completions[number].finish is None:
            self.completions[number].finish = "cancelled"
        if number in self._waiting:
            self._waiting.remove(number)
        self._free_finished()

    def run(self) -> list[Completion]:
        """Runs until every request is done; completions in the order of submission."""
        while self._waiting or any(self._slots):
            self.step()
        return self.completions

    def step(self) -> None:
        """Admits what fits, then decodes one chunk of steps."""
        self._admit_waiting()
        self._decode_chunk()
        self._free_finished()

    def stage_us(self) -> dict[str, float]:
        """Device time of a decode step by stage, from the profile.

        Raises:
          UserError: no second chunk was decoded.
        """
        if self._profile is None or self._profiled is None:
            raise UserError("nothing was profiled: a profile is of the second call of decode.steps steps; decode more")
        times = stage_us(self._profile, operation_names(self._profiled.as_text() or ""))
        return {stage: us / self._steps for stage, us in times.items()}

    def _needed(self, request: Request) -> int:
        layout = self.layout
        return 0 if layout.is_full else pages_needed(request, layout.record_tokens, layout.page_records)

    def _admit_waiting(self) -> None:
        for slot, taken in enumerate(self._slots):
            if taken is None and self._waiting:
                if self._needed(self.completions[self._waiting[0]].request) > self._pages.free:
                    return
                self._admit(slot, self._waiting.popleft())

    def _admit(self, slot: int, number: int) -> None:
        completion = self.completions[number]
        request, chunk = completion.request, self._chunk
        pages = self._pages.take(self._needed(request))
        self._slots[slot] = _Slot(number, pages)
        started, length, hidden = time.perf_counter(), len(request.prompt), None
        prompt = pad_to(request.prompt, chunk)
        for start in range(0, len(prompt), chunk):
            hidden, self._scratch = self._prefill(
                self._params, jnp.asarray(prompt[start : start + chunk]), jnp.int32(start), self._scratch
            )
            self._events.prefill(min(start + chunk, length), length)
        sampling = with_request(self._state.sampling, slot, request.sampling, request.prompt)
        logits, token, sampling = self._first(
            self._params, hidden, jnp.int32((length - 1) % chunk), jnp.int32(slot), jnp.int32(length), sampling
        )
        table = np.full(self._state.cache.page_table.shape[1], -1, np.int32)
        table[: len(pages)] = pages
        cache = self._commit(self._state.cache, self._scratch, jnp.int32(slot), jnp.asarray(table), jnp.int32(length))
        remaining = request.max_new_tokens - 1
        self._emit(number, [int(token)], [np.asarray(logits)] if self._keep_logits else [])
        if completion.finish is not None:
            remaining = 0
        tokens, remaining = self._state.token.at[slot].set(token), self._state.remaining.at[slot].set(remaining)
        self._state = place(DecodeState(cache, tokens, remaining, sampling))
        self.metrics.prefill_s += time.perf_counter() - started
        self.metrics.prefill_tokens += length

    def _decoder(self, *, draws: bool) -> jax.stages.Compiled:
        """The chunk of steps, with draws or without, compiled when it is first needed."""
        if draws not in self._decoders:
            started = time.perf_counter()
            jitted = self._jit_decode(self._state, draws=draws)
            self._decoders[draws] = jitted.lower(self._params, self._state).compile()
            self.metrics.compile_s += time.perf_counter() - started
        return self._decoders[draws]

    def _decode_chunk(self) -> None:
        running = [(slot, taken.number) for slot, taken in enumerate(self._slots) if taken is not None]
        unfinished = [self.completions[number] for _, number in running if not self.completions[number].finish]
        if not unfinished:
            return
        decode = self._decoder(draws=any(one.request.sampling.draws for one in unfinished))
        profile = self._profile if self._chunks == 1 else None
        with traced(profile):
            started = time.perf_counter()
            self._state, out = jax.block_until_ready(decode(self._params, self._state))
            self.metrics.decode_s += time.perf_counter() - started
        if profile is not None:
            self._profiled = decode
        self._chunks += 1
        tokens, counters = np.asarray(out.token), np.asarray(out.counters)
        busy = (tokens >= 0).any(axis=1)
        self.metrics.counters.extend(counters[busy])
        self.metrics.decode_tokens += int((tokens >= 0).sum())
        logits = None if out.logits is None else np.asarray(out.logits)
        for slot, number in running:
            steps = np.flatnonzero(tokens[:, slot] >= 0)
            kept = [] if logits is None else [logits[step, slot] for step in steps]
            if self.completions[number].finish is None:
                self._emit(number, tokens[steps, slot].tolist(), kept)

    def _emit(self, number: int, tokens: list[int], logits: list[np.ndarray]) -> None:
        completion = self.completions[number]
        for token, row in zip_longest(tokens, logits):
            completion.tokens.append(token)
            if row is not None:
                completion.logits.append(row)
            if self._events.decode(number, token) or token in self._stop_tokens:
                completion.finish = "stop"
            elif len(completion.tokens) >= completion.request.max_new_tokens:
                completion.finish = "length"
            if completion.finish is not None:
                return

    def _free_finished(self) -> None:
        for slot, taken in enumerate(self._slots):
            if taken is not None and self.completions[taken.number].finish is not None:
                self._pages.give_back(taken.pages)
                self._slots[slot] = None
                cache = self._release(self._state.cache, jnp.int32(slot))
                remaining = self._state.remaining.at[slot].set(0)
                self._state = place(replace(self._state, cache=cache, remaining=remaining))


@lru_cache(maxsize=2)
def _jitted_prefill(model: Model) -> Any:
    """Prefill doesn't depend on the residency, so engines of one model share what is compiled."""
    return jax.jit(model.prefill, donate_argnums=3)


def _first_token(
    model: Model, params: Params, hidden: jax.Array, row: jax.Array, slot: jax.Array, length: jax.Array,
    sampling: Sampling,
) -> tuple[jax.Array, jax.Array, Sampling]:  # fmt: skip
    """The token that a prompt of `length` tokens gives, chosen as the decode loop chooses."""
    logits = model.logits(params, hidden[row])
    own = jax.tree.map(lambda setting: setting[slot][None], sampling)
    token, own = sample(logits[None], own, length[None], jnp.ones(1, jnp.bool_))
    sampling = jax.tree.map(lambda setting, one: setting.at[slot].set(one[0]), sampling, own)
    return logits, token[0], sampling


def _commit(
    model: Model, implementation: Implementation, cache: Cache, scratch: object, slot: jax.Array, pages: jax.Array,
    tokens: jax.Array,
) -> Cache:  # fmt: skip
    cache = entering(cache)
    index = model.index_of(scratch, tokens, cache.layout)
    return admit(
        cache, slot, pages, tokens, lambda space: model.rows(scratch, space, cache.layout), index, implementation
    )
