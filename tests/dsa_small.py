# SPDX-License-Identifier: Apache-2.0
"""A DSA decoder of three layers, an anchor alone and an anchor with a follower, and how to drive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from hisparse_jax.cache.admission import admit
from hisparse_jax.cache.backup import end_step
from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.state import Cache, begin_step, create, entering, placements
from hisparse_jax.prefetch import Prefetch
from models.dsa import DsaDecoder, DsaOptions
from models.dsa_config import DsaConfig
from models.functional import Functional

CONFIG = DsaConfig(
    vocab=48, hidden=32, heads=2, query_latent=16, latent=16, nope=8, rope=4, value=8, index_heads=3, index_dim=8,
    selected=6, anchors=(True, True, False), dense=(True, False, False), mlp_width=24, expert_width=8, experts=4,
    experts_used=2, shared_experts=1, expert_groups=2, expert_groups_used=1, routed_factor=1.5, renormalise=True,
    norm_eps=1e-5, rope_theta=1e4, yarn=None, rope_pairing="pairs", index_pairing="halves", max_tokens=512,
)  # fmt: skip
CONTEXT, CHUNK, STEPS = 64, 16, 10
PROMPTS = tuple(tuple(np.random.default_rng(n).integers(0, CONFIG.vocab, n).tolist()) for n in (40, 9, 23))


@cache
def model(
    record: str = "float32", prefetch: Prefetch = "exact", parts: int | None = None, **changes
) -> tuple[Functional, list[Array]]:
    """The decoder and its parameters, which are the same for all options."""
    config = replace(CONFIG, **changes)
    module = DsaDecoder(config, DsaOptions(record, record, prefetch, parts=parts), rngs=nnx.Rngs(0))
    return Functional(module), Functional.parameters(module)


def layout(functional: Functional, residency: str, hot_slots: int, requests: int = len(PROMPTS), **changes) -> Layout:
    sizes = {"request_slots": requests, "context_tokens": CONTEXT, "hot_slots": hot_slots, "ring_slots": 2,
             "page_records": 8, "host_pages": 8 * requests} | changes  # fmt: skip
    return Layout(residency=residency, **sizes, **functional.records(CONTEXT)._asdict())


@cache
def _prefill(functional: Functional):
    def traced(params, tokens, start, scratch):
        hidden, scratch, selected = functional.prefill_traced(params, tokens, start, scratch)
        return functional.logits(params, hidden), scratch, selected.ids

    return jax.jit(traced)


def prefill(functional: Functional, params, prompt: Sequence[int], chunk: int = CHUNK):
    """Logits `[T, V]`, scratch, and selections `[tables, T, K]` of a prompt."""
    scratch = functional.new_scratch(layout(functional, "full", CONFIG.selected), chunk)
    padded = np.pad(np.array(prompt, np.int32), (0, -len(prompt) % chunk))
    logits, ids = [], []
    for start in range(0, len(padded), chunk):
        tokens = jnp.asarray(padded[start : start + chunk])
        out, scratch, selected = _prefill(functional)(params, tokens, jnp.int32(start), scratch)
        logits.append(np.asarray(out))
        ids.append(np.asarray(selected))
    return np.concatenate(logits)[: len(prompt)], scratch, np.concatenate(ids, axis=1)[:, : len(prompt)]


def _admit(functional, cached, slot, pages, tokens, scratch):
    sizes = cached.layout
    return admit(entering(cached), slot, pages, tokens, lambda space: functional.rows(scratch, space, sizes),
                 functional.index_of(scratch, tokens, sizes))  # fmt: skip


@cache
def admission(functional: Functional):
    return jax.jit(partial(_admit, functional))


class State(NamedTuple):
    """A cache between two steps, and what each request feeds next and may still emit."""

    cache: Cache
    token: Array
    remaining: Array


class Run(NamedTuple):
    """What decode steps gave: leaves `[steps, ...]`, and the cache after them."""

    token: np.ndarray  # [steps, R], -1 where a request took no part
    logits: np.ndarray  # [steps, R, V]
    counters: np.ndarray  # [steps, tables, R, 3]
    selected: np.ndarray  # [steps, tables, R, K]
    cache: Cache


def admitted(functional: Functional, params, sizes: Layout, prompts=PROMPTS) -> State:
    """All prompts prefilled and admitted, in pages of falling number; later requests end earlier."""
    state = State(create(sizes, functional.new_index(sizes)), *[jnp.zeros(sizes.request_slots, jnp.int32)] * 2)
    for slot, prompt in enumerate(prompts):
        logits, scratch, _ = prefill(functional, params, prompt)
        per_request = sizes.pages_per_request
        pages = np.arange((slot + 1) * per_request, slot * per_request, -1, dtype=np.int32) - 1
        pages = jnp.asarray(pages[: state.cache.page_table.shape[1]])
        cached = admission(functional)(state.cache, jnp.int32(slot), pages, jnp.int32(len(prompt)), scratch)
        token = int(np.argmax(logits[-1]))
        remaining = state.remaining.at[slot].set(STEPS - slot)
        state = State(jax.device_put(cached, placements(cached)), state.token.at[slot].set(token), remaining)
    return state


def greedy(functional: Functional, steps: int, params, state: State):
    """Decode steps that feed the most likely token."""

    def one(state: State, _):
        active = state.remaining > 0
        logits, cached, selection = functional.decode_traced(params, state.token, begin_step(state.cache, active))
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        remaining = jnp.where(active, state.remaining - 1, 0)
        out = jnp.where(active, token, -1), logits, cached.counters, selection.ids
        return State(end_step(cached), jnp.where(active, token, state.token), remaining), out

    return jax.lax.scan(one, state._replace(cache=entering(state.cache)), length=steps)


@cache
def _decode(functional: Functional, sizes: Layout, steps: int):
    empty = jax.eval_shape(lambda: create(sizes, functional.new_index(sizes)))
    placed = State(placements(empty), None, None)
    return jax.jit(partial(greedy, functional, steps), donate_argnums=1, out_shardings=(placed, None))


def run(functional: Functional, params, sizes: Layout, *, prefilled_by: Functional | None = None) -> Run:
    """A few decode steps of all prompts; compiled once for each decoder and layout."""
    state = admitted(prefilled_by or functional, params, sizes)
    state, out = _decode(functional, sizes, STEPS)(params, state)
    return Run(*jax.tree.map(np.asarray, out), state.cache)
