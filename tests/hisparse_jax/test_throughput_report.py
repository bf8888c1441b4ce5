# SPDX-License-Identifier: Apache-2.0
"""Figures drawn from the points of a throughput run, worked out by hand."""

from __future__ import annotations

import builtins
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from hisparse_jax import throughput_report as report

ROOT = Path(report.__file__).parents[1]
GROUPS = (4, 4)  # three of four layers are followers


def point(
    mode: str, ms: float, *, requests: int = 8, context: int = 1024, fits: bool = True, tokens: str = "a"
) -> dict:
    return {
        "context": context, "requests": requests, "mode": mode, "step_ms": ms, "tokens_per_s": 1e3 * requests / ms,
        "fits_by_rule": fits, "tokens": tokens, "miss_rate": 0.125, "compile_s": 2.0,
    }  # fmt: skip


def one(*points: dict, groups=GROUPS) -> dict:
    """What is said of a single concurrency."""
    first, peaks = report.summary(points, groups)
    assert "requests" not in peaks
    return first


ALL = (point("full", 5.0), point("sync", 8.0), point("prefetch", 6.0), point("no_io", 4.0, tokens="b"))


def test_ratios_by_hand():
    got = one(*ALL)
    assert got["step_ms"] == {"full": 5.0, "sync": 8.0, "prefetch": 6.0, "no_io": 4.0}
    assert got["no_io_to_full"] == pytest.approx(4 / 5)
    assert got["hidden_share"] == pytest.approx((8 - 6) / (3 / 4 * (8 - 4)))
    assert got["of_no_io"] == pytest.approx(4 / 6) and got["sync_of_no_io"] == pytest.approx(4 / 8)
    assert got["same_tokens"] is True


@pytest.mark.parametrize(
    ("prefetch", "share"), [(8.0, 0.0), (5.0, 1.0), (9.0, -1 / 3), (4.0, 4 / 3)], ids=["none", "all", "loss", "anchors"]
)
def test_hidden_share(prefetch, share):
    """1 when prefetch costs what the anchors' fetches do; less than 0 when it is slower than fetching just before."""
    got = one(point("sync", 8.0), point("prefetch", prefetch), point("no_io", 4.0))
    assert got["hidden_share"] == pytest.approx(share)


@pytest.mark.parametrize(("groups", "followers"), [((1, 1, 4), 3 / 6), ((2,), 1 / 2), ((1, 1, *[4] * 19), 57 / 78)])
def test_followers_part(groups, followers):
    assert one(*ALL, groups=groups)["hidden_share"] == pytest.approx(2 / (followers * 4))


def test_no_hidden_share_where_nothing_could_be_hidden():
    assert "hidden_share" not in one(*ALL, groups=(1, 1, 1))  # no followers
    assert "hidden_share" not in one(point("sync", 4.0), point("prefetch", 4.0), point("no_io", 4.0))  # no fetches
    assert "hidden_share" not in one(point("sync", 4.03), point("prefetch", 4.0), point("no_io", 4.0))  # noise
    assert "hidden_share" in one(point("sync", 4.05), point("prefetch", 4.0), point("no_io", 4.0))


@pytest.mark.parametrize(
    ("modes", "ratios"),
    [
        (("full",), set()),
        (("no_io",), set()),
        (("full", "no_io"), {"no_io_to_full"}),
        (("full", "prefetch"), {"same_tokens"}),
        (("sync", "no_io"), {"sync_of_no_io"}),
        (("prefetch", "no_io"), {"of_no_io"}),
        (("sync", "prefetch", "no_io"), {"hidden_share", "of_no_io", "sync_of_no_io", "same_tokens"}),
        (("full", "sync", "no_io"), {"no_io_to_full", "sync_of_no_io", "same_tokens"}),
    ],
)
def test_modes_that_are_missing(modes, ratios):
    got = one(*(p for p in ALL if p["mode"] in modes))
    assert set(got) == {"context", "requests", "step_ms"} | ratios


def test_other_tokens_are_noticed_and_those_of_no_io_are_not_compared():
    assert one(point("full", 5.0), point("sync", 8.0), point("no_io", 4.0, tokens="b"))["same_tokens"] is True
    assert one(point("full", 5.0), point("prefetch", 8.0, tokens="c"))["same_tokens"] is False


def test_peaks_are_among_the_points_that_fit():
    points = [
        point("full", 5.0, requests=4), point("full", 6.0, requests=8), point("full", 7.0, requests=16, fits=False),
        point("prefetch", 6.0, requests=8), point("prefetch", 8.0, requests=16), point("prefetch", 40.0, requests=32),
        point("no_io", 9.0, requests=8, fits=False),
    ]  # fmt: skip
    peaks = report.summary(points, GROUPS)[-1]
    assert peaks["peaks"] == {
        "full": {"requests": 8, "tokens_per_s": pytest.approx(8000 / 6)},
        "prefetch": {"requests": 16, "tokens_per_s": 2000},  # 32 requests are slower
    }
    assert peaks["peak_ratio"] == pytest.approx(2000 / (8000 / 6))


def test_no_ratio_of_peaks_without_both():
    assert report.summary([point("prefetch", 6.0)], GROUPS)[-1]["peak_ratio"] is None
    both = report.summary([point("sync", 6.0), point("full", 3.0)], (1, 1))
    assert both[-1]["peak_ratio"] == pytest.approx(0.5)
    nothing_fits = report.summary([point("full", 5.0, fits=False), point("prefetch", 6.0)], GROUPS)[-1]
    assert nothing_fits["peak_ratio"] is None and list(nothing_fits["peaks"]) == ["prefetch"]


def test_contexts_are_apart_and_points_that_failed_left_out():
    failed = {"context": 2048, "requests": 16, "mode": "full", "fits_by_rule": False, "error": "does not fit in memory"}
    points = [*ALL, failed, point("full", 9.0, context=2048), point("no_io", 3.0, context=2048, requests=16)]
    got = report.summary(points, GROUPS)
    assert [(entry["context"], entry.get("requests")) for entry in got] == [
        (1024, 8), (1024, None), (2048, 8), (2048, 16), (2048, None),
    ]  # fmt: skip
    assert got[3]["step_ms"] == {"no_io": 3.0} and got[2]["step_ms"] == {"full": 9.0}
    assert report.summary([failed], GROUPS) == []


def result(points: list[dict]) -> dict:
    rule = {
        "device_bytes": 150e9, "device_share": 0.85, "rank_weight_bytes_of_the_whole_model": 107e9,
        "simulated_layers": 8, "all_layers": 78, "cache_bytes": 2.0e9,
    }  # fmt: skip
    return {"rule": rule, "points": points, "summary": report.summary(points, GROUPS)}


FAILED = {"context": 1024, "requests": 16, "mode": "full", "fits_by_rule": False, "error": "does not fit in memory"}


def test_what_is_shown():
    points = [*ALL, FAILED, point("sync", 12.0, requests=16, fits=False), point("no_io", 11.0, requests=16)]
    console = Console(file=io.StringIO(), width=200)
    report.show(console, result(points))
    text = console.file.getvalue()
    assert "caches may take 2.00 GB by rule: (85% of 150.0 GB - 107.0 GB of weights) x 8 / 78 layers" in text
    rows = [line.replace("│", " ").split() for line in text.splitlines() if "│ 1024" in line]
    assert rows == [
        ["1024", "8", "5.000", "8.000", "6.000", "4.000", "0.800", "0.667", "0.667", "yes"],
        ["1024", "16", "12.000*", "11.000"],
    ]
    assert "no_io (output invalid), ms" in text and "synthetic" in text
    assert "1024 tokens: hisparse over full at their peaks: 0.83" in text


def test_other_tokens_are_shown():
    console = Console(file=io.StringIO(), width=200)
    report.show(console, result([point("full", 5.0), point("sync", 8.0, tokens="b")]))
    assert " NO " in console.file.getvalue()


def test_a_line_as_it_comes():
    assert " ".join(report.line(ALL[2], 8, 78).split()) == (
        "1024 tokens x 8 prefetch 6.000 ms a step, 1333.3 tokens/s (with 8 of 78 layers), misses 12.50%, compiled in "
        "2 s"
    )
    profiled = {**ALL[0], "outside_kernels": 0.041, "idle_share": None}
    assert report.line(profiled, 8, 78).endswith("in 2 s, outside kernels 4.1%")
    assert report.line({**profiled, "idle_share": 0.02}, 8, 78).endswith("outside kernels 4.1%, idle 2.0%")
    assert report.line(FAILED, 8, 78).endswith("full     does not fit in memory")


@pytest.mark.parametrize("points", [list(ALL), [*ALL, FAILED, point("sync", 12.0, context=2048, fits=False)], [FAILED]])
def test_plot(tmp_path: Path, points):
    assert report.plot(tmp_path / "plot.png", result(points))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_no_plot_without_matplotlib(tmp_path: Path, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    assert not report.plot(tmp_path / "plot.png", result(list(ALL)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "where", "groups"),
    [
        ("glm52_prefetch_32k", "", GROUPS),
        ("glm52_prefetch_128k", ", 128K", GROUPS),
        ("dsv32_decode_32k", ", DeepSeek-V3.2", (1,) * 8),
        ("qwen3_quest_32k", ", Qwen3-8B", (1,) * 8),
    ],
)
def test_the_docs_show_the_records(name, where, groups):
    """Whole rows of the tables of docs/throughput.md, peaks too, and the summaries are of the points that are there."""
    lines = (ROOT / "docs/throughput.md").read_text().splitlines()
    record = json.loads((ROOT / f"benchmarks/results/{name}_nvidia_h200.json").read_text())
    assert record["label"].startswith("synthetic") and record["config"]["runs"] == "runs"
    points = {(point["requests"], point["mode"]): point for point in record["points"]}
    ratios = ["hidden_share", "of_no_io"] if max(groups) > 1 else ["sync_of_no_io"]
    assert record["summary"] == report.summary(record["points"], groups)
    *entries, peaks = record["summary"]
    for mode, peak in peaks["peaks"].items():
        ratio = peak["tokens_per_s"] / peaks["peaks"]["full"]["tokens_per_s"]
        cells = f"| {peak['requests']} | {peak['tokens_per_s']:.0f} | {f'{ratio:.2f}' if mode != 'full' else 1} |"
        assert any(line.startswith(f"| `{mode}`") and line.endswith(cells) for line in lines), cells
    for entry in entries:
        requests = entry["requests"]
        cells = [f"{requests}{where}"]
        for mode in record["config"]["synthetic"]["modes"]:
            ms = entry["step_ms"].get(mode)
            beyond = ms is not None and not points[requests, mode]["fits_by_rule"]
            cells.append("" if ms is None else f"{ms:.3f}" + "*" * beyond)
        cells.append(f"{points[requests, 'sync']['fetched_bytes_per_step'] / 1e6:.1f} MB")
        cells += [f"{entry[ratio]:.3f}" if ratio in entry else "" for ratio in [*ratios, "no_io_to_full"]]
        row = re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(cells)} |")
        assert row in lines, row


@pytest.mark.parametrize(
    "name, shape",
    [
        ("glm52_prefetch_32k", "GLM-5.2, 32,768"),
        ("glm52_prefetch_128k", "GLM-5.2, 131,072"),
        ("dsv32_decode_32k", "DeepSeek-V3.2, 32,768"),
    ],
)
def test_the_docs_show_the_parts(name, shape):
    lines = [line.strip() for line in (ROOT / "docs/decode.md").read_text().splitlines()]
    text = (ROOT / f"benchmarks/results/parts_nvidia_h200_{name}.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    assert len(records) % 3 == 0 and len(records) > 3
    for no_io, one, two in zip(records[::3], records[1::3], records[2::3], strict=True):
        assert (no_io["mode"], one["parts"], two["parts"]) == ("no_io", 1, 2)
        cells = [shape, str(no_io["requests"]), f"{no_io['step_ms']:.3f}"]
        for record in (one, two):
            cells += [f"{record['step_ms']:.3f}", f"{no_io['step_ms'] / record['step_ms']:.3f}"]
        assert f"| {' | '.join(cells)} |" in lines, cells


def test_the_docs_show_what_a_condition_cost():
    lines = (ROOT / "docs/decode.md").read_text().splitlines()
    before, after = (
        {
            (point["requests"], point["mode"]): point
            for point in json.loads((ROOT / f"benchmarks/results/{name}_nvidia_h200.json").read_text())["points"]
        }
        for name in ("qwen3_quest_32k_condition", "qwen3_quest_32k")
    )
    same = {at[0] for at in before if at[1] == "full" and before[at]["tokens"] == after[at]["tokens"]}
    assert same == {1, 8}, "with the same matmuls"
    for (requests, mode), point in before.items():
        row = f"| {requests} | `{mode}` | {point['step_ms']:.3f} | {after[requests, mode]['step_ms']:.3f} |"
        assert (row in lines) == (requests in same), row


@pytest.mark.parametrize("run, name", [("first", "bulk_r43"), ("second", "bulk"), ("third", "bulk_last")])
def test_the_docs_show_the_bulk_launches(run, name):
    lines = [line.strip() for line in (ROOT / "docs/decode.md").read_text().splitlines()]
    text = (ROOT / f"benchmarks/results/prefetch_nvidia_h200_{name}.jsonl").read_text()
    rows: dict[int, dict[str, dict]] = {}
    for record in map(json.loads, text.splitlines()):
        how = record.get("how", {})
        launch = f"bulk {how['bulk']} {how['programs']} {how['threads']}" if how else record["mode"]
        rows.setdefault(record["requests"], {})[launch] = record
    assert len(rows) == 2
    for requests, found in rows.items():
        cells = [f"{requests}, {run}", *(f"{found[mode]['step_ms']:.3f}" for mode in ("no_io", "sync"))]
        for launch in ("bulk 0 2 8", "bulk 64 2 1"):
            cells += [f"{found[launch]['step_ms']:.3f}", f"{found[launch]['hidden_share']:.2f}"]
        assert f"| {' | '.join(cells)} |" in lines, cells


def test_the_docs_show_the_profile():
    lines = (ROOT / "docs/throughput.md").read_text().splitlines()
    name = "benchmarks/results/glm52_prefetch_32k_profile_nvidia_h200.json"
    stages = [point["stage_us"] for point in json.loads((ROOT / name).read_text())["points"]]
    for stage in dict.fromkeys(stage for times in stages for stage in times):
        assert f"| {stage} | {' | '.join(f'{times.get(stage, 0):.0f}' for times in stages)} |" in lines
    assert f"| all | {' | '.join(f'{sum(times.values()):.0f}' for times in stages)} |" in lines
