# SPDX-License-Identifier: Apache-2.0
"""Plans against figures worked out by hand, and against what is really allocated."""

from __future__ import annotations

import ast
import inspect
import io
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

import models.dsa_config
import models.sizes
from hisparse_jax import config, planner, prefetch, presets
from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.state import create
from hisparse_jax.errors import UserError
from hisparse_jax.planner import MACHINES, Settings, Sizes, miss_rate, plan
from hisparse_jax.selection import QuestRule
from models.dsa import DsaDecoder, DsaOptions
from models.functional import Functional
from models.registry import open_folder, read_config
from models.sizes import PUBLISHED, dsa_parameters, dsa_sizes

CONTEXT = 131072


@pytest.fixture(scope="module")
def glm51() -> planner.Plan:
    return presets.plan_config(config.load("glm51"))


def shown(found: planner.Plan) -> str:
    console = Console(file=io.StringIO(), width=200)
    planner.show(found, console)
    return " ".join(console.file.getvalue().split())


def test_glm51_at_128k(glm51):
    full, sparse = glm51.full.device, glm51.hisparse.device
    assert full["rows"] == CONTEXT * 78 * 1152
    assert full["index keys"] == sparse["index keys"] == CONTEXT * 78 * 128
    assert round((full["rows"] + full["index keys"]) / 1e9, 2) == 13.09
    assert round(sparse["hot rows"] / 1e9, 3) == 0.368
    assert round(sparse["index keys"] / 1e9, 2) == 1.31
    assert sparse["index scales"] == CONTEXT * 78 * 4
    assert glm51.hisparse.host == CONTEXT * 78 * 1152
    assert glm51.hisparse.device_bytes == sum(sparse.values()) > 1.68e9


def test_the_printed_plan_is_honest(glm51):
    text = shown(glm51)
    for figure in ("13.13 GB", "13.09 GB without scales and tables", "0.368 GB", "1.309 GB", "11.78 GB of host memory"):
        assert figure in text
    total = glm51.hisparse.device_bytes / 1e9
    assert f"With hisparse it takes {total:.3f} GB" in text
    assert "1.350 GB of index state that does and stays there" in text
    assert "bounds from bandwidths, not forecasts" in text


def test_glm52_keeps_index_keys_at_anchors_only():
    found = presets.plan_config(config.load("glm52"))
    assert found.hisparse.device["index keys"] == CONTEXT * 21 * 128
    assert found.hisparse.device["hot rows"] == 4096 * 78 * 1152
    assert found.fetches == prefetch.schedule((1, 1) + (4,) * 19)


def test_the_schedule_is_the_one_the_config_asks_for():
    found = presets.plan_config(config.load("glm52", ["decode.prefetch=off"]))
    assert found.fetches == prefetch.schedule((1, 1) + (4,) * 19, prefetch="off")
    text = shown(found)
    assert "prefetch schedule: off" in text and "0, 0, 0, 0" in text


@pytest.mark.parametrize("name,billions", [("DeepSeek-V3.2", 671.9), ("GLM-5.1", 743.9), ("GLM-5.2", 743.4)])
def test_published_parameter_counts(name, billions):
    assert round(dsa_parameters(PUBLISHED[name]) / 1e9, 1) == billions


@pytest.mark.parametrize("folder", ["deepseek_v32", "glm5", "glm52_indexshare"])
@pytest.mark.parametrize("record", ["float32", "fp8"])
def test_planned_bytes_are_allocated_bytes(folder, record, data):
    shape = read_config(data / folder)
    module = nnx.eval_shape(lambda: DsaDecoder(shape, DsaOptions(record, record), rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(module))
    assert dsa_parameters(shape) == sum(int(np.prod(leaf.shape)) for leaf in leaves)
    sizes = dsa_sizes(folder, shape, record=record, index_keys=record, parameter_bytes=10)
    settings = Settings(context_tokens=100, hot_slots=20, ring_slots=4, page_records=16)
    found = plan(sizes, settings, MACHINES["H200"])
    model = Functional(module)
    for residency, need in (("full", found.full), ("hisparse", found.hisparse)):
        layout = Layout(residency=residency, request_slots=1, context_tokens=100, hot_slots=20, ring_slots=4,
                        page_records=16, host_pages=7, **model.records(100)._asdict())  # fmt: skip
        cache = jax.eval_shape(lambda layout=layout: create(layout, model.new_index(layout)))
        count = {path[0].name: 0 for path, _ in jax.tree_util.tree_leaves_with_path(cache)}
        for path, leaf in jax.tree_util.tree_leaves_with_path(cache):
            count[path[0].name] += int(np.prod(leaf.shape)) * leaf.dtype.itemsize
        assert count.pop("pool") == need.host
        rows = sum(size for name, size in need.device.items() if "rows" in name)
        index = sum(size for name, size in need.device.items() if "index" in name)
        assert count.pop("hot_rows") == rows and count.pop("index") == index
        assert sum(count.values()) == need.device["tables"]
        assert found.scratch_bytes == allocated(lambda layout=layout: model.new_scratch(layout, 512))


def allocated(make) -> int:
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(make)))


def quest_config(data, **selection) -> config.Config:
    base = config.load("glm51", ["cache.hot_slots=20", "cache.context_tokens=100", "decode.prefill_chunk=48"])
    return replace(base, model=config.ModelConfig(path=str(data / "qwen3")),
                   selection=config.QuestSelection(page_tokens=8, **selection))  # fmt: skip


def test_prefill_scratch_of_quest_is_what_is_allocated(data):
    found = presets.plan_config(quest_config(data, budget_pages=5))
    model = open_folder(data / "qwen3", rule=QuestRule("shared", 5, 2, 8)).model
    layout = Layout(residency="full", request_slots=1, context_tokens=100, hot_slots=20, ring_slots=4,
                    page_records=16, host_pages=7, **model.records(100)._asdict())  # fmt: skip
    assert found.scratch_bytes == allocated(lambda: model.new_scratch(layout, 48)) == 144 * 4 * 2 * 2 * 16 * 4


def test_one_prefill_is_left_out_of_the_caches(glm51):
    assert glm51.scratch_bytes == CONTEXT * 78 * (1152 + 128 + 4)
    usable, devices = int(glm51.machine.device_bytes * 0.9), glm51.machine.devices
    assert glm51.cache_bytes == usable - glm51.sizes.parameter_bytes // devices - glm51.scratch_bytes
    assert "│ prefill scratch, one request │ 13.13 GB │ 13.13 GB │" in shown(glm51)


def test_a_million_tokens_of_glm52_do_not_fit_beside_their_prefill():
    found = presets.plan_config(config.load("glm52"), context_tokens=1048576)
    assert found.scratch_bytes == 1048576 * (78 * 1152 + 21 * (128 + 4)) > 94e9
    assert found.full.most_requests == found.hisparse.most_requests == 0 and found.recommended_hot_slots is None
    text = shown(found)
    assert "nothing fits: one request of 1,048,576 tokens" in text and "Recommended" not in text
    assert "the largest need is prefill scratch with 97.13 GB: give more --devices or --device-gib" in text
    more = presets.plan_config(config.load("glm52"), context_tokens=1048576, devices=64)
    assert more.recommended_hot_slots is not None and "Recommended hot slots" in shown(more)


def test_nothing_fits_into_too_little_host_memory():
    text = shown(presets.plan_config(config.load("glm52"), host_bytes=2**30))
    assert "the largest need is host pool with 11.78 GB: give --host-gib" in text
    assert "In full residency 2 fit." in text


@pytest.mark.parametrize("count", [-1, -(2.0**30), 0, float("nan"), float("inf")])
@pytest.mark.parametrize("name,option", [("device_bytes", "--device-gib"), ("host_bytes", "--host-gib")])
def test_memory_must_be_more_than_nothing(name, option, count):
    with pytest.raises(UserError, match=f"{option} must be more than 0 and finite, got"):
        presets.plan_config(config.load("glm51"), **{name: count})
    with pytest.raises(UserError, match=f"{option} must be more than 0 and finite, got"):
        presets.plan_config(config.load("glm51"), replace(MACHINES["H200"], **{name: count}))


def test_other_counts_must_be_more_than_nothing():
    with pytest.raises(UserError, match="--devices must be at least 1, got 0"):
        presets.plan_config(config.load("glm51"), devices=0)
    with pytest.raises(UserError, match="--context-tokens must be at least 1, got 0"):
        presets.plan_config(config.load("glm51"), context_tokens=0)


@pytest.mark.parametrize("count", [1, 2**30])
def test_devices_are_not_doubled_for_ever(count):
    with pytest.raises(UserError, match=r"of 1024 x H200, and .* can be used: split them over \d+ or more"):
        presets.plan_config(config.load("glm51"), device_bytes=count)


def test_selections_are_those_of_the_planned_context(data):
    quest = quest_config(data, rule="per_query_head", budget_pages=5)
    assert presets.plan_config(quest).sizes.selected == 13  # pages of 100 tokens, of which 8 heads can take 40
    assert presets.plan_config(quest, context_tokens=160).sizes.selected == 20
    with pytest.raises(UserError, match="hot_slots must be at least the 40 selected"):
        presets.plan_config(quest, context_tokens=400)


def test_most_requests_fill_the_smaller_budget(glm51):
    for need in (glm51.full, glm51.hisparse, *glm51.choices.values()):
        by_device = glm51.cache_bytes // need.device_bytes
        by_host = glm51.machine.host_bytes // need.host if need.host else by_device
        assert need.most_requests == min(by_device, by_host)
        assert need.limited_by == ("host" if by_host < by_device else "device")
    assert glm51.hisparse.most_requests > glm51.full.most_requests


def test_recommendation_is_the_best_of_the_choices(glm51):
    best = glm51.choices[glm51.recommended_hot_slots]
    assert best.tokens_per_s == max(need.tokens_per_s for need in glm51.choices.values())
    assert min(glm51.choices) == 2048
    faster_link = presets.plan_config(config.load("glm51"), replace(glm51.machine, link_gb_s=450))
    assert faster_link.recommended_hot_slots <= glm51.recommended_hot_slots


def test_miss_rates_of_the_published_trace():
    for hot, measured in ((2048, 0.30), (4096, 0.134), (8192, 0.067)):
        assert abs(miss_rate(hot, 2048) - measured) < 0.01


def test_step_time_by_hand():
    """Two layers share a table, 10 records of 1000 B are attended to; the link takes 1 us a row."""
    sizes = Sizes("toy", (2,), 1, 1000, 10, 0, 0, 0, 10_000)
    machine = replace(MACHINES["H200"], link_gb_s=1.0, memory_gb_s=10.0, device_bytes=20_000_000, reserved=0.0)
    found = plan(sizes, Settings(1000, 10, 1, 10), machine).hisparse
    missed = 10 * 0.30 * found.most_requests
    read_s = found.most_requests * 2 * 10 * 1000 / 10e9
    assert found.step_s == pytest.approx(missed * 1e-6 + max(read_s, missed * 1e-6))


def test_what_cannot_be_planned():
    shape = PUBLISHED["GLM-5.1"]
    sizes = dsa_sizes("GLM-5.1", shape, record="fp8", index_keys="fp8", parameter_bytes=dsa_parameters(shape))
    with pytest.raises(UserError, match="split them over 6 or more"):
        plan(sizes, Settings(CONTEXT, 4096), MACHINES["H200"])
    machine = replace(MACHINES["H200"], devices=8)
    with pytest.raises(UserError, match=r"^cache\.hot_slots must be at least the 2048 selected records, got 100"):
        plan(sizes, Settings(CONTEXT, 100), machine)
    with pytest.raises(UserError, match=r"^the cache can't be planned: the host pool would have \d+ rows"):
        long = replace(sizes, max_tokens=2**31)
        plan(long, Settings(2**25, 4096), replace(machine, devices=64))
    with pytest.raises(UserError, match=r"longer than the 202752 of GLM-5\.1"):
        plan(sizes, Settings(300_000, 4096), machine)
    with pytest.raises(UserError, match="no machine is called 'h100'; there are H200, B200, GH200"):
        presets.plan_config(config.load("glm51"), "h100")
    unknown = replace(config.load("glm51"), model=replace(config.load("glm51").model, published="GLM-9"))
    with pytest.raises(UserError, match=r"'GLM-9' is not known; known: DeepSeek-V3\.2, GLM-5\.1, GLM-5\.2"):
        presets.plan_config(unknown)


def test_checkpoint_folders_are_planned_too(data):
    base = config.load("glm51", ["cache.hot_slots=20", "cache.context_tokens=100"])
    folder = replace(base, model=config.ModelConfig(path=str(data / "glm52_indexshare")))
    found = presets.plan_config(folder)
    assert found.sizes.row_bytes == 160 and found.sizes.index_key_bytes == 64
    quest = replace(folder, model=config.ModelConfig(path=str(data / "qwen3")),
                    selection=config.QuestSelection(page_tokens=8, budget_pages=5))  # fmt: skip
    sizes = presets.plan_config(quest).sizes
    assert (sizes.record_tokens, sizes.row_bytes, sizes.selected, sizes.index_key_bytes) == (8, 2048, 5, 256)


@pytest.mark.parametrize("module", [planner, prefetch, models.sizes, models.dsa_config])
def test_planning_imports_no_jax(module):
    tree = ast.parse(Path(inspect.getfile(module)).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in names if name.split(".")[0] in ("jax", "flax", "numpy")}
