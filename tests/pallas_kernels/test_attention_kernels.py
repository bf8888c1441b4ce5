# SPDX-License-Identifier: Apache-2.0
"""The attention kernels on the CPU: lowered for CUDA at real shapes, and interpreted, without races, at small ones.

Lowering runs layout inference and checks shared memory; it is no PTX compile. Interpretation runs the kernel's own
steps with the `jax.numpy` twins of its copies, one warpgroup after the other.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import online_softmax, sparse_gqa, sparse_mla, tiles
from pallas_kernels.online_softmax import Split, split
from pallas_kernels.row_format import RowFormat
from pallas_kernels.sparse_gqa import arg_specs as gqa_specs
from pallas_kernels.sparse_gqa import mosaic_gpu as gqa_kernel
from pallas_kernels.sparse_gqa.tuning import tuning as gqa_tuning
from pallas_kernels.sparse_mla import arg_specs as mla_specs
from pallas_kernels.sparse_mla import mosaic_gpu as mla_kernel
from pallas_kernels.sparse_mla.tuning import tuning as mla_tuning
from tests.pallas_kernels.attention_cases import GQA_SCALE, MLA_SCALE, agree, entry_case, gqa_case, mla_case
from tests.pallas_kernels.kernel_cases import DEVICES, ON_GPU, abstract_gpu, lower_for_cuda, same, without_races

on_cpu = pytest.mark.skipif(ON_GPU, reason="runs on the CPU")


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", mla_specs.SPECS)
def test_sparse_mla_lowers(name, kind):
    spec = mla_specs.SPECS[name]
    run = functools.partial(sparse_mla.sparse_mla, row=spec.row, scale=0.1, implementation="mosaic_gpu")
    text = lower_for_cuda(lambda args: run(**args), mla_specs.abstract_args(spec), kind=kind)
    assert text.count("kernel_hash") == 1 and "mosaic_gpu" in text


@pytest.mark.parametrize(
    "record, change",
    [
        ("bfloat16", {"handed_on": False}),
        ("bfloat16", {"consumer_registers": (240, 200), "producer_registers": 64}),
        ("fp8", {"handed_on": False, "consumer_registers": (224, 224), "producer_registers": 56}),
    ],
)
def test_other_launches_of_sparse_mla_lower(record, change):
    spec = mla_specs.SPECS["r64_n64_bf16"]._replace(record=record)
    how = mla_tuning(spec.requests, spec.heads, spec.selected)._replace(**change)
    run = functools.partial(mla_kernel.sparse_mla, row=spec.row, scale=0.1, how=how)
    assert "mosaic_gpu" in lower_for_cuda(lambda args: run(**args), mla_specs.abstract_args(spec))


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", gqa_specs.SPECS)
def test_sparse_gqa_lowers(name, kind):
    spec = gqa_specs.SPECS[name]
    run = functools.partial(sparse_gqa.sparse_gqa, scale=0.1, dtype=jnp.bfloat16, implementation="mosaic_gpu")
    text = lower_for_cuda(lambda args: run(**args), gqa_specs.abstract_args(spec), kind=kind)
    assert text.count("kernel_hash") == 1 and "mosaic_gpu" in text


@pytest.fixture
def interpreted():
    with without_races():
        yield


@on_cpu
@pytest.mark.parametrize(
    "record, heads, selected, parts, change",
    [
        ("bfloat16", 16, 100, 1, {}),
        ("bfloat16", 128, 321, 2, {}),
        ("bfloat16", 64, 321, 1, {"handed_on": False}),
        ("fp8", 96, 200, 1, {"handed_on": False}),
        ("fp8", 64, 300, 3, {}),
        ("fp8", 64, 200, 1, {}),
    ],
)
def test_sparse_mla_interpreted(record, heads, selected, parts, change, interpreted):
    case = mla_case(record, 5 if heads == 16 else 2, heads, selected)
    each = math.ceil(math.ceil(selected / 64) / parts)
    how = mla_tuning(2, heads, selected)._replace(split=Split(parts, each), **change)
    run = functools.partial(mla_kernel.sparse_mla, row=case.row, scale=MLA_SCALE, how=how)
    agree(jax.jit(run)(*case.args()), case.want())


@on_cpu
@pytest.mark.parametrize(
    "requests, kv_heads, heads, selected, tokens, masked",
    [(3, 2, 4, 13, 16, False), (2, 4, 4, 9, 16, True), (3, 1, 16, 2, 128, False), (2, 3, 5, 11, 10, True)],
)
def test_sparse_gqa_interpreted(requests, kv_heads, heads, selected, tokens, masked, interpreted):
    case = gqa_case(requests, kv_heads, heads, selected, tokens, masked=masked)
    run = functools.partial(gqa_kernel.sparse_gqa, scale=GQA_SCALE)
    out, sums = jax.jit(run)(*case.args())
    agree((out, sums), case.want())
    rounded = jax.jit(functools.partial(run, out_dtype=jnp.bfloat16))(*case.args())
    same(rounded, (out.astype(jnp.bfloat16), sums), "rounded: ")


@pytest.mark.parametrize("requests", [1, 2, 3, 16, 64, 100, 1000])
@pytest.mark.parametrize("selected", [1, 64, 65, 2048, 4096])
def test_launches(requests, selected):
    """Every part has tiles, all places are covered, and no warpgroup waits for registers that nobody gives back."""
    for heads in (64, 128):
        how = mla_tuning(requests, heads, selected)
        parts, tiles = how.split
        assert parts * tiles * 64 >= selected > (parts - 1) * tiles * 64
        assert sum(how.consumer_registers) + how.producer_registers <= 504
        assert min(how.consumer_registers) >= 168 >= how.producer_registers
    for kv_heads in (1, 2, 8):
        how = gqa_tuning(requests, kv_heads, selected * 16, masked=False)
        assert how.split.parts * how.split.tiles * 64 >= selected * 16 and kv_heads % how.consumers == 0
        assert how.consumers * how.consumer_registers + how.producer_registers <= 504


def test_split():
    assert split(64, 2048) == Split(2, 16) and split(128, 2048) == Split(1, 32)
    assert split(1, 2048) == Split(16, 2) and split(1, 1) == Split(1, 1) and split(500, 100) == Split(1, 2)
    assert split(70, 2048).parts > 1  # not half of the processors idle
    assert split(140, 2048).parts > 1  # nor nearly all of them in a second wave


def test_merge_of_parts_where_nothing_was_attended():
    inf = float("inf")
    outs = jnp.asarray([[[1.0, 2.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[3.0, 4.0], [0.0, 0.0]]])
    sums = jnp.asarray([[0.5, -inf], [-inf, -inf], [0.5, -inf]])
    out, total = online_softmax.merge(outs, sums)
    assert jnp.array_equal(out, jnp.asarray([[2.0, 3.0], [0.0, 0.0]]))
    assert abs(float(total[0]) - (0.5 + 0.6931472)) < 1e-6 and float(total[1]) == -inf
    rounded, _ = online_softmax.merge(outs * 1.001, sums, jnp.bfloat16)
    assert jnp.array_equal(rounded, online_softmax.merge(outs * 1.001, sums)[0].astype(jnp.bfloat16))


def test_auto_takes_the_kernels():
    """And says why a named kernel can't take a shape."""
    pages = gqa_case(2, 2, 4, 3, 16)
    gqa = functools.partial(sparse_gqa.sparse_gqa, *pages.args(), scale=1.0)
    for case in (mla_case("bfloat16", 2, 16, 4), mla_case("fp8", 2, 16, 4)):
        mla = functools.partial(sparse_mla.sparse_mla, *case.args(), row=case.row, scale=1.0)
        assert "mosaic_gpu" in lower_for_cuda(mla)
    entries = functools.partial(sparse_mla.sparse_entries, *entry_case("bfloat16", 2, 16, 4, 3).args(), scale=1.0)
    assert "mosaic_gpu" in lower_for_cuda(lambda: entries(record="bfloat16"))
    assert "mosaic_gpu" in lower_for_cuda(lambda: gqa(dtype=jnp.bfloat16))
    with abstract_gpu(), pytest.raises(ValueError, match=r"bfloat16 records, got float32"):
        gqa(dtype=jnp.float32, implementation="mosaic_gpu")
    query, place = jnp.zeros((1, 65, 576)), jnp.zeros((1, 1), jnp.int32)
    for row, why in (
        (RowFormat(32, 8, "bfloat16"), "512 + 64 numbers, got 32 + 8"),
        (RowFormat(512, 64, "float32"), "got float32"),
        (RowFormat(512, 64, "fp8"), "65 heads can't be shared out evenly over 2 programs"),
    ):
        assert why in (mla_kernel.unsupported(query, place, row) or "")
    for shape, masked, why in (((1, 1, 1, 64), False, "got 64"), ((1, 1, 33, 128), True, "at most 32 heads")):
        words = jnp.zeros((1, 1, 256), jnp.uint32)
        bf16 = jnp.dtype(jnp.bfloat16)
        assert why in (gqa_kernel.unsupported(jnp.zeros(shape), words, place, bf16, masked=masked) or "")


def test_private_parts_of_jax():
    """What breaks when JAX changes, beyond what `test_private_parts_of_jax` of test_kernels_lower.py names.

    A part that is gone fails where it is looked up, one that is something else in the assertion.
    """
    used = {
        "addresses as numbers": tiles.llvm.ptrtoint,
        "numbers as addresses": tiles.llvm.inttoptr,
        "stores": tiles.llvm.store,
        "vectors without a value yet": tiles.llvm.mlir_undef,
        "elements into vectors": tiles.llvm.insertelement,
        "elements of vectors": tiles.llvm.extractelement,
        "bits as another type": tiles.llvm.bitcast,
        "PTX: asynchronous copies and conversions": tiles.mgpu_utils.inline_ptx,
        "pointers into refs": tiles.mgpu_utils.memref_ptr,
        "pointers to elements": tiles.mgpu_utils.getelementptr,
        "places of a register array": plgpu.Layout.WGMMA.to_mgpu().thread_idxs,
        "rows and columns of a tensor core tile": plgpu.Layout.WGMMA.reduce,
    }
    assert [name for name, part in used.items() if not callable(part)] == []
