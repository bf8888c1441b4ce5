# SPDX-License-Identifier: Apache-2.0
"""What a throughput run shows: figures drawn from its points, tables, a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Points = Sequence[Mapping[str, Any]]
LEAST_IO = 0.01  # of a step; what is less can't be told from noise, nor how much of it is hidden


def line(point: Mapping[str, Any], layers: int, all_layers: int) -> str:
    """One point, as it comes, of so many of the model's layers."""
    where = f"{point['context']:>7} tokens x {point['requests']:>3} {point['mode']:<8}"
    if "error" in point:
        return f"{where} {point['error']}"
    return (
        f"{where} {point['step_ms']:8.3f} ms a step, {point['tokens_per_s']:9.1f} tokens/s (with {layers} of "
        f"{all_layers} layers), misses {point['miss_rate']:6.2%}, compiled in {point['compile_s']:.0f} s"
        + (f", outside kernels {point['outside_kernels']:.1%}" if "outside_kernels" in point else "")
        + (f", idle {point['idle_share']:.1%}" if point.get("idle_share") is not None else "")
    )


def label(mode: str) -> str:
    """The name of a mode where its figures are shown."""
    return "no_io (output invalid)" if mode == "no_io" else mode


def summary(points: Points, group_sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Ratios of the modes at every context and concurrency, and peaks of every context.

    * `no_io_to_full`: step times at equal batch.
    * `hidden_share`: what prefetch takes off `sync`, over the followers' part of what fetching adds to `no_io`; not
      where fetching adds less than `LEAST_IO` to it.
    * `of_no_io`: tokens/s of prefetch over those of no_io.
    * `same_tokens`: whether full, sync and prefetch, as many of them as there are, emitted the same tokens.
    * peaks: the highest tokens/s of a mode among the points that fit by the rule, and that of prefetch (or, without it,
      of sync) over that of full.
    """
    followers = 1 - len(group_sizes) / sum(group_sizes)
    out: list[dict[str, Any]] = []
    timed = [point for point in points if "step_ms" in point]
    for context in dict.fromkeys(point["context"] for point in timed):
        here = [point for point in timed if point["context"] == context]
        for requests in sorted({point["requests"] for point in here}):
            by_mode = {point["mode"]: point for point in here if point["requests"] == requests}
            out.append({"context": context, "requests": requests} | ratios(by_mode, followers))
        out.append({"context": context} | _peaks(here))
    return out


def ratios(by_mode: Mapping[str, Mapping[str, Any]], followers: float) -> dict[str, Any]:
    """Ratios of one context and concurrency (see `summary`), those whose modes are there.

    Args:
      by_mode: a point's record by mode.
      followers: their share of the layers.
    """
    ms = {mode: point["step_ms"] for mode, point in by_mode.items()}
    out: dict[str, Any] = {"step_ms": ms}
    if "no_io" in ms and "full" in ms:
        out["no_io_to_full"] = ms["no_io"] / ms["full"]
    if {"sync", "prefetch", "no_io"} <= set(ms) and ms["sync"] > (1 + LEAST_IO) * ms["no_io"] and followers:
        out["hidden_share"] = (ms["sync"] - ms["prefetch"]) / (followers * (ms["sync"] - ms["no_io"]))
    for mode in ("prefetch", "sync"):
        if mode in ms and "no_io" in ms:
            out["of_no_io" if mode == "prefetch" else "sync_of_no_io"] = ms["no_io"] / ms[mode]
    valid = [point["tokens"] for mode, point in by_mode.items() if mode != "no_io"]
    if len(valid) > 1:
        out["same_tokens"] = len(set(valid)) == 1
    return out


def _peaks(points: Points) -> dict[str, Any]:
    peaks: dict[str, Any] = {}
    for point in points:
        best = peaks.get(point["mode"])
        if point["fits_by_rule"] and (best is None or point["tokens_per_s"] > best["tokens_per_s"]):
            peaks[point["mode"]] = {"requests": point["requests"], "tokens_per_s": point["tokens_per_s"]}
    ours = "prefetch" if "prefetch" in peaks else "sync"
    ratio = peaks[ours]["tokens_per_s"] / peaks["full"]["tokens_per_s"] if {ours, "full"} <= set(peaks) else None
    return {"peaks": peaks, "peak_ratio": ratio}


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Tables of all contexts."""
    rule = result["rule"]
    weights = rule["rank_weight_bytes_of_the_whole_model"] / 1e9
    console.print(
        f"caches may take {rule['cache_bytes'] / 1e9:.2f} GB by rule: ({rule['device_share']:.0%} of "
        f"{rule['device_bytes'] / 1e9:.1f} GB - {weights:.1f} GB of weights) "
        f"x {rule['simulated_layers']} / {rule['all_layers']} layers"
    )
    some = f"{rule['simulated_layers']} of {rule['all_layers']} layers"
    rows = [entry for entry in result["summary"] if "requests" in entry]
    modes = list(dict.fromkeys(mode for entry in rows for mode in entry["step_ms"]))
    fits = {(p["context"], p["requests"], p["mode"]): p["fits_by_rule"] for p in result["points"]}
    columns = [f"{label(mode)}, ms" for mode in modes]
    table = Table("context", "requests", *columns, "no_io / full", "hidden", "of no_io", "same tokens",
                  title="time per step (synthetic); * does not fit by the rule", title_justify="left")  # fmt: skip
    for entry in rows:
        cells = []
        for mode in modes:
            ms = entry["step_ms"].get(mode)
            mark = "*" if not fits.get((entry["context"], entry["requests"], mode)) else ""
            cells.append("" if ms is None else f"{ms:.3f}{mark}")
        ratios = [entry.get(name) for name in ("no_io_to_full", "hidden_share", "of_no_io")]
        cells += ["" if value is None else f"{value:.3f}" for value in ratios]
        same = {True: "yes", False: "NO", None: ""}[entry.get("same_tokens")]
        table.add_row(str(entry["context"]), str(entry["requests"]), *cells, same)
    console.print(table)
    for entry in result["summary"]:
        for mode, peak in entry.get("peaks", {}).items():
            console.print(
                f"{entry['context']} tokens, {label(mode)}: "
                f"{peak['tokens_per_s']:.0f} tokens/s with {some} at {peak['requests']} requests"
            )
        if entry.get("peak_ratio"):
            console.print(f"{entry['context']} tokens: hisparse over full at their peaks: {entry['peak_ratio']:.2f}")


def plot(path: Path, result: Mapping[str, Any]) -> bool:
    """Tokens/s against concurrency, one panel a context; hollow where a point does not fit by the rule.

    Returns:
      whether there is a plot: not without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    timed = [point for point in result["points"] if "step_ms" in point]
    contexts = list(dict.fromkeys(point["context"] for point in timed))
    rule = result["rule"]
    ylabel = f"tokens/s with {rule['simulated_layers']} of {rule['all_layers']} layers"
    figure = Figure(figsize=(6 * max(len(contexts), 1), 4), layout="constrained")
    panels = figure.subplots(1, max(len(contexts), 1), squeeze=False)[0]
    for axes, context in zip(panels, contexts, strict=False):
        for mode in dict.fromkeys(point["mode"] for point in timed):
            mine = sorted(
                (p["requests"], p["tokens_per_s"], p["fits_by_rule"])
                for p in timed
                if p["mode"] == mode and p["context"] == context
            )
            (drawn,) = axes.plot([m[0] for m in mine], [m[1] for m in mine], label=label(mode))
            for requests, rate, fits in mine:
                axes.plot(requests, rate, "o", color=drawn.get_color(), fillstyle="full" if fits else "none")
        axes.set(title=f"{context} tokens (synthetic)", xlabel="requests of one rank", ylabel=ylabel, xscale="log")
        axes.legend()
    figure.savefig(path, dpi=110)
    return True
