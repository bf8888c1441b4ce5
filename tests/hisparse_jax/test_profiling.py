# SPDX-License-Identifier: Apache-2.0
"""Traces and device time by stage, on whatever device the tests run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from hisparse_jax.profiling import (
    STAGES,
    covered,
    idle_share,
    operation_names,
    stage_of,
    stage_table,
    stage_us,
    traced,
)


def test_the_innermost_stage_of_a_name():
    assert stage_of("jit(chunk)/while/body/jit(_decode)/mlp/dot_general") == "mlp"
    assert stage_of("jit(chunk)/attention/resolve/custom_call") == "resolve"
    assert stage_of("jit(chunk)/while/body/add") == stage_of("") == "other"


def test_names_in_the_text_of_a_module():
    text = """
      %fusion.1 = f32[2]{0} fusion(%p), metadata={op_name="jit(f)/mlp/add" source_line=3}
      ROOT %copy.2 = f32[2]{0} copy(%fusion.1)
      wrapped_add = f32[2]{0} fusion(p), kind=kLoop, metadata={op_type="add" op_name="jit(f)/fetch/add"}
    """
    assert operation_names(text) == {"fusion.1": "jit(f)/mlp/add", "wrapped_add": "jit(f)/fetch/add"}


def test_time_by_stage(tmp_path):
    """Stages that ran have time, others don't appear, and a loop's own time is not counted on top."""

    def step(x, _):
        with jax.named_scope("mlp"):
            x = jnp.tanh(x @ x)
        with jax.named_scope("attention"):
            return jnp.sin(x) / jnp.max(x), None

    x = jnp.ones((256, 256)) / 256
    compiled = jax.jit(lambda x: jax.lax.scan(step, x, length=5)[0]).lower(x).compile()
    jax.block_until_ready(compiled(x))
    with traced(tmp_path):
        jax.block_until_ready(compiled(x))
    times = stage_us(tmp_path, operation_names(compiled.as_text()))
    assert times["mlp"] > 0 and times["attention"] > 0
    idle = idle_share(tmp_path)
    assert (idle is None) if jax.default_backend() == "cpu" else 0 <= idle < 1
    assert set(times) <= {"mlp", "attention", "other"} and list(times) == [s for s in STAGES if s in times]
    assert times.get("other", 0) < times["mlp"] + times["attention"]
    assert stage_table({"full": times, "hisparse": {}}).row_count == len(times) + 1


@pytest.mark.parametrize(
    ("intervals", "length"),
    [([], 0), ([(3, 5)], 2), ([(0, 2), (5, 6)], 3), ([(4, 6), (0, 10), (9, 12)], 12), ([(0, 1), (1, 2), (1, 1)], 2)],
)
def test_what_intervals_cover(intervals, length):
    assert covered(intervals) == length


def test_nothing_is_traced_without_a_folder(tmp_path):
    with traced(None):
        jnp.ones(3).block_until_ready()
    with pytest.raises(FileNotFoundError, match="holds no trace"):
        stage_us(tmp_path, {})
    with pytest.raises(FileNotFoundError, match="holds no trace"):
        idle_share(tmp_path)
