# SPDX-License-Identifier: Apache-2.0
"""Every kernel lowers for CUDA on a machine without a GPU. Lowering is not a PTX compile: that is for the GPU tests."""

from __future__ import annotations

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import indexed
from pallas_kernels.backup import arg_specs as backup_specs
from pallas_kernels.backup import backup
from pallas_kernels.backup.tuning import Tuning as BackupTuning
from pallas_kernels.backup.tuning import tuning as backup_tuning
from pallas_kernels.common import tuned
from pallas_kernels.fetch import arg_specs as fetch_specs
from pallas_kernels.fetch import fetch
from pallas_kernels.fetch import mosaic_gpu as fetch_kernel
from pallas_kernels.fetch.tuning import Tuning as FetchTuning
from pallas_kernels.fetch.tuning import tuning as fetch_tuning
from pallas_kernels.index_scores import dsa_scores
from pallas_kernels.index_scores import mosaic_gpu as scores_kernel
from pallas_kernels.index_topk import index_topk
from pallas_kernels.index_topk import mosaic_gpu as topk_kernel
from pallas_kernels.resolve import arg_specs as resolve_specs
from pallas_kernels.resolve import mosaic_gpu, resolve, resolve_and_fetch
from pallas_kernels.resolve.tuning import Tuning
from pallas_kernels.resolve.tuning import tuning as resolve_tuning
from tests.pallas_kernels.kernel_cases import DEVICES, HOST, abstract_gpu, lower_for_cuda

TUNED = {
    "resolve": Tuning, "fetch": FetchTuning, "fetch_beside": FetchTuning, "backup": BackupTuning,
    "selection_parts": dict,
}  # fmt: skip
TAKE_THE_POOL = ("func.func ", "call @", "return ", "custom_call @annotate_device_placement", "custom_call @mosaic_gpu")


def lower(function, args: dict, kind: str) -> str:
    """Lowers `function(**args)` with `pool` in host memory; the kernel must be in it, and no other operation on a pool.

    What XLA itself would copy isn't there to be seen.
    """

    def with_host_pool(args):
        if "pool" in args:
            args = args | {"pool": jax.device_put(args["pool"], HOST)}
        return function(**args)

    text = lower_for_cuda(with_host_pool, args, kind=kind)
    assert "mosaic_gpu" in text
    if "pool" in args:
        rows, words = args["pool"].shape
        takes = [line for line in text.splitlines() if f"tensor<{rows}x{words}xui32>" in line]
        assert any("@mosaic_gpu" in line for line in takes)
        assert all(any(word in line for word in TAKE_THE_POOL) for line in takes)
        assert all('"pinned_host"' in line for line in takes if "@annotate_device_placement" in line)
    return text


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", resolve_specs.SPECS)
def test_resolve(name, kind):
    args, options = resolve_specs.abstract_args(resolve_specs.SPECS[name])
    fused = functools.partial(resolve_and_fetch, **options, implementation="mosaic_gpu")
    lower(fused, args, kind)
    if kind == "NVIDIA H200":
        del options["rows_per_space"]
        for without in ("pool", "hot_rows", "space", "group"):
            del args[without]
        lower(functools.partial(resolve, **options, implementation="mosaic_gpu"), args, kind)


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", fetch_specs.SPECS)
def test_fetch(name, kind):
    args, options = fetch_specs.abstract_args(fetch_specs.SPECS[name])
    lower(functools.partial(fetch, **options, implementation="mosaic_gpu"), args, kind)


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", backup_specs.SPECS)
def test_backup(name, kind):
    args = backup_specs.abstract_args(backup_specs.SPECS[name])
    text = lower(functools.partial(backup, implementation="mosaic_gpu"), args, kind)
    assert 'jax.result_info = "result", mhlo.memory_kind = "pinned_host"' in text


@pytest.mark.parametrize("buckets", [0, 64])
def test_no_operand_of_an_emitted_word_is_one_value(buckets, monkeypatch):
    """An array that is a splat has another layout than the words expect, which only the PTX compile would say.

    Lowering with lane semantics checks the layout of every operand.
    """
    kernel = plgpu.kernel
    by_lane = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    monkeypatch.setattr(plgpu, "kernel", functools.partial(kernel, compiler_params=by_lane))
    for name in ("dsa_mla_bf16_r64", "million", "widest"):
        args, options = resolve_specs.abstract_args(resolve_specs.SPECS[name])

        def run(args, options=options):
            rows = tuple(args[n] for n in ("pool", "hot_rows", "space", "group"))
            names = ("selected", "length", "slot_ids", "recency", "page_table", "base", "table")
            how = Tuning(programs=2, threads=4, in_flight=2, buckets=buckets)
            return mosaic_gpu.resolve(*(args[n] for n in names), rows=rows, how=how, **options)

        lower_for_cuda(run, args)
    args, options = fetch_specs.abstract_args(fetch_specs.SPECS["dsa_mla_bf16"])
    lower(functools.partial(fetch_kernel.fetch, **options, how=FetchTuning(16, 8, 2, buckets)), args, "NVIDIA H200")


@pytest.mark.parametrize("span_bytes", [0, 1 << 30, 43 * 32768 * 1152, 1 << 33, 1 << 36])
@pytest.mark.parametrize("requests", [1, 16, 43, 64, 1000])
def test_tuned_launches(requests, span_bytes):
    """There is a choice for every size, and the device can launch it."""
    for op in TUNED:
        assert tuned(op, requests=requests, span_bytes=span_bytes, records=span_bytes // 1152), op
    how = resolve_tuning(requests, span_bytes)
    fetches = [fetch_tuning(requests, span_bytes, beside=beside) for beside in (False, True)]
    assert how.programs in (1, 2, 4, 8) and 1 <= how.threads <= 8 and how.copiers <= how.threads
    for how in (*fetches, backup_tuning()):
        assert 1 <= how.programs <= 132 and 1 <= how.threads <= 8


def test_tuned_launches_were_timed():
    table = json.loads((pathlib.Path(indexed.__file__).parent / "tuned" / "nvidia_h200.json").read_text())
    assert {op for op in table if isinstance(table[op], dict)} == set(TUNED)
    untimed = [
        (op, tuning(**choice["how"]))
        for op, tuning in TUNED.items()
        for choice in table[op]["choices"]
        if tuning(**choice["how"]) not in [tuning(**timing["how"]) for timing in table[op]["timings"]]
    ]
    assert untimed == []


@pytest.mark.parametrize("busy", [None, 5])
def test_a_launch_is_for_as_many_as_have_a_length(busy, monkeypatch):
    asked = []

    def recorded(tuning):
        return lambda rows, *sizes: asked.append(rows) or tuning(rows, *sizes)

    for module in (topk_kernel, scores_kernel, mosaic_gpu):
        monkeypatch.setattr(module, "tuning", recorded(module.tuning))
    args, options = resolve_specs.abstract_args(resolve_specs.SPECS["dsa_mla_bf16_r64"])
    requests = args["selected"].shape[0]
    length, scores, query, weight, keys = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((requests,), jnp.int32), ((requests, 4096), jnp.float32), ((requests, 8, 128), jnp.bfloat16),
            ((requests, 8), jnp.float32), ((1, requests, 4096, 128), jnp.bfloat16),
        )
    )  # fmt: skip
    jax.clear_caches()  # or nothing is traced that an earlier test has traced
    lower_for_cuda(lambda s, n: index_topk(s, n, 64, busy=busy), scores, length)
    lower_for_cuda(
        lambda q, w, k, n: dsa_scores(q, w, k, None, 0, scale=1.0, length=n, busy=busy), query, weight, keys, length
    )
    lower(functools.partial(resolve_and_fetch, **options, busy=busy), args, "NVIDIA H200")
    assert asked == [busy or requests] * 3


def test_private_parts_of_jax():
    """What breaks when JAX changes: everything private is imported by pallas_kernels.indexed, and named here.

    A part that is gone fails where it is looked up, one that is something else in the assertion.
    """
    used = {
        "MLIR types and values": indexed.ir.IntegerType,
        "integer arithmetic of a lane": indexed.arith.cmpi,
        "loads and stores of one element": indexed.memref.load,
        "wide loads and stores": indexed.llvm.load,
        "atomics": indexed.llvm.atomicrmw,
        "votes, shuffles, lane masks, cluster barriers": indexed.nvvm.vote_sync,
        "loops and branches of a lane": indexed.scf.ForOp,
        "population count": indexed.math_dialect.ctpop,
        "trailing zeros": indexed.math_dialect.cttz,
        "thread index and the program's barrier": indexed.gpu_dialect.barrier,
        "registers of an array": indexed.mgpu.FragmentedArray.foreach,
        "pointers into refs": indexed.mgpu_utils.memref_ptr,
        "pointers into refs of another program of a cluster": indexed.mgpu_utils.get_cluster_ptr,
        "a sum over a warp": indexed.mgpu_utils.redux,
        "the global timer": indexed.mgpu_utils.globaltimer,
        "emitted code inside a kernel": plgpu.inline_mgpu,
        "the layout that gives each lane neighbours": plgpu.Layout.WG_STRIDED,
    }
    assert [name for name, part in used.items() if not callable(part)] == []
    for name in ("vote_sync", "shfl_sync", "read_ptx_sreg_lanemask_lt", "cluster_arrive", "cluster_wait"):
        assert hasattr(indexed.nvvm, name), name
    # The switch that says whether the interpreter runs.
    assert indexed._config.pallas_tpu_interpret_mode_context_manager.value is None and not indexed.interpreting()


def test_nothing_else_imports_private_jax():
    root = pathlib.Path(indexed.__file__).parent
    private = [str(path.relative_to(root)) for path in root.rglob("*.py") if "jax._src" in path.read_text()]
    assert private == ["indexed.py"]


def test_errors():
    def zeros(*shape):
        return jnp.zeros(shape, jnp.int32)

    with pytest.raises(ValueError, match=r"can't run.*those that can: xla"):
        backup(jnp.zeros((5, 2), jnp.uint32), jnp.zeros((1, 2), jnp.uint32), zeros(1), implementation="mosaic_gpu")
    with abstract_gpu(), pytest.raises(ValueError, match="multiple of 8 bytes, got 12"):
        backup(jnp.zeros((5, 3), jnp.uint32), jnp.zeros((1, 3), jnp.uint32), zeros(1), implementation="mosaic_gpu")
    args = (zeros(1, 4), zeros(1), zeros(1, 1, 8), jnp.zeros((1, 1, 8), jnp.int16), zeros(1, 9), zeros(1), 0)
    with abstract_gpu(), pytest.raises(ValueError, match="hit-first LRU"):
        resolve(
            *args, ring_slots=1, page_records=1, order=lambda hit, loaded: jnp.arange(8), implementation="mosaic_gpu"
        )
    rows = jnp.zeros((9, 2), jnp.uint32), jnp.zeros((1, 9, 4), jnp.uint32)
    with pytest.raises(ValueError, match=r"resolve_and_fetch: pool must have shape \['any', 4\], got \[9, 2\]"):
        resolve_and_fetch(*rows, *args[:5], zeros(1), 0, 0, 0, rows_per_space=9, ring_slots=1, page_records=1)
    with pytest.raises(ValueError, match="implementation must be one of"):
        resolve(*args, ring_slots=1, page_records=1, implementation="triton")
    assert mosaic_gpu.unsupported(4096, 32767, 1 << 22) is None


def test_calls_of_one_shape_share_a_kernel():
    """A program with many layers holds a kernel once: every lowering of one would be compiled for itself."""
    scores, length = jax.ShapeDtypeStruct((4, 4096), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)

    def layers(scores, length):
        return [index_topk(scores, length - layer, 16) for layer in range(3)]

    assert lower_for_cuda(layers, scores, length).count("custom_call @mosaic_gpu") == 1
