# SPDX-License-Identifier: Apache-2.0
"""Decode throughput of a published shape over concurrency and context, in every mode, with synthetic requests.

A composition root. Points of one context share parameters and host pool, and are compiled several at a time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console

from hisparse_jax import throughput_report as report
from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.state import Cache, create
from hisparse_jax.compiler_options import decode_options
from hisparse_jax.config import Config
from hisparse_jax.decode import DecodeState, compile_decode, place, state_placements
from hisparse_jax.engine.metrics import MISSES, Metrics
from hisparse_jax.environment import environment
from hisparse_jax.errors import ExpectationError
from hisparse_jax.profiling import idle_share, operation_names, stage_table, stage_us, traced
from hisparse_jax.run_folder import RunFolder, run_folder
from hisparse_jax.simulated import Point, Share, points
from hisparse_jax.synthetic import random_index, state_of


@dataclass(frozen=True)
class Programs:
    """What a point needs compiled.

    Attributes:
      layout: of its cache.
      admit: admission of one request.
      decode: a chunk of steps.
      first_step: one step, where the first is timed on its own.
      profiled: the chunk without graphs, for a profile.
      compile_s: how long all this took, waiting for others left out.
    """

    layout: Layout
    admit: Any
    decode: Any
    first_step: Any | None
    profiled: Any | None
    compile_s: float


@dataclass(frozen=True)
class LoweredPoint:
    """A point's programs, traced and lowered, which is Python's work; what is left is the compiler's.

    Attributes:
      share: of a model.
      cache: an abstract one, of the point's layout.
      decode: a chunk of steps.
      first_step: one step, where the first is timed on its own.
      profile: whether the chunk is compiled without graphs, too.
      lower_s: how long tracing and lowering took.
    """

    share: Share
    cache: Cache
    decode: jax.stages.Lowered
    first_step: jax.stages.Lowered | None
    profile: bool
    lower_s: float

    def compile(self, after: Future[Programs] | None = None) -> Programs:
        """The compiled programs. First waits for `after`, even if that fails."""
        if after is not None:
            after.exception()
        started = time.perf_counter()
        return Programs(
            layout=self.cache.layout,
            admit=self.share.admission(self.cache),
            decode=self.decode.compile(decode_options()),
            first_step=self.first_step.compile(decode_options()) if self.first_step is not None else None,
            profiled=self.decode.compile(decode_options(graphs=False)) if self.profile else None,
            compile_s=self.lower_s + time.perf_counter() - started,
        )


def lower_point(share: Share, point: Point, params: list[Array], profile: bool = False) -> LoweredPoint:
    """Traces and lowers the programs of a point; allocates nothing of its size."""
    started, layout = time.perf_counter(), share.layout(point)
    model, vocab = share.models[point.mode], share.shape.vocab
    state = jax.eval_shape(
        lambda: state_of(layout, create(layout, model.new_index(layout), _no_pool(layout)), vocab, 1)
    )
    state = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), state, state_placements(state)
    )
    implementation = share.config.decode.implementation

    def decode(steps: int) -> jax.stages.Lowered:  # the options are given when it is compiled
        jitted = compile_decode(
            model, state, steps=steps, draws=False, implementation=implementation, compiler_options={}
        )
        return jitted.lower(params, state)

    return LoweredPoint(
        share=share,
        cache=state.cache,
        decode=decode(share.config.decode.steps),
        first_step=decode(1) if point.requests in share.setting.cold_concurrency else None,
        profile=profile,
        lower_s=time.perf_counter() - started,
    )


def _no_pool(layout: Layout) -> Array:
    """Stands for the host pool where only shapes count."""
    return jnp.zeros((layout.pool_rows, layout.words), jnp.uint32)


@dataclass
class Pool:
    """The host pool of one context, which goes from point to point; made when it is first needed."""

    array: Array | None = None

    def lend(self, layout: Layout) -> Array | None:
        lent, self.array = (None, self.array) if layout.is_full else (self.array, None)
        return lent

    def take_back(self, state: DecodeState) -> None:
        if not state.cache.layout.is_full:
            self.array = state.cache.pool


def time_point(
    share: Share, point: Point, programs: Programs, params: list[Array], pool: Pool, profile: Path
) -> dict[str, Any]:
    """Admits, warms up and times one point; traces two chunks more into `profile`, if one was compiled for that."""
    setting, layout, chunk, steps = share.setting, programs.layout, share.config.decode.steps, share.steps
    index = random_index(share.models[point.mode].new_index(layout))

    def admitted(cache: Cache) -> DecodeState:
        for slot in range(point.requests):
            cache = programs.admit(cache, np.int32(slot), np.int32(point.context - steps))
        return jax.block_until_ready(place(state_of(layout, cache, share.shape.vocab, steps)))

    cache = create(layout, index, pool.lend(layout))
    started = time.perf_counter()
    state = admitted(cache)
    record: dict[str, Any] = {"admission_s": time.perf_counter() - started}

    tokens = []
    if programs.first_step is not None:
        state, _ = programs.first_step(params, state)  # loads the program; then everybody is admitted anew
        state = admitted(state.cache)
        started = time.perf_counter()
        state, out = jax.block_until_ready(programs.first_step(params, state))
        record["first_step_ms"] = 1e3 * (time.perf_counter() - started)
        record["first_step_misses"] = _misses(np.asarray(out.counters))
        tokens.append(out.token)
    for _ in range(share.warmup_calls):
        state, out = programs.decode(params, state)
        tokens.append(out.token)
    jax.block_until_ready(state)
    step_ms, counters = [], []
    for _ in range(setting.repeats):
        started = time.perf_counter()
        outs = []
        for _ in range(share.calls):
            state, out = programs.decode(params, state)
            outs.append(out)
        jax.block_until_ready((state, outs))
        step_ms.append(1e3 * (time.perf_counter() - started) / (share.calls * chunk))
        tokens += [out.token for out in outs]
        counters += [np.asarray(out.counters) for out in outs]
    if programs.profiled is not None:
        with traced(profile / "stages"):
            state, _ = jax.block_until_ready(programs.profiled(params, state))
        with traced(profile / "graphs"):
            state, _ = jax.block_until_ready(programs.decode(params, state))
        times = stage_us(profile / "stages", operation_names(programs.profiled.as_text()))
        record["stage_us"] = {stage: us / chunk for stage, us in times.items()}
        record["outside_kernels"] = 1 - sum(record["stage_us"].values()) / 1e3 / float(np.median(step_ms))
        record["idle_share"] = idle_share(profile / "graphs")
    pool.take_back(state)
    emitted = np.concatenate([np.asarray(one) for one in tokens])
    counted = np.concatenate(counters)
    metrics, misses = Metrics(layout.tables, list(counted)), _misses(counted)
    fetched = metrics.fetched_bytes(layout.row_bytes, layout.group_sizes) if layout.residency == "hisparse" else 0
    return record | {
        "step_ms": float(np.median(step_ms)),
        "step_ms_samples": step_ms,
        "tokens_per_s": 1e3 * point.requests / float(np.median(step_ms)),
        "misses_per_table_and_request": misses,
        "miss_rate": float(np.mean(misses)) / layout.selected,
        "fetched_bytes_per_step": fetched / len(counted),
        "tokens": _digest(emitted),
        "valid_output": point.mode != "no_io",
        "compile_s": programs.compile_s,
    }  # fmt: skip


def _misses(counters: np.ndarray) -> list[float]:
    """Misses of each table, the mean over steps and requests."""
    return counters[..., MISSES].mean(axis=(0, 2)).tolist()


def _digest(tokens: np.ndarray) -> str:
    """The same for the same tokens."""
    return hashlib.sha256(np.ascontiguousarray(tokens)).hexdigest()[:16]


def compile_points(
    share: Share, todo: list[Point], params: list[Array], threads: ThreadPoolExecutor, profile: bool = False
) -> dict[Point, Future[Programs]]:
    """Compiles points, several at a time.

    This thread lowers all of them: eight that do it together take a third longer, and none is done before all are.
    """
    order = sorted(todo, key=lambda point: share.setting.modes.index(point.mode))
    lowered = ((point.requests, lower_point(share, point, params, profile)) for point in order)
    return dict(zip(order, compile_all(lowered, threads), strict=True))


def compile_all(lowered: Iterable[tuple[int, LoweredPoint]], threads: ThreadPoolExecutor) -> Iterator[Future[Programs]]:
    """Compiles lowered points, each with its requests, several at a time, the first of a concurrency before its others.

    XLA tries matrix products and fusions out on the device and remembers the best, and what decodes as many requests
    has most of them in common.
    """
    tried_out: dict[int, Future[Programs]] = {}
    for requests, point in lowered:
        compiled = threads.submit(point.compile, tried_out.get(requests))
        tried_out.setdefault(requests, compiled)
        yield compiled


def compilers() -> ThreadPoolExecutor:
    """Threads that compile: half of the processors, at most eight."""
    return ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) // 2)))


def records(
    share: Share, params: list[Array], console: Console, profile: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Times every point; one that doesn't fit in memory is recorded as such. Traces go to `profile`, if given."""
    budget = share.cache_budget()["cache_bytes"]
    for context in share.setting.contexts:
        pool, todo, started = Pool(), points(share.setting, context), time.perf_counter()
        with compilers() as threads:
            compiled = compile_points(share, todo, params, threads, profile is not None)
            for future in compiled.values():  # nothing is timed while the compiler tries kernels out on the same device
                future.exception()
            console.print(f"{len(todo)} points compiled in {time.perf_counter() - started:.0f} s")
            for point in todo:
                size = share.request_bytes(point)
                record = dataclasses.asdict(point) | {
                    "request_bytes": size,
                    "fits_by_rule": size * point.requests <= budget,
                }
                folder = (profile or Path()) / f"{context}_tokens_{point.requests}_requests_{point.mode}"
                try:
                    record |= time_point(share, point, compiled[point].result(), params, pool, folder)
                except jax.errors.JaxRuntimeError as error:  # the points before and after it count all the same
                    full = "RESOURCE_EXHAUSTED" in str(error)
                    record["error"] = "does not fit in memory" if full else f"failed: {str(error)[:200]}"
                console.print(report.line(record, share.shape.layers, share.whole.layers))
                yield record


def _write(folder: RunFolder, result: dict[str, Any]) -> None:
    """What there is so far, so that a run that is killed leaves it behind."""
    (folder.partial / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run(config: Config, console: Console, *, profile: bool = False) -> Path:
    """Runs a throughput experiment and gives back its run folder; with `profile`, traces of each point in it.

    Interrupted, it leaves a folder of the points that were timed, and says in it that it was.

    Raises:
      UserError: something the user can mend.
      ExpectationError: points failed, or modes emitted different tokens.
      KeyboardInterrupt: it was interrupted.
    """
    share, started = Share(config), time.perf_counter()
    for context in share.setting.contexts:
        for point in points(share.setting, context):
            share.check(point)
    result: dict[str, Any] = {
        "label": "synthetic: random weights, selections of a random process with a stated locality; times only",
        "config": dataclasses.asdict(config),
        "environment": environment(),
        "locality": dataclasses.asdict(share.workload),
        "rule": share.cache_budget(),
        "simulated": f"layers {share.setting.first_layer} to {share.setting.first_layer + share.shape.layers - 1} of "
        f"{share.whole.layers} of {config.model.published}, one rank of {share.setting.ranks}",
        "points": [],
    }
    console.print(f"{result['simulated']}; {result['label']}.")
    with run_folder(Path(config.runs), config.name) as folder:
        params = share.parameters()
        try:
            for record in records(share, params, console, folder.partial / "profile" if profile else None):
                result["points"].append(record)
                _write(folder, result)
        except KeyboardInterrupt:  # what has been timed is worth keeping
            if not result["points"]:
                raise
            result["interrupted"] = True
        result["wall_s"] = time.perf_counter() - started
        result["summary"] = report.summary(result["points"], share.shape.group_sizes)
        report.show(console, result)
        for context, requests in dict.fromkeys((point["context"], point["requests"]) for point in result["points"]):
            here = [p for p in result["points"] if (p["context"], p["requests"]) == (context, requests)]
            if times := {point["mode"]: point["stage_us"] for point in here if "stage_us" in point}:
                console.print(f"{context} tokens x {requests}", stage_table(times))
        _write(folder, result)
        report.plot(folder.partial / "result.png", result)
    console.print(f"written to [bold]{folder.final}[/bold]")
    failed = [point["error"] for point in result["points"] if point.get("error", "").startswith("failed")]
    if result.get("interrupted"):
        raise KeyboardInterrupt
    if failed:
        raise ExpectationError(f"{len(failed)} of {len(result['points'])} points failed, the first with: {failed[0]}")
    if config.expect.bitwise and any(entry.get("same_tokens") is False for entry in result["summary"]):
        raise ExpectationError("the modes did not emit the same tokens")
    return folder.final
