# SPDX-License-Identifier: Apache-2.0
"""What a run shows: progress, tables, a plot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hisparse_jax.cache.layout import Budget, Layout, Residency, gib

if TYPE_CHECKING:
    from hisparse_jax.experiment import Outcome


class Bars:
    """Progress bars, one for each stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def stage(self, name: str) -> Callable[[int, int], None]:
        """A callback of done and total that moves the bar of this stage."""
        task = self._progress.add_task(name, total=None)

        def move(done: int, total: int) -> None:
            self._progress.update(task, completed=done, total=total)

        return move


@contextlib.contextmanager
def progress(console: Console) -> Generator[Bars]:
    """Progress bars for the length of a block."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as bars:
        yield Bars(bars)


def memory_table(budgets: Mapping[Residency, Budget], layouts: Mapping[Residency, Layout]) -> Table:
    """Bytes by use, one column for each residency."""
    table = Table(title="memory", title_justify="left")
    table.add_column("")
    for residency in budgets:
        table.add_column(residency, justify="right")
    rows = {
        "rows on the device, each request": [
            budgets[name].device["rows"] // layout.request_slots for name, layout in layouts.items()
        ]
    }
    for part in next(iter(budgets.values())).device:
        rows[f"device: {part}"] = [budget.device[part] for budget in budgets.values()]
    rows["device: all"] = [sum(budget.device.values()) for budget in budgets.values()]
    rows["host: pool"] = [budget.host["host pool"] for budget in budgets.values()]
    for name, values in rows.items():
        table.add_row(name, *map(gib, values))
    return table


def show(console: Console, result: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """The text and figures of a run."""
    console.rule("generated text")
    console.print(escape(result["text"]))
    console.rule()
    if result["bitwise"] is not None:
        compared = ", ".join(outcome.residency for outcome in outcomes if outcome.residency != "no_io")
        verdict = "yes, bitwise (logits of every step)" if result["bitwise"] else "[red]no[/red]"
        console.print(f"outputs identical ({compared}): [bold]{verdict}[/bold]")
    table = Table(title="decoding", title_justify="left")
    table.add_column("")
    for outcome in outcomes:
        label = outcome.residency
        table.add_column(label + (" (output invalid)" if label == "no_io" else ""), justify="right")
    figures = [result["outcomes"][outcome.residency] for outcome in outcomes]
    table.add_row("hit rate", *[_percent(one["hit_rate"]) for one in figures])
    table.add_row("bytes fetched per token", *[gib(int(one["fetched_bytes_per_token"])) for one in figures])
    table.add_row(
        "tokens/s", *["-" if (rate := one["decode_tokens_per_s"]) is None else f"{rate:.1f}" for one in figures]
    )
    table.add_row("prefill, s", *[f"{one['prefill_s']:.1f}" for one in figures])
    table.add_row("compilation, s", *[f"{one['compile_s']:.1f}" for one in figures])
    console.print(table)
    for outcome, one in zip(outcomes, figures, strict=True):
        if outcome.residency != "full":
            rates = " ".join(_percent(rate) for rate in one["hit_rate_by_table"])
            console.print(f"{outcome.residency}: hit rate by layer: {rates}")


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f}%"


def plot(path: Path, outcomes: Sequence[Outcome]) -> bool:
    """Hit rate over steps and by table, and resident bytes against context for each residency, as a PNG.

    Returns:
      whether there is a plot: not without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    over_steps, by_table, against_context = figure.subplots(1, 3)
    for outcome in outcomes:
        if outcome.residency == "full":
            continue
        over_steps.plot(100 * outcome.metrics.hit_rate(axis=(1,)), label=outcome.residency)
        rates = 100 * outcome.metrics.hit_rate(axis=(0,))
        by_table.bar(np.arange(len(rates)), rates, label=outcome.residency)
    over_steps.set(title="hit rate by decode step", xlabel="step", ylabel="%", ylim=(0, 103))
    by_table.set(title="hit rate by layer", xlabel="layer", ylabel="%", ylim=(0, 103))

    for outcome in outcomes:
        layout = outcome.layout
        longest = 4 * layout.context_tokens
        tokens = np.linspace(layout.record_tokens, longest, 200)
        records = np.ceil(tokens / layout.record_tokens)
        slots = records if layout.is_full else np.full_like(records, layout.slots_per_request)
        index = outcome.budget.device["index"] / layout.request_slots / layout.records
        resident = layout.spaces * slots * layout.row_bytes + index * records
        against_context.plot(tokens, resident / 2**20, label=outcome.residency)
    against_context.axvline(outcomes[0].layout.context_tokens, color="grey", linewidth=0.8, linestyle=":")
    against_context.locator_params(axis="x", nbins=6)
    against_context.set(
        title="rows and index in fast memory, one request", xlabel="context, tokens", ylabel="MiB", ylim=(0, None)
    )
    for axes in (over_steps, by_table, against_context):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower right" if axes is not against_context else "upper left")
    figure.savefig(path, dpi=110)
    return True
