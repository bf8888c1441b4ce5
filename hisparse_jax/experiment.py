# SPDX-License-Identifier: Apache-2.0
"""An experiment: a config to a model decoded in each residency, compared, reported and written down."""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hisparse_jax import report
from hisparse_jax.assembly import make_budget, make_layout, open_model
from hisparse_jax.cache.layout import Budget, Layout, Residency
from hisparse_jax.config import Config
from hisparse_jax.engine.engine import Engine, Events
from hisparse_jax.engine.metrics import Metrics
from hisparse_jax.engine.requests import Completion, Request
from hisparse_jax.environment import environment
from hisparse_jax.errors import ExpectationError, UserError
from hisparse_jax.profiling import stage_table
from hisparse_jax.prompts import prompt_tokens
from hisparse_jax.run_folder import run_folder
from models.opened import Opened


@dataclass(frozen=True)
class Outcome:
    """One residency's run.

    Attributes:
      residency: which.
      layout: sizes of its cache.
      budget: what it needed.
      completions: what it generated.
      metrics: what it counted.
      stage_us: device time of a step by stage, if it was profiled.
    """

    residency: Residency
    layout: Layout
    budget: Budget
    completions: list[Completion]
    metrics: Metrics
    stage_us: dict[str, float] | None = None

    @property
    def tokens(self) -> list[int]:
        """What the first request generated."""
        return self.completions[0].tokens

    def fetched_bytes(self) -> int:
        """Bytes from the host pool while decoding."""
        if self.residency != "hisparse":
            return 0
        return self.metrics.fetched_bytes(self.layout.row_bytes, self.layout.group_sizes)


def run(config: Config, console: Console, *, profile: bool = False) -> Path:
    """Runs an experiment and gives back its run folder; with `profile`, traces of each residency in it.

    Raises:
      UserError: something the user can mend; ExpectationError: the run did not show what the config expects.
    """
    started = time.perf_counter()
    opened = open_model(config)
    prompt = prompt_tokens(config.prompt, opened.tokenizer, opened.config.vocab)
    request = Request(tuple(prompt), config.decode.max_new_tokens)
    request.check(opened.config.vocab, opened.config.max_tokens)
    context = config.cache.context_tokens or len(request.prompt) + request.max_new_tokens
    request.check(opened.config.vocab, context)
    records = opened.model.records(context)
    layouts = {name: make_layout(config.cache, records, name, context) for name in config.decode.residencies}
    budgets = {name: make_budget(opened, layout, config.decode.prefill_chunk) for name, layout in layouts.items()}
    if opened.note:
        console.print(f"{opened.note}.")
    console.print(report.memory_table(budgets, layouts))
    for residency, budget in budgets.items():
        try:
            budget.check()
        except MemoryError as error:
            raise UserError(f"{residency}: {error}") from error

    with run_folder(Path(config.runs), config.name) as folder:
        with report.progress(console) as bar:
            params = opened.load(bar.stage("reading the model"))
        outcomes = [
            _decode(
                config,
                opened,
                params,
                request,
                layouts[residency],
                budgets[residency],
                console,
                folder.partial / "profile" / residency if profile else None,
            )
            for residency in config.decode.residencies
        ]
        first, *others = [outcome for outcome in outcomes if outcome.residency != "no_io"] or outcomes
        bitwise = all(same_bits(first, outcome) for outcome in others) if others else None
        result = describe(config, outcomes, bitwise)
        result["text"] = opened.tokenizer.decode(first.tokens) if opened.tokenizer else str(first.tokens)
        result["unmet"] = list(unmet(config, outcomes, bitwise))
        result["wall_s"] = time.perf_counter() - started
        result["peak_host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        report.show(console, result, outcomes)
        if profile:
            console.print(stage_table({outcome.residency: outcome.stage_us or {} for outcome in outcomes}))
        (folder.partial / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if not report.plot(folder.partial / "result.png", outcomes):
            console.print("no plot: it needs matplotlib (pip install 'hisparse-jax[plots]')")
    console.print(f"written to [bold]{folder.final}[/bold]")
    if result["unmet"]:
        raise ExpectationError("; ".join(result["unmet"]))
    return folder.final


def _decode(
    config: Config, opened: Opened, params: Any, request: Request, layout: Layout, budget: Budget, console: Console,
    profile: Path | None,
) -> Outcome:  # fmt: skip
    decode, tokenizer = config.decode, opened.tokenizer
    stop = tokenizer.stop_tokens if tokenizer is not None and decode.stop else ()
    with report.progress(console) as bar:
        prefill = bar.stage(f"{layout.residency}: prefill")
        tokens = bar.stage(f"{layout.residency}: decode")
        done = 0

        def decoded(number: int, token: int) -> None:
            nonlocal done
            done += 1
            tokens(done, request.max_new_tokens)

        engine = Engine(
            opened.model, params, layout, vocab=opened.config.vocab, steps=decode.steps,
            prefill_chunk=decode.prefill_chunk, stop_tokens=stop, keep_logits=True,
            implementation=decode.implementation, events=Events(prefill, decoded), profile=profile,
        )  # fmt: skip
        engine.submit(request)
        completions = engine.run()
    times = engine.stage_us() if profile else None
    return Outcome(layout.residency, layout, budget, completions, engine.metrics, times)


def same_bits(one: Outcome, other: Outcome) -> bool:
    """Whether two runs gave the same tokens and, bit for bit, the same logits at every step."""
    for a, b in zip(one.completions, other.completions, strict=True):
        if a.tokens != b.tokens or len(a.logits) != len(b.logits):
            return False
        if any(x.tobytes() != y.tobytes() for x, y in zip(a.logits, b.logits, strict=True)):
            return False
    return True


def unmet(config: Config, outcomes: list[Outcome], bitwise: bool | None) -> Iterator[str]:
    """What the config expects and the run did not show."""
    if config.expect.bitwise and bitwise is False:
        yield "the residencies do not agree to the last bit"
    if not config.expect.misses:
        return
    for outcome in outcomes:
        if outcome.residency == "full":
            continue
        idle = np.flatnonzero(outcome.metrics.misses_by_table() == 0)
        if idle.size:
            yield (
                f"{outcome.residency}: tables {idle.tolist()} never missed, so nothing was shown: "
                "lower cache.hot_slots or lengthen the prompt"
            )
        if outcome.residency == "hisparse" and outcome.fetched_bytes() == 0:
            yield "hisparse: nothing was read from the host pool"


def describe(config: Config, outcomes: list[Outcome], bitwise: bool | None) -> dict[str, Any]:
    """All figures of a run, as JSON."""
    return {
        "config": dataclasses.asdict(config),
        "environment": environment(),
        "bitwise": bitwise,
        "outcomes": {outcome.residency: _figures(outcome) for outcome in outcomes},
    }


def _figures(outcome: Outcome) -> dict[str, Any]:
    metrics, layout = outcome.metrics, outcome.layout
    tokens = max(metrics.decode_tokens, 1)
    return {
        "valid_output": outcome.residency != "no_io",
        "tokens": [completion.tokens for completion in outcome.completions],
        "finish": [completion.finish for completion in outcome.completions],
        "layout": dataclasses.asdict(layout),
        "device_bytes": dict(outcome.budget.device),
        "host_bytes": dict(outcome.budget.host),
        "row_bytes_per_request": outcome.budget.device["rows"] // layout.request_slots,
        "hit_rate": _json_float(metrics.hit_rate()),
        "hit_rate_by_table": [_json_float(rate) for rate in metrics.hit_rate(axis=(0,))],
        "hit_rate_by_step": [_json_float(rate) for rate in metrics.hit_rate(axis=(1,))],
        "misses_by_table": metrics.misses_by_table().tolist(),
        "fetched_bytes_per_token": outcome.fetched_bytes() / tokens,
        "compile_s": metrics.compile_s,
        "prefill_s": metrics.prefill_s,
        "prefill_tokens": metrics.prefill_tokens,
        "decode_s": metrics.decode_s,
        "decode_tokens": metrics.decode_tokens,
        "decode_tokens_per_s": None if outcome.stage_us else _json_float(metrics.tokens_per_s),  # not while profiled
        "stage_us": outcome.stage_us,
    }


def _json_float(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)
