# SPDX-License-Identifier: Apache-2.0
"""The command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
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
    config = configs.load(name, overrides or [])
    return config if runs is None else dataclasses.replace(config, runs=runs)


@app.command()
def run(
    config: Experiment,
    overrides: Overrides = None,
    runs: Runs = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write traces, and a table of device time by stage.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Run an experiment: decode in each residency, compare bit by bit, write figures and a plot.

    A config with a `synthetic` section times a published shape over concurrency and context instead.
    Exits with 0 if the run showed what its config expects, with 2 and one line otherwise.
    """
    with _one_line_errors(debug):
        from hisparse_jax import experiment, throughput

        loaded = _load(config, overrides, runs)
        (experiment if loaded.synthetic is None else throughput).run(loaded, Console(), profile=profile)


@app.command()
def presets() -> None:
    """List the configs that come with the package."""
    table = Table("preset", "model", "selection", "runs")
    for name in configs.preset_names():
        one = configs.load(name)
        model, runs = one.model.file or one.model.path, ", ".join(one.decode.residencies)
        if one.synthetic is not None:
            model, runs = f"{one.model.published} (synthetic)", ", ".join(one.synthetic.modes)
        elif one.model.published is not None:
            model, runs = one.model.published, "to plan"
        table.add_row(name, model, one.selection.kind, runs)
    Console().print(table)


@app.command()
def generate(
    model: Annotated[str, typer.Option("--model", "-m", help="A GGUF file, a Hugging Face folder, or a hub id.")],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt. May be repeated.")] = None,
    prompt_file: Annotated[
        list[str] | None, typer.Option("--prompt-file", "-f", help="A text file with a prompt. May be repeated.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Tokens to generate at most.")] = 128,
    residency: Annotated[str, typer.Option("--residency", help="full, hisparse or no_io.")] = "hisparse",
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Put prompts into the model's chat format.")] = True,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens with this much probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many of the most likely tokens; 0 for all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the first prompt; each further one takes the next.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(help="More than 1 makes repetition less likely.")] = 1.0,
    ban: Annotated[list[int] | None, typer.Option(help="A token id never to choose. May be repeated.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text. May be repeated.")] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt, when all are done.")] = False,
    debug: Debug = False,
) -> None:
    """Generate text from prompts, streamed as it comes; several prompts are decoded together.

    Cache, selection and decode settings are those of a config and changed with `--set`, for instance
    `--set selection.budget_pages=64 --set cache.hot_slots=128`; `--set selection.kind=dsa` is for models that bring
    their own indexer, and chosen by itself for those.
    """
    with _one_line_errors(debug):
        from hisparse_jax import generation

        generation.run(
            generation.Options(
                model=model, prompts=tuple(prompt or ()), prompt_files=tuple(prompt_file or ()),
                max_new_tokens=max_new_tokens, residency=residency, chat=chat, temperature=temperature, top_p=top_p,
                top_k=top_k, seed=seed, repetition_penalty=repetition_penalty, banned=tuple(ban or ()),
                stop=tuple(stop or ()), overrides=tuple(overrides or ()), as_json=as_json,
            ),
            Console(highlight=False),
        )  # fmt: skip


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="A checkpoint with `case_*.safetensors` reference files.")],
    tolerance: Annotated[float, typer.Option(help="Largest logit difference allowed.")] = 2e-4,
    formats: Annotated[
        list[str] | None, typer.Option("--records", help="Also with this record format: bfloat16, fp8. DSA only.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Check a model against reference vectors: logits, tokens, selections, and both residencies bit by bit.

    Exits with 0 if everything agrees, with 1 if something is beyond the tolerance.
    """
    with _one_line_errors(debug):
        from hisparse_jax import verify as verification

        console = Console()
        with console.status("verifying") as status:
            report = verification.verify(folder, tolerance, formats=tuple(formats or ()), progress=status.update)
        verification.show(report, console)
        if not report.ok:
            raise typer.Exit(1)


@app.command()
def plan(
    config: Experiment,
    machine: Annotated[str, typer.Option("--machine", help="H200, B200 or GH200.")] = "H200",
    context_tokens: Annotated[int | None, typer.Option(help="Instead of the config's.", min=1)] = None,
    devices: Annotated[int | None, typer.Option(help="The parameters are split over this many.", min=1)] = None,
    device_gib: Annotated[float | None, typer.Option(help="Device memory, instead of the machine's.")] = None,
    host_gib: Annotated[float | None, typer.Option(help="Host memory, instead of the machine's.")] = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Plan a run without allocating anything: bytes, concurrency in both residencies, prefetches, hot slots."""
    with _one_line_errors(debug):
        from hisparse_jax import planner
        from hisparse_jax.presets import plan_config

        planned = plan_config(
            _load(config, overrides), machine, context_tokens=context_tokens, devices=devices,
            device_bytes=_bytes(device_gib), host_bytes=_bytes(host_gib),
        )  # fmt: skip
        planner.show(planned, Console())


def _bytes(gib: float | None) -> float | None:
    return None if gib is None else gib * 2**30


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
