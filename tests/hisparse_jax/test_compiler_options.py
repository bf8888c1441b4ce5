# SPDX-License-Identifier: Apache-2.0
"""Options for XLA: none on the CPU, some on a GPU, and a warning that says what is lost where they are not taken."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from hisparse_jax import compiler_options
from hisparse_jax.compiler_options import CONCURRENT, SEPARATE_MATMULS, decode_options


class Compiler:
    """Stands for JAX with one device; refuses options by name, and counts what it is asked to compile."""

    def __init__(self, platform: str, refuses: str = "nothing at all") -> None:
        self.platform, self.refuses, self.asked = platform, refuses, []

    def devices(self):
        return [SimpleNamespace(platform=self.platform)]

    def jit(self, function, *, compiler_options):
        self.asked.append(dict(compiler_options))
        unknown = [name for name in compiler_options if self.refuses in name]
        lowered = SimpleNamespace(compile=lambda: self._compile(unknown))
        return SimpleNamespace(lower=lambda *args: lowered)

    @staticmethod
    def _compile(unknown):
        if unknown:
            raise RuntimeError(f"No such compile option: '{unknown[0]}'")


@pytest.fixture
def jax_on(monkeypatch):
    """Puts a stand-in of JAX into the module; what is remembered of another compiler is forgotten, before and after."""

    def put(*arguments: str) -> Compiler:
        compiler = Compiler(*arguments)
        compiler_options._takes.cache_clear()
        monkeypatch.setattr(compiler_options, "jax", compiler)
        return compiler

    yield put
    compiler_options._takes.cache_clear()


def test_none_on_the_cpu():
    assert jax.devices()[0].platform == "cpu"
    assert decode_options() is None


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_nothing_is_tried_where_there_is_nothing_to_ask_for(jax_on, platform):
    compiler = jax_on(platform)
    assert decode_options() is None and compiler.asked == []


@pytest.mark.parametrize("platform", ["gpu", "cuda"], ids="on {}".format)
def test_a_gpu_gets_all_of_them(jax_on, platform):
    compiler = jax_on(platform)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = decode_options()
    assert got == CONCURRENT | SEPARATE_MATMULS
    assert got["xla_gpu_command_buffer_scheduling_mode"] == "CONCURRENT"
    assert set(got["xla_gpu_enable_command_buffer"].split(",")) >= {"FUSION", "CUSTOM_CALL", "WHILE"}
    assert compiler.asked == [CONCURRENT, SEPARATE_MATMULS]  # each kind is tried by itself
    assert decode_options() == got and len(compiler.asked) == 2  # and only once


@pytest.mark.parametrize(
    ("refuses", "kept", "lost"),
    [
        ("command_buffer", SEPARATE_MATMULS, "prefetches will not overlap with compute"),
        ("dot_merger", CONCURRENT, "weights of neighbouring matmuls may be copied at every step"),
    ],
)
def test_what_is_refused_is_left_out_with_a_warning(jax_on, refuses, kept, lost):
    jax_on("gpu", refuses)
    with pytest.warns(UserWarning, match=f"the compiler does not take .*{refuses}.*: {lost} .*No such compile option"):
        assert decode_options() == kept


def test_a_compiler_that_takes_nothing_gets_nothing(jax_on):
    jax_on("gpu", "xla_gpu")
    with pytest.warns(UserWarning) as caught:
        assert decode_options() == {}
    assert len(caught) == 2


def test_a_real_compiler_that_refuses(jax_on, monkeypatch):
    """The CPU's compiler doesn't know the words of the GPU's, whatever error it has for that."""
    compiler = jax_on("gpu")
    monkeypatch.setattr(compiler, "jit", jax.jit)
    unknown = {"xla_no_such_option": True}
    monkeypatch.setattr(compiler_options, "CONCURRENT", unknown)
    monkeypatch.setattr(compiler_options, "SEPARATE_MATMULS", {})
    with pytest.warns(UserWarning, match="does not take xla_no_such_option: prefetches will not overlap"):
        got = decode_options()
    assert got == {}
    jax.jit(lambda x: x + 1, compiler_options=got).lower(jnp.int32(0)).compile()  # which is as good as no options
