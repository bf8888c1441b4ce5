# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.gguf_files import write

CONFIG = """
name: tiny
model: {{path: {model}}}
selection: {{kind: quest, page_tokens: 8, budget_pages: 5, recent_pages: 2}}
cache: {{hot_slots: 6, ring_slots: 2, page_records: 4}}
prompt: {{text: "{text}", chat: false}}
decode: {{max_new_tokens: 12, stop: false, steps: 4, prefill_chunk: 32, residencies: [full, hisparse, no_io]}}
expect: {{bitwise: true, misses: true}}
"""
TEXT = "".join(np.random.default_rng(0).choice(list("abcdefghijklmnopqrstuvwxyz"), 150))


def hisparse(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "160", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "hisparse_jax.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def config(tmp_path: Path, data: Path) -> Path:
    """A config of the tiny reference model, in a folder of its own."""
    write(tmp_path / "model.gguf", data)
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG.format(model="model.gguf", text=TEXT))
    return path


def test_run_decodes_compares_and_writes(config: Path) -> None:
    done = hisparse("run", str(config), cwd=config.parent)
    assert done.returncode == 0, done.stderr
    assert "outputs identical (full, hisparse): yes, bitwise (logits of every step)" in done.stdout
    assert "no_io (output invalid)" in done.stdout
    [folder] = (config.parent / "runs").iterdir()
    assert str(folder.name) in done.stdout.replace("\n", "")
    assert (folder / "result.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((folder / "result.json").read_text())
    assert result["bitwise"] is True
    assert result["config"]["cache"]["hot_slots"] == 6
    assert result["environment"]["packages"]["jax"]
    full, hot, no_io = (result["outcomes"][name] for name in ("full", "hisparse", "no_io"))
    assert full["tokens"] == hot["tokens"] and len(full["tokens"][0]) == 12
    assert not no_io["valid_output"]
    assert min(hot["misses_by_table"]) > 0
    # A page of 8 tokens, two KV heads of 16, keys and values, float32; 11 decode steps.
    assert hot["fetched_bytes_per_token"] == sum(hot["misses_by_table"]) * 8 * 2 * 2 * 16 * 4 / 11
    assert full["fetched_bytes_per_token"] == 0 and full["hit_rate"] == 1


def test_overrides_and_a_run_folder_of_ones_own(config: Path) -> None:
    done = hisparse(
        "run", str(config), "--set", "decode.max_new_tokens=3", "-s", "decode.residencies=[hisparse]", "--runs", "here",
        cwd=config.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [folder] = (config.parent / "here").iterdir()
    assert json.loads((folder / "result.json").read_text())["bitwise"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "quikstart"], "no preset is called 'quikstart', did you mean 'quickstart'?"),
        (["run", "CONFIG", "-s", "model.path=none.gguf"], "model.path: none.gguf does not exist"),
        (["run", "CONFIG", "-s", "model={package: no_such_package, file: x}"], "no_such_package is not installed"),
        (["run", "CONFIG", "-s", "model={package: rich, file: x.gguf}"], "package rich has no file x.gguf"),
        (["run", "CONFIG", "-s", "model.sha256=abc"], "expected abc: fetch it again"),
        (["run", "CONFIG", "-s", "decode.max_new_tokens=5000"], "the context holds 4096"),
        (["run", "CONFIG", "-s", "cache.context_tokens=100"], "the context holds 100"),
        (["run", "CONFIG", "-s", "cache.hot_slot=1"], "did you mean 'hot_slots'"),
        (["run", "CONFIG", "-s", "cache.host_pages=1"], "cache.host_pages must hold at least one request"),
        (["run", "CONFIG", "-s", "prompt.chat=true"], "no chat template"),
        (["run", "CONFIG", "-s", "prompt={source: file, file: none.txt}"], "none.txt can't be read"),
        (
            ["run", "CONFIG", "-s", "cache.request_slots=900000"],
            "lower cache.request_slots, cache.context_tokens or cache.hot_slots",
        ),
        (["run", "CONFIG", "-s", "cache.hot_slots=[1"], "--set cache.hot_slots: '[1' is not valid YAML"),
        (["run", "model.gguf"], "it is not UTF-8 text"),
        (["run", "CONFIG", "--runs", "tiny.yaml"], "the run folder can't be made"),
        (["run", "CONFIG", "-s", "selection={kind: dsa}"], "selection.kind"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(config: Path, arguments: list[str], says: str) -> None:
    arguments = [str(config) if argument == "CONFIG" else argument for argument in arguments]
    done = hisparse(*arguments, cwd=config.parent)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert not list(config.parent.glob("runs/*"))


def test_a_run_that_shows_nothing_fails_and_leaves_its_figures(config: Path) -> None:
    done = hisparse(
        "run", str(config), "-s", "cache.hot_slots=30", "-s", "decode.residencies=[hisparse]", cwd=config.parent
    )
    assert done.returncode == 2
    assert "error: hisparse: tables [0, 1, 2, 3] never missed, so nothing was shown" in done.stderr
    [folder] = (config.parent / "runs").iterdir()
    assert len(json.loads((folder / "result.json").read_text())["unmet"]) == 2


def test_a_run_without_a_decode_step(config: Path) -> None:
    settings = [
        "-s",
        "decode.max_new_tokens=1",
        "-s",
        "expect.misses=false",
        "-s",
        "decode.residencies=[no_io, full, hisparse]",
    ]
    done = hisparse("run", str(config), *settings, cwd=config.parent)
    assert done.returncode == 0, done.stderr
    assert "outputs identical (full, hisparse): yes, bitwise" in done.stdout


def test_the_invalid_output_of_no_io_is_compared_with_nothing(config: Path) -> None:
    done = hisparse("run", str(config), "-s", "decode.residencies=[no_io, full, hisparse]", cwd=config.parent)
    assert done.returncode == 0, done.stderr
    assert "outputs identical (full, hisparse): yes, bitwise" in done.stdout


def test_a_run_without_matplotlib_has_no_plot(config: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib/__init__.py").write_text("raise ImportError")
    done = hisparse("run", str(config), "-s", "decode.residencies=[hisparse]", "--runs", "a'b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no plot: it needs matplotlib" in done.stdout
    [folder] = (tmp_path / "a'b").iterdir()
    assert [path.name for path in folder.iterdir()] == ["result.json"]


def test_debug_shows_the_traceback(config: Path) -> None:
    done = hisparse("run", "quikstart", "--debug", cwd=config.parent)
    assert done.returncode != 0
    assert "Traceback" in done.stderr and "UserError" in done.stderr


def test_help_and_presets(tmp_path: Path) -> None:
    done = hisparse("--help", cwd=tmp_path)
    assert done.returncode == 0
    for word in ("pinned host memory", "bitwise equal", "run quickstart", "presets"):
        assert word in " ".join(done.stdout.split())
    done = hisparse("presets", cwd=tmp_path)
    assert done.returncode == 0
    assert "quickstart" in done.stdout


def test_verify_exits_by_what_it_found(data: Path, tmp_path: Path) -> None:
    done = hisparse("verify", str(data / "qwen3_moe"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bitwise" in done.stdout
    done = hisparse("verify", str(data / "qwen3_moe"), "--tolerance", "1e-9", cwd=tmp_path)
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "minimax_m3_vl"}, "model type 'minimax_m3_vl' is not supported yet; supported: deepseek_v32"),
        (None, "no such file: expected a Hugging Face checkpoint folder"),
    ],
)
def test_verify_of_what_is_not_supported(tmp_path: Path, config: dict | None, says: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    done = hisparse("verify", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and says in done.stderr


def test_plan(tmp_path: Path) -> None:
    done = hisparse("plan", "glm51", "--context-tokens", "131072", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for figure in ("13.13 GB", "0.368 GB", "1.309 GB", "1.725 GB", "prefetch schedule"):
        assert figure in done.stdout
    done = hisparse("plan", "glm52", "--machine", "abacus", cwd=tmp_path)
    assert done.returncode == 2
    assert "no machine is called 'abacus'; there are H200, B200, GH200" in done.stderr


@pytest.mark.parametrize("size", ["nan", "0", "-1", "inf"])
def test_plan_with_a_memory_that_is_none(tmp_path: Path, size: str) -> None:
    done = hisparse("plan", "glm52", "--device-gib", size, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "--device-gib" in done.stderr


def test_a_published_shape_cannot_be_run(tmp_path: Path) -> None:
    done = hisparse("run", "glm52", cwd=tmp_path)
    assert done.returncode == 2
    assert "GLM-5.2 has no parameters to run; `hisparse plan` reads it" in done.stderr
