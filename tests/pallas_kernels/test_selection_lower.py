# SPDX-License-Identifier: Apache-2.0
"""The kernels of the selection lower for CUDA, and "auto" takes them where they can run."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels.index_topk as topk_op
from pallas_kernels import index_scores
from pallas_kernels.index_scores import arg_specs as scores_specs
from pallas_kernels.index_scores import mosaic_gpu as scores_kernel
from pallas_kernels.index_scores.tuning import tuning as scores_tuning
from pallas_kernels.index_topk import arg_specs as topk_specs
from pallas_kernels.index_topk import mosaic_gpu
from pallas_kernels.index_topk.tuning import SHARED_BYTES, Tuning, share_of, shared_bytes, tuning
from tests.pallas_kernels.kernel_cases import DEVICES, abstract_gpu, lower_for_cuda


def lower(function, args, kind="NVIDIA H200") -> None:
    assert "mosaic_gpu" in lower_for_cuda(lambda args: function(**args), args, kind=kind)


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", topk_specs.SPECS)
def test_topk(name, kind):
    args, options = topk_specs.abstract_args(topk_specs.SPECS[name])
    lower(functools.partial(topk_op.index_topk, **options, implementation="mosaic_gpu"), args, kind)


@pytest.mark.parametrize("how", [Tuning(2, 8, 4, False), Tuning(8, 4, 2, True), Tuning(1, 8, 1, False)])
def test_topk_launches(how, monkeypatch):
    """With lane semantics lowering checks the layout of every operand of an emitted word."""
    by_lane = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    monkeypatch.setattr(plgpu, "kernel", functools.partial(plgpu.kernel, compiler_params=by_lane))
    for name in ("dsa_r64_32k", "quest_pages", "odd"):
        args, options = topk_specs.abstract_args(topk_specs.SPECS[name])
        lower(functools.partial(mosaic_gpu.index_topk, **options, how=how), args)


@pytest.mark.parametrize("rows", [1, 8, 64, 512])
@pytest.mark.parametrize("context", [1, 1000, 32768, 131072, 1 << 20])
def test_topk_fits(rows, context):
    how = tuning(rows, context)
    assert how.programs in (1, 2, 4, 8) and how.threads in range(4, 9)
    assert shared_bytes(share_of(context, how.programs), resident=how.resident) <= SHARED_BYTES
    assert share_of(context, how.programs) * how.programs >= context


@pytest.mark.parametrize("name", scores_specs.DSA)
def test_dsa_weights_are_rounded_alike_in_every_program(name):
    """The scale does not become one constant with what came before: a barrier is all that reads the weights."""
    args, options = scores_specs.dsa_args(scores_specs.DSA[name])
    names = list(args)
    with abstract_gpu():
        scores = functools.partial(scores_kernel.dsa_scores, **options)
        traced = jax.make_jaxpr(lambda *values: scores(**dict(zip(names, values, strict=True))))(*args.values())
    weight = traced.jaxpr.invars[names.index("weight")]
    readers = [equation.primitive.name for equation in traced.jaxpr.eqns if weight in equation.invars]
    assert readers == ["optimization_barrier"]


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", scores_specs.DSA)
def test_dsa_scores(name, kind):
    args, options = scores_specs.dsa_args(scores_specs.DSA[name])
    lower(functools.partial(index_scores.dsa_scores, **options, implementation="mosaic_gpu"), args, kind)


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", scores_specs.QUEST)
def test_quest_scores(name, kind):
    args = scores_specs.quest_args(scores_specs.QUEST[name])
    lower(functools.partial(index_scores.quest_scores, implementation="mosaic_gpu"), args, kind)


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", scores_specs.MSA)
def test_msa_scores(name, kind):
    args = scores_specs.msa_args(scores_specs.MSA[name])
    lower(functools.partial(index_scores.msa_scores, implementation="mosaic_gpu"), args, kind)


@pytest.mark.parametrize(
    "rows, records, record_bytes", [(32, 65536, 132), (32, 65536, 256), (64, 8192, 512), (1, 68, 132)]
)
def test_scores_fit(rows, records, record_bytes):
    how = scores_tuning(rows, records, record_bytes)
    assert how.block % 64 == 0 and how.block <= records and 1 <= how.parts <= -(-records // how.block)
    assert how.stages * how.block * record_bytes <= 160 * 1024


def test_auto_takes_the_kernels():
    scores, length = jnp.zeros((2, 256)), jnp.zeros(2, jnp.int32)
    args, options = scores_specs.dsa_args(scores_specs.DSA["short"])
    with abstract_gpu():
        auto = str(jax.make_jaxpr(lambda s, n: topk_op.index_topk(s, n, 7))(scores, length))
        assert "pallas" in auto or "mpmd" in auto or "core_map" in auto
        auto = str(jax.make_jaxpr(lambda a: index_scores.dsa_scores(**a, **options))(args))
        assert "wgmma" in auto


def test_what_a_kernel_cannot_take():
    def dsa(query=jnp.bfloat16, keys=jnp.bfloat16, heads=8, channels=128, records=64):
        scale = jnp.ones((1, 1, records)) if keys == jnp.float8_e4m3fn else None
        return index_scores.dsa_scores(
            jnp.zeros((1, heads, channels), query), jnp.zeros((1, heads)), jnp.zeros((1, 1, records, channels), keys),
            scale, 0, scale=1.0, implementation="mosaic_gpu",
        )  # fmt: skip

    with abstract_gpu():
        for options, message in (
            ({"keys": jnp.float32}, "keys must be bfloat16 or float8"),
            ({"keys": jnp.float8_e4m3fn, "query": jnp.float32}, "need a bfloat16 or float16 query"),
            ({"heads": 9}, "multiple of 8"),
            ({"channels": 64}, "channels must be 128"),
            ({"records": 68}, "multiple of 8"),
            ({"records": 32}, "at least 64"),
        ):
            with pytest.raises(ValueError, match=message):
                dsa(**options)
        query, bounds = jnp.zeros((1, 1, 17, 128), jnp.bfloat16), jnp.zeros((1, 1, 64, 1, 128), jnp.bfloat16)
        with pytest.raises(ValueError, match="at most 16 heads"):
            index_scores.quest_scores(query, bounds, bounds, 0, implementation="mosaic_gpu")
        with pytest.raises(ValueError, match="length must have shape"):
            index_scores.dsa_scores(
                query[0, :, :8], jnp.zeros((1, 8)), bounds[:, :, :, 0], None, 0, scale=1.0,
                length=jnp.zeros(2, jnp.int32),
            )  # fmt: skip
        for shape, kind, options, message in (
            ((4, 64, 128), jnp.float32, {}, "keys must be bfloat16, got float32"),
            ((33, 128, 128), jnp.bfloat16, {}, "at most 32 index heads, got 33"),
            ((4, 256, 128), jnp.bfloat16, {"block_tokens": 32}, "blocks must have 64 or 128 tokens, got 32"),
            ((4, 64, 128), jnp.bfloat16, {}, "64 tokens are less than a block of 128"),
            ((4, 130, 128), jnp.bfloat16, {}, "multiple of 8"),
            ((4, 128, 64), jnp.bfloat16, {}, "channels must be 128"),
        ):
            heads, records, channels = shape
            query, keys = jnp.zeros((1, heads, channels), jnp.bfloat16), jnp.zeros((1, 1, records, channels), kind)
            with pytest.raises(ValueError, match=message):
                index_scores.msa_scores(
                    query, keys, 0, jnp.zeros(1, jnp.int32), **options, implementation="mosaic_gpu"
                )  # fmt: skip
    assert "shared memory" in str(mosaic_gpu.unsupported(1 << 24))
