# SPDX-License-Identifier: Apache-2.0
"""Fits the synthetic workload to the miss rates of a trace and records what it reaches.

The process is followed as a decode follows it: scores, exact top-k, replacement in every table, one token a step. The
first steps fill the hot slots and aren't counted; the last are only there for Belady's bound to look ahead to.

    python -m benchmarks.fit_workload                  a record of the parameters in hisparse_jax/workload.py
    python -m benchmarks.fit_workload --evaluations 80     searches first, and records what it finds
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from scipy.optimize import minimize

from hisparse_jax.environment import environment
from hisparse_jax.policies import Order, belady_misses, fifo, hit_first_lru, replay
from hisparse_jax.workload import FITTED, Locality, Noise, synthetic_scores
from pallas_kernels.index_topk import index_topk

SELECTED, RING = 2048, 64
# Misses in %, published for a GLM-5.1 trace with K = 2048. Rule of replacement and hot slots.
TARGETS = {
    ("hit_first_lru", 2048): 30.0,
    ("hit_first_lru", 4096): 13.4,
    ("hit_first_lru", 8192): 6.7,
    ("fifo", 4096): 17.2,
    ("random", 4096): 16.1,
    ("belady", 4096): 8.2,
}
# The same of a real trace of a small model: 24,000 tokens of source code, 448 steps, 8 layers. For comparison.
OTHER_TRACE = {
    ("hit_first_lru", 2048): 30.8,
    ("hit_first_lru", 4096): 13.4,
    ("hit_first_lru", 8192): 4.2,
    ("fifo", 4096): 17.3,
    ("random", 4096): 15.8,
    ("belady", 4096): 7.5,
}


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What is followed: the first `tables` tables of request 0, one token a step, from a prompt on."""

    prompt_tokens: int = 28000
    tables: int = 21
    warm_up: int = 100
    counted: int = 448
    ahead: int = 50


RECORD = Protocol()
SHORT = Protocol(counted=40)  # for the search: misses of a step vary little from step to step
CONTEXTS = (8192, 16384, 32768, 65536, 131072)


@functools.partial(jax.jit, static_argnames=("locality", "tables", "steps", "records"))
def trace(locality: Locality, tables: int, steps: int, records: int, first: Array) -> tuple[Array, Array]:
    """Selections int32 `[steps, tables, K]` and lengths int32 `[steps, tables]`, from a length of `first` on."""

    def step(length: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        def of_table(table: Array) -> Array:
            return synthetic_scores(jnp.zeros((1, records)), length[None], table, locality)[0]

        lengths = jnp.full(tables, length)
        scores = jax.vmap(of_table)(jnp.arange(tables, dtype=jnp.int32))
        return length + 1, (index_topk(scores, lengths, SELECTED), lengths)

    return lax.scan(step, first, length=steps)[1]


def random(hit: Array, loaded: Array) -> Array:
    """A rule of replacement that puts the slots into a new order each step, drawn by which of them were hit."""
    del loaded
    places = jnp.arange(hit.shape[0], dtype=jnp.int32)
    return jax.random.permutation(jax.random.key(jnp.sum(jnp.where(hit, places, 0))), places)


ORDERS: dict[str, Order] = {"hit_first_lru": hit_first_lru, "fifo": fifo, "random": random}


def misses(locality: Locality, protocol: Protocol, wanted: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Any]:
    """Misses in % of each table, for each rule and number of hot slots."""
    steps = protocol.warm_up + protocol.counted + protocol.ahead
    records = -(-(protocol.prompt_tokens + steps) // 1024) * 1024
    first = jnp.int32(protocol.prompt_tokens + 1)
    selected, length = trace(locality, protocol.tables, steps, records, first)
    found = {}
    for rule, hot_slots in wanted:
        sizes = {"hot_slots": hot_slots, "ring_slots": RING}
        if rule == "belady":
            ids, lengths = np.asarray(selected), np.asarray(length)
            counts = [belady_misses(ids[:, t], lengths[:, t], **sizes) for t in range(protocol.tables)]
            missed = np.stack(counts, axis=1)
        else:
            missed = np.asarray(replay(selected, length, order=ORDERS[rule], **sizes))[..., 2]
        counted = missed[protocol.warm_up : protocol.warm_up + protocol.counted]
        found[rule, hot_slots] = 100 * counted.mean(axis=0) / SELECTED
    return found


def search(evaluations: int) -> Locality:
    """Sizes of three noises and how long two of them hold (the first is new each step), by Nelder and Mead's method."""
    start = np.log([FITTED.noises[0].octaves, *(x for n in FITTED.noises[1:] for x in (n.octaves, n.steps - 1))])

    def locality_of(point: np.ndarray) -> Locality:
        first, *others = (round(float(value), 2) for value in np.exp(point))
        pairs = zip(others[::2], others[1::2], strict=True)
        noises = [Noise(first, 1.0), *(Noise(octaves, round(1 + more, 2)) for octaves, more in pairs)]
        return dataclasses.replace(FITTED, noises=tuple(noises))

    def error(point: np.ndarray) -> float:
        found = misses(locality_of(point), SHORT, list(TARGETS))
        total = sum((found[key].mean() - target) ** 2 for key, target in TARGETS.items())
        print(f"{total:8.3f}", locality_of(point).noises, flush=True)
        return total

    simplex = start + np.vstack([np.zeros(len(start)), np.diag(np.resize([0.2, -0.2], len(start)))])
    result = minimize(error, start, method="Nelder-Mead", options={"maxfev": evaluations, "initial_simplex": simplex})
    return locality_of(result.x)


def figures(values: np.ndarray) -> dict[str, Any]:
    """Mean over tables, and each."""
    return {"misses": round(float(values.mean()), 2), "by_table": [round(float(value), 2) for value in values]}


def record(locality: Locality) -> dict[str, Any]:
    """All that is measured of one process."""
    found = misses(locality, RECORD, list(TARGETS))
    lines = [
        {"rule": rule, "hot_slots": hot_slots, "target": target, **figures(found[rule, hot_slots]),
         "residual": round(float(found[rule, hot_slots].mean()) - target, 2),
         "other_trace": OTHER_TRACE[rule, hot_slots]}
        for (rule, hot_slots), target in TARGETS.items()
    ]  # fmt: skip
    contexts = []
    for context in CONTEXTS:
        protocol = dataclasses.replace(SHORT, prompt_tokens=context)
        (values,) = misses(locality, protocol, [("hit_first_lru", 4096)]).values()
        contexts.append({"prompt_tokens": context, "hot_slots": 4096, **figures(values)})
    return {
        "workload": "synthetic", "parameters": dataclasses.asdict(locality), "selected": SELECTED, "ring_slots": RING,
        "fit": lines, "contexts": contexts, "protocol": dataclasses.asdict(RECORD),
        "protocol_of_contexts_and_search": dataclasses.asdict(SHORT),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=0, help="of a search; 0 takes the parameters as they are")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/workload_fit.json")
    options = parser.parse_args()
    begin = time.perf_counter()
    result = record(search(options.evaluations) if options.evaluations else FITTED)
    result |= {"wall_s": round(time.perf_counter() - begin, 1), "environment": environment()}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for line in result["fit"]:
        print(*(f"{key} {line[key]}" for key in ("rule", "hot_slots", "target", "misses", "residual")))
    for line in result["contexts"]:
        print(*(f"{key} {line[key]}" for key in ("prompt_tokens", "misses")))


if __name__ == "__main__":
    main()
