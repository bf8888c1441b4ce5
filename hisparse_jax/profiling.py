# SPDX-License-Identifier: Apache-2.0
"""Where a decode step's time goes: a trace on disk, and device time by stage.

Stages are the named scopes of the code. Inside a CUDA graph kernels carry no names of scopes, so stages are timed in a
program compiled without graphs (`compiler_options.decode_options(graphs=False)`): kernels run one after the other,
nothing overlaps. How much of a program with graphs no kernel runs is told by `idle_share`.
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

# In the order of a step; "other" is what has no scope.
STAGES = (
    "project", "append", "index_project", "index_scores", "selection", "resolve", "fetch", "attention", "mlp",
    "head", "backup", "sample", "other",
)  # fmt: skip

_GPU = "/device:GPU"
_CONTAINERS = re.compile(r"(while|call|conditional)(\.\d+)?$")  # their time is that of what they hold
_NAMED = re.compile(r"%?([\w.\-]+) = .*metadata=\{.*?op_name=\"([^\"]*)\"")


@contextlib.contextmanager
def traced(folder: Path | None) -> Generator[None]:
    """Writes a trace of the block into a folder, for TensorBoard or Perfetto; does nothing without one."""
    if folder is None:
        yield
        return
    with jax.profiler.trace(str(folder)):
        yield


def stage_of(op_name: str) -> str:
    """The innermost stage in the name of an operation, "jit(chunk)/while/body/attention/dot_general"."""
    return next((part for part in reversed(op_name.split("/")) if part in STAGES), "other")


def operation_names(module_text: str) -> dict[str, str]:
    """From the text of a compiled module: the source name of every instruction that has one."""
    found = map(_NAMED.search, module_text.splitlines())
    return {match[1]: match[2] for match in found if match}


def stage_us(folder: Path, operations: Mapping[str, str]) -> dict[str, float]:
    """Device time by stage in a trace, all its steps together, in the order of a step; on a CPU time of all threads.

    Args:
      folder: of `traced`.
      operations: see `operation_names`; of the program that was traced.
    Raises:
      FileNotFoundError: the folder has no trace.
    """
    planes = _planes(folder)
    gpus = [plane for plane in planes if plane.name.startswith(_GPU)]
    devices = gpus or [plane for plane in planes if plane.name == "/host:CPU"]
    total = dict.fromkeys(STAGES, 0.0)
    for line in (line for plane in devices for line in plane.lines):
        for event in line.events:
            with warnings.catch_warnings():  # the binding of event.stats warns about itself
                warnings.simplefilter("ignore", DeprecationWarning)
                stats = {key: value for key, value in event.stats if key in ("hlo_op", "name")}
            named = str(stats.get("name", ""))
            operation = str(stats.get("hlo_op", ""))
            if (gpus or operation) and not _CONTAINERS.match(operation):  # a host does other things too
                total[stage_of(named or operations.get(operation, ""))] += event.duration_ns / 1e3
    return {stage: us for stage, us in total.items() if us}


def idle_share(folder: Path) -> float | None:
    """Of the time from a trace's first kernel to the end of its last, the part in which none runs; None without a GPU.

    Args:
      folder: of `traced`; of a program with its graphs, whose kernels run side by side.
    Raises:
      FileNotFoundError: the folder has no trace.
    """
    kernels = [
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in _planes(folder) if plane.name.startswith(_GPU) for line in plane.lines for event in line.events
    ]  # fmt: skip
    if not kernels:
        return None
    first, last = min(begin for begin, _ in kernels), max(end for _, end in kernels)
    return 1 - covered(kernels) / (last - first)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals, each from its begin to its end."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(end - max(begin, until), 0)
        until = max(until, end)
    return total


def _planes(folder: Path) -> list[Any]:
    """The planes of the last trace of a folder."""
    traces = sorted(folder.rglob("*.xplane.pb"))
    if not traces:
        raise FileNotFoundError(f"{folder} holds no trace")
    return list(jax.profiler.ProfileData.from_file(str(traces[-1])).planes)


def stage_table(by_run: Mapping[str, Mapping[str, float]]) -> Table:
    """Microseconds a step by stage, one column a run."""
    title = "device time, us a step (profiled: nothing overlaps; resolve includes the anchors' fetch)"
    table = Table("stage", *by_run, title=title, title_justify="left")
    for stage in STAGES:
        if any(stage in times for times in by_run.values()):
            table.add_row(stage, *(f"{times.get(stage, 0):.1f}" for times in by_run.values()))
    table.add_row("[bold]all[/bold]", *(f"[bold]{sum(times.values()):.1f}[/bold]" for times in by_run.values()))
    return table
