# SPDX-License-Identifier: Apache-2.0
"""The preset of a small GLM-5.2, run as a user would."""

from __future__ import annotations

import io
import json

from rich.console import Console

from hisparse_jax import config, experiment


def test_the_preset_shows_what_it_promises(data, tmp_path):
    console = Console(file=io.StringIO(), width=120)
    overrides = [f"model.path={data / 'glm52_indexshare'}", f"runs={tmp_path}"]
    folder = experiment.run(config.load("tiny_glm52", overrides), console)
    result = json.loads((folder / "result.json").read_text())
    assert result["bitwise"] is True
    full, sparse = result["outcomes"]["full"], result["outcomes"]["hisparse"]
    assert full["tokens"] == sparse["tokens"] and len(sparse["tokens"][0]) == 33
    # 32 decode steps of five anchors that select 16 tokens each; the first token comes from prefill.
    assert len(sparse["misses_by_table"]) == 5 and min(sparse["misses_by_table"]) > 0
    assert sum(sparse["misses_by_table"]) < 32 * 5 * 16
    followers = [1, 1, 4, 4, 1]
    rows = sum(misses * size for misses, size in zip(sparse["misses_by_table"], followers, strict=True))
    assert sparse["fetched_bytes_per_token"] == rows * 160 / 32
    assert "outputs identical" in console.file.getvalue()
