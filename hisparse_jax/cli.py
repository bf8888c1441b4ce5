# SPDX-License-Identifier: Apache-2.0
"""The command line."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hisparse_jax import config as configs
from hisparse_jax.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Hierarchical sparse-attention decoding for JAX.

Sparse attention reads a few thousand records of the KV history a step, but any record may be next. HiSparse keeps the
complete history in pinned host memory and a small fixed set of hot records of each request on the device; misses come
in inside the jitted decode step. Only placement changes: **outputs are bitwise equal to full residency**.

Start with `hisparse run quickstart`; `hisparse presets` lists what else there is to run.""",
)

Experiment = Annotated[str, typer.Argument(help="A preset's name or a YAML file.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="Override one setting: `--set cache.hot_slots=96`. May be repeated."),
]
Runs = Annotated[str | None, typer.Option("--runs", help="Folder for run folders. Default: the config's, `runs`.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _load(name: str, overrides: list[str] | None, runs: str | None = None) -> configs.Config:
    changes = list(overrides or [])
    if runs is not None:
        changes.append(f"runs={runs!r}")
    return configs.load(name, changes)


@app.command()
def run(config: Experiment, overrides: Overrides = None, runs: Runs = None, debug: Debug = False) -> None:
    """Run an experiment: decode in each residency, compare bit by bit, write figures and a plot.

    Exits with 0 if the run showed what its config expects, with 2 and one line otherwise.
    """
    with _one_line_errors(debug):
        from hisparse_jax import experiment

        experiment.run(_load(config, overrides, runs), Console())


@app.command()
def presets() -> None:
    """List the configs that come with the package."""
    table = Table("preset", "model", "selection", "residencies")
    for name in configs.preset_names():
        one = configs.load(name)
        model = one.model.file or one.model.path or ""
        table.add_row(name, model, one.selection.kind, ", ".join(one.decode.residencies))
    Console().print(table)


class _one_line_errors:  # noqa: N801 (a context manager reads as a function)
    """Shows an error that the user can mend as one line and exits with 2."""

    def __init__(self, debug: bool) -> None:
        self._debug = debug

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, UserError) and not self._debug:
            Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(' '.join(str(error).split()))}")
            raise typer.Exit(2)
        return False


def main() -> None:
    """Entry point of the `hisparse` command."""
    app()


if __name__ == "__main__":
    main()
