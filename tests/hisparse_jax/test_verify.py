# SPDX-License-Identifier: Apache-2.0
"""Verify on reference folders: every case passes, and what is wrong fails."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from hisparse_jax.errors import UserError
from hisparse_jax.verify import Report, Result, show, verify
from hisparse_jax.verify_report import as_sets, differing


@pytest.mark.parametrize("family", ["deepseek_v32", "glm52_indexshare"])
def test_reference_cases_of_dsa(family, data):
    report = verify(data / family)
    assert report.ok
    assert [(result.case, result.batch) for result in report.results] == [
        (case, batch) for batch in ("alone", "together") for case in ("long", "mid", "short")
    ]
    for result in report.results:
        assert result.bitwise and result.logit_difference < 2e-4
        assert result.tokens_agree == result.tokens == 17
        assert result.selections_differ == 0 and result.selections >= 5 * (10 + 16)
        assert result.misses > 0
        if result.case != "short":
            assert result.misses > 16 * 5 * 4  # a quarter of the 16 selected, at every step and anchor


@pytest.fixture(scope="module")
def glm5(data, tmp_path_factory) -> Report:
    """The GLM-5 folder, with a case added whose reference is wrong, in all record formats."""
    folder = tmp_path_factory.mktemp("glm5")
    shutil.copytree(data / "glm5", folder, dirs_exist_ok=True)
    wrong = load_file(folder / "case_short.safetensors")
    wrong["decode_logits"][3, 5] += 1e-3
    wrong["generated_ids"][2] = (wrong["generated_ids"][2] + 1) % 192
    wrong["topk_prefill"][1, 4] = np.concatenate([np.arange(4), np.full(12, -1)])
    save_file(wrong, folder / "case_wrong.safetensors")
    return verify(folder, formats=("bfloat16", "fp8"))


def test_reference_cases_of_glm5_and_a_wrong_one(glm5):
    assert not glm5.ok
    failed = {result.case for result in glm5.results if not glm5.passes(result)}
    assert failed == {"wrong"}
    for result in glm5.results:
        assert result.bitwise
        if result.case == "wrong":
            assert result.logit_difference > 1e-3 - 2e-4
            assert result.tokens_agree < 17 and result.selections_differ >= 1


def test_record_formats_are_bitwise_equal_and_their_error_is_reported(glm5):
    by_format = {name: [r for r in glm5.formats if r.records == name] for name in ("bfloat16", "fp8")}
    assert all(len(results) == 4 for results in by_format.values())
    for results in by_format.values():
        assert all(result.bitwise and result.misses > 0 for result in results)
    # Half a unit in the last of 8 bits is at most 2^-9, of 4 bits 2^-5; both are met by uniform mantissas within 2x.
    assert all(2**-11 < result.record_error < 2**-9 for result in by_format["bfloat16"])
    assert all(2**-7 < result.record_error < 2**-5 for result in by_format["fp8"])
    narrow = {r.case: r.logit_difference for r in by_format["bfloat16"]}
    assert 1e-3 < narrow["short"] < 0.2  # 26 tokens whose selections agree: rounding of records alone


@pytest.mark.parametrize("family,quest", [("qwen3", 4), ("qwen3_moe", 2)])
def test_reference_cases_of_quest(family, quest, data):
    report = verify(data / family)
    assert report.ok
    assert sum(result.selections > 0 for result in report.results) == 2 * quest
    assert {result.case for result in report.results if result.misses} == {"long_quest_shared", "mid_quest_shared"}
    for result in report.results:
        assert result.bitwise and result.logit_difference < 2e-4
        assert result.tokens_agree == result.tokens == 17 and result.selections_differ == 0


def test_other_folders_say_what_is_wrong(data, tmp_path):
    for family in ("deepseek_v4", "minimax_m3_vl"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        with pytest.raises(UserError, match=f"model type '{family}' is not supported yet"):
            verify(tmp_path)
    shutil.copy(data / "glm5" / "config.json", tmp_path)
    with pytest.raises(UserError, match=r"expected reference cases case_NAME\.safetensors, there are none"):
        verify(tmp_path)
    save_file({"input_ids": np.zeros(3, np.int32)}, tmp_path / "case_a.safetensors")
    with pytest.raises(UserError, match="not a reference case: decode_logits, generated_ids missing"):
        verify(tmp_path)
    with pytest.raises(UserError, match="record formats are a choice of DSA families"):
        verify(data / "qwen3", formats=("fp8",))
    with pytest.raises(UserError, match="record formats are bfloat16 and fp8, got int4"):
        verify(data / "glm5", formats=("fp8", "int4"))
    with pytest.raises(UserError, match="no such file"):
        verify(tmp_path / "nothing")


GOOD = Result("a", "alone", "plain", 1e-5, 17, 17, 0, 10, 3, True)


@pytest.mark.parametrize(
    "change", [{"logit_difference": 3e-4}, {"tokens_agree": 16}, {"selections_differ": 1}, {"bitwise": False}]
)
def test_what_fails_a_report(change):
    assert Report(Path("x"), 2e-4, (GOOD,)).ok
    assert not Report(Path("x"), 2e-4, (GOOD, replace(GOOD, **change))).ok
    narrow = replace(GOOD, records="fp8", **change)
    assert Report(Path("x"), 2e-4, (GOOD,), (narrow,)).ok == narrow.bitwise


def test_not_a_number_fails_a_report():
    assert not Report(Path("x"), 2e-4, (replace(GOOD, logit_difference=float("nan")),)).ok


def test_reports_are_shown():
    console = Console(file=io.StringIO(), width=200)
    results = (GOOD, replace(GOOD, case="b", bitwise=False))
    show(Report(Path("folder"), 2e-4, results, note="3 tensors are skipped"), console)
    text = console.file.getvalue()
    assert "3 tensors are skipped." in text
    assert "folder (tolerance 0.0002)" in text and "1.00e-05" in text
    assert [("ok" in line, "FAIL" in line, "DIFFERENT" in line) for line in text.splitlines() if "alone" in line] == [
        (True, False, False), (False, True, True),
    ]  # fmt: skip


def shown(report: Report, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(report, console)
    return console.file.getvalue()


def test_reports_are_readable_at_80_columns():
    quest = replace(GOOD, case="long_quest_per_head", batch="together", selections=16384)
    wrong = replace(quest, tokens_agree=3, selections_differ=9999, misses=12345, bitwise=False)
    for row, cells in zip((quest, wrong), (("1.00e-05 17/17", "equal ok"), ("3/17", "DIFFERENT FAIL")), strict=True):
        text = shown(Report(Path("folder"), 2e-4, (row, wrong)))
        line = next(line for line in text.splitlines() if line.startswith("long_quest_per_head together "))
        assert "…" not in text and all(cell in " ".join(line.split()) for cell in cells)
        assert "records" not in text and "error" not in text
    narrow = replace(GOOD, case="long", records="bfloat16", batch="together", record_error=0.0017, bitwise=False)
    text = " ".join(shown(Report(Path("folder"), 2e-4, (GOOD,), (narrow,))).split())
    assert "…" not in text and "long together bfloat16 1.00e-05 17/17 0/10 3 DIFFERENT 0.17% FAIL" in text
    assert "a alone plain 1.00e-05" in text


def test_reports_warn_when_nothing_missed():
    still = replace(GOOD, misses=0)
    assert "hisparse was not exercised" in shown(Report(Path("x"), 2e-4, (still, still)), 200)
    assert "hisparse was not exercised" not in shown(Report(Path("x"), 2e-4, (still, GOOD)), 200)


CASE = "case_short.safetensors"


@pytest.mark.parametrize(
    "change,message",
    [
        ({"generated_ids": lambda x: x[:-1]}, r"generated_ids must have shape \[n \+ 1\], here \[17\].*got \[16\]"),
        ({"input_ids": lambda x: x[None]}, r"input_ids must have shape \[T\], here \[10\].*got \[1, 10\]"),
        ({"input_ids": lambda x: x[:0]}, r"input_ids must have shape .*not be empty; got \[0\]"),
        ({"input_ids": lambda x: x.astype(np.float32)}, "input_ids must hold ids, got float32"),
        ({"input_ids": lambda x: x + 192}, "input_ids must hold ids from 0 to 191, got"),
        ({"decode_logits": lambda x: x[:, :-1]}, r"decode_logits must have shape \[n, V\], here \[16, 192\].*191\]"),
        ({"decode_logits": lambda x: x.astype(np.int32)}, "decode_logits must hold floats, got int32"),
        ({"decode_logits": lambda x: x[0, 0]}, r"decode_logits must have shape \[n, V\].*got \[\]"),
        ({"prefill_logits": lambda x: x[1:]}, r"prefill_logits must have shape \[T, V\], here \[10, 192\].*\[9, 192\]"),
        ({"topk_decode": lambda x: x[:, 1:]}, r"topk_decode must have shape \[n, anchors, K\], here \[16, 4, any\]"),
        ({"topk_decode": lambda x: x + 99}, "topk_decode must hold ids from -1 to 25, got"),
        ({"index_scores_prefill": lambda x: x[..., 1:]}, r"index_scores_prefill must have shape \[anchors, T, T\]"),
        ({"index_scores_decode": None}, "not a reference case: index_scores_decode missing"),
    ],
)
def test_cases_of_wrong_shape(change, message, data, tmp_path):
    for name in ("config.json", "model.safetensors", CASE):
        shutil.copy(data / "glm5" / name, tmp_path)
    tensors = load_file(tmp_path / CASE)
    for name, spoil in change.items():
        tensors |= {name: None if spoil is None else np.ascontiguousarray(spoil(tensors[name])).reshape(
            np.shape(spoil(tensors[name])))}  # fmt: skip
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / CASE)
    with pytest.raises(UserError, match=rf"^\S*/{CASE}: {message}"):
        verify(tmp_path)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"page_size": None}, r"quest\.mid_quest_shared\.page_size is missing"),
        ({"page_size": "8"}, r"quest\.mid_quest_shared\.page_size must be a whole number of at least 1, got '8'"),
        ({"rule": "dense"}, r"quest\.mid_quest_shared\.rule must be shared or per_query_head, got 'dense'"),
        ({"budget_pages": 2}, r"quest\.mid_quest_shared\.budget_pages must be more than recent_pages, 2, got 2"),
    ],
)
def test_quest_settings_that_cannot_be_used(change, message, data, tmp_path):
    for name in ("config.json", "model.safetensors", "case_mid_quest_shared.safetensors"):
        shutil.copy(data / "qwen3" / name, tmp_path)
    info = json.loads((data / "qwen3" / "info.json").read_text())["quest"]["mid_quest_shared"] | change
    (tmp_path / "info.json").write_text(json.dumps({"quest": {"mid_quest_shared": info}}))
    with pytest.raises(UserError, match=rf"^\S*/info\.json: {message}"):
        verify(tmp_path)


@pytest.mark.parametrize(
    "info,message",
    [
        ([], r"info\.json: expected a mapping, got \[\]"),
        ({"quest": 3}, r"info\.json: quest must be a mapping, got 3"),
        ({"quest": {"mid_quest_shared": 3}}, r"info\.json: quest\.mid_quest_shared must be a mapping, got 3"),
        ({}, r"info\.json: quest\.mid_quest_shared is missing: case_mid_quest_shared\.safetensors has pages_selected"),
        (
            {"quest": {"mid_quest_shared": {"rule": "per_query_head", "budget_pages": 4, "page_size": 8}}},
            r"pages_selected must have shape .*, here \[16, 4, 8, 10\], and not be empty; got \[16, 4, 1, 10\]",
        ),
    ],
)
def test_infos_that_do_not_go_with_their_cases(info, message, data, tmp_path):
    for name in ("config.json", "model.safetensors", "case_mid_quest_shared.safetensors"):
        shutil.copy(data / "qwen3" / name, tmp_path)
    (tmp_path / "info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=message):
        verify(tmp_path)


def test_sets_that_differ_by_rounding_are_not_counted():
    scores = np.array([[5.0, 1.0, 1.0 + 1e-6, 0.5]])
    sets = as_sets(np.array([[0, 1], [0, 2], [0, 3], [0, -1]]), 4)
    assert sets.tolist()[3] == [True, False, False, False]
    ours, scores = sets, np.repeat(scores, 4, axis=0)
    theirs = np.repeat(sets[:1], 4, axis=0)
    assert differing(ours, theirs, scores) == (2, 4)  # {0, 2} is rounding; {0, 3} and {0} are not
