# SPDX-License-Identifier: Apache-2.0
"""What verify found: sets of units compared, results, and a table of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_ROUNDING = 1e-5  # scores this close may be ordered either way by float32


@dataclass(frozen=True)
class Result:
    """One case in one batch.

    Attributes:
      case: its name.
      batch: "alone" or "together".
      records: how records were stored.
      logit_difference: largest difference to the reference's logits, at decode steps in both residencies and, where the
        reference has them, over the prompt.
      tokens_agree: decode steps and last prompt position whose most likely token is the reference's.
      tokens: of how many.
      selections_differ: sets of selected units that differ, less those that differ by rounding: whose units that are in
        one set only have reference scores within 1e-5.
      selections: how many sets were compared.
      misses: records that had to come from the host pool.
      bitwise: the logits and selections of both residencies are the same bits at every step.
      record_error: root mean square error of the stored latents of the prompt, relative to the latents; 0 for "plain".
    """

    case: str
    batch: str
    records: str
    logit_difference: float
    tokens_agree: int
    tokens: int
    selections_differ: int
    selections: int
    misses: int
    bitwise: bool
    record_error: float = 0.0


@dataclass(frozen=True)
class Report:
    """What verify found.

    Attributes:
      folder: what was verified.
      tolerance: largest logit difference allowed.
      results: with records in the checkpoint's own type.
      formats: with narrower records, if asked for. Their error is reported and not judged: once a selection differs,
        a model of random weights goes its own way.
      note: what of the checkpoint was not read.
    """

    folder: Path
    tolerance: float
    results: tuple[Result, ...]
    formats: tuple[Result, ...] = ()
    note: str = ""

    def passes(self, result: Result) -> bool:
        """Whether one case is within tolerance."""
        if result in self.formats:
            return result.bitwise
        exact = result.tokens_agree == result.tokens and result.selections_differ == 0 and result.bitwise
        return exact and result.logit_difference <= self.tolerance

    @property
    def ok(self) -> bool:
        return all(self.passes(result) for result in (*self.results, *self.formats))


def show(report: Report, console: Console) -> None:
    """Prints a report as a table that 80 columns hold, and what there is to say about it."""
    everything = (*report.results, *report.formats)
    title = f"{escape(str(report.folder))} (tolerance {report.tolerance:g})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=0, show_edge=False)
    table.add_column("case", overflow="fold")
    for heading in ("batch", *_columns(report, everything[0]), "ok"):
        table.add_column(heading, no_wrap=True)
    for result in everything:
        cells = _columns(report, result).values()
        passed = "[green]ok[/green]" if report.passes(result) else "[red]FAIL[/red]"
        table.add_row(escape(result.case), result.batch, *cells, passed)
    console.print(table)
    if not any(result.misses for result in everything):
        console.print(
            "[yellow]warning:[/yellow] no case missed, so hisparse was not exercised: every history fits into the hot "
            "slots; add a case with a longer prompt."
        )
    if report.note:
        console.print(f"{report.note}.")


def _columns(report: Report, result: Result) -> dict[str, str]:
    """A result by column; those that say the same of all cases are left out."""
    columns = {"records": result.records} if report.formats else {}
    columns |= {
        "logits": f"{result.logit_difference:.2e}",
        "tokens": f"{result.tokens_agree}/{result.tokens}",
        "sets": f"{result.selections_differ}/{result.selections}" if result.selections else "dense",
        "misses": str(result.misses),
        "bitwise": "equal" if result.bitwise else "[red]DIFFERENT[/red]",
    }
    if any(one.record_error for one in report.formats):
        columns["error"] = f"{result.record_error:.2%}" if result.record_error else ""
    return columns


def as_sets(ids: np.ndarray, units: int) -> np.ndarray:
    """Ids `[..., K]`, -1 padded, as bool `[..., units]`."""
    sets = np.zeros((*ids.shape[:-1], units + 1), bool)
    np.put_along_axis(sets, np.where(ids >= 0, ids, units).astype(np.int64), True, axis=-1)
    return sets[..., :units]


def differing(ours: np.ndarray, theirs: np.ndarray, scores: np.ndarray) -> tuple[int, int]:
    """How many sets, bool `[..., units]`, differ by more than rounding of `scores`, and how many there are."""
    odd = ours != theirs
    border = np.where(odd, scores, np.nan)
    count = 0
    for row in border[odd.any(axis=-1)]:
        values = row[np.isfinite(row)]
        balanced = len(values) >= 2 and values.max() - values.min() < _ROUNDING
        count += not balanced
    return count, int(np.prod(ours.shape[:-1]))
