# SPDX-License-Identifier: Apache-2.0
"""Whole models of published depth: their decode chunk compiles in a minute and a half, and copies no weights."""

from __future__ import annotations

import jax
import pytest

from hisparse_jax import config as configs
from hisparse_jax.throughput import Point, Share, lower_point

WHOLE = {"glm52_prefetch": (78, "prefetch"), "dsv32_decode": (61, "sync")}


def whole(preset: str) -> Share:
    layers, _ = WHOLE[preset]
    changes = ["first_layer=0", f"layers={layers}", "concurrency=[16]", "contexts=[32768]", "cold_concurrency=[]"]
    return Share(configs.load(preset, [f"synthetic.{change}" for change in changes]))


@pytest.mark.parametrize("preset", WHOLE)
def test_parameters_of_a_share_without_data(preset):
    """What the compiler is given: as many parameters as the share has."""
    share = whole(preset)
    leaves = jax.eval_shape(share.parameters)
    config = share.whole
    assert share.shape.layers == config.layers and share.shape.experts * share.setting.ranks == config.experts
    experts = [leaf for leaf in leaves if len(leaf.shape) == 3 and leaf.shape[0] == share.shape.experts]
    assert len(experts) == 3 * sum(not dense for dense in config.dense)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", WHOLE)
def test_whole_models_compile_in_time(preset):
    """No data is needed to compile. The chunk's temporaries are smaller than one expert layer's smallest matrix."""
    share, mode = whole(preset), WHOLE[preset][1]
    programs = lower_point(share, Point(32768, 16, mode), jax.eval_shape(share.parameters)).compile()
    assert programs.compile_s < 90
    memory = programs.decode.memory_analysis()
    expert = 2 * share.shape.experts * share.shape.hidden * share.shape.expert_width
    assert memory.temp_size_in_bytes < expert and memory.host_temp_size_in_bytes == 0
