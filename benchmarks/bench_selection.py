# SPDX-License-Identifier: Apache-2.0
"""Time of index_topk and of the index scores, beside their floors and beside `torch.topk` and the jnp references.

The floors are bytes over the HBM read peak and FLOP over the bfloat16 matmul peak, both measured in the same run.
`cold` times go round inputs (of the scores: layers) that together don't fit in the L2 cache, as in a decode step;
`warm` ones don't.
`device_us` is the kernel's own time (CUPTI). What is around the kernel (shifting and casting queries) is in
`around_us`. Every record says whether the ids were those of the reference.

`python -m benchmarks.bench_selection [--plans topk scores] [--sweep]` writes benchmarks/results/selection_*.jsonl;
`--sweep` also measures other launches, whose best goes into the tuning files.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from pallas_kernels.index_scores import arg_specs as scores_specs
from pallas_kernels.index_scores import dsa
from pallas_kernels.index_scores import mosaic_gpu as scores_kernel
from pallas_kernels.index_scores import reference as scores_reference
from pallas_kernels.index_scores.tuning import Tuning as ScoresTuning
from pallas_kernels.index_scores.tuning import tuning as scores_tuning
from pallas_kernels.index_topk import arg_specs as topk_specs
from pallas_kernels.index_topk import mosaic_gpu as topk_kernel
from pallas_kernels.index_topk import reference as topk_reference
from pallas_kernels.index_topk.tuning import RESIDENT_BYTES, share_of
from pallas_kernels.index_topk.tuning import Tuning as TopkTuning
from pallas_kernels.index_topk.tuning import tuning as topk_tuning

TOPK = "dsa_r64_128k", "dsa_r8_128k", "dsa_r64_32k", "deepseek_v4_c4", "quest_pages", "msa_blocks", "million"
SWEPT = ("dsa_r64_128k", "dsa_r8_128k", "dsa_r64_32k", "glm52_fp8_r32", "llama_r64", "m3_r64")  # by --sweep
RUNS, CACHE_BYTES = 20, 60 << 20


def timed(run: Callable[..., Any], inputs: list[tuple[Any, ...]], name: str) -> dict[str, Any]:
    """Warm and cold times of the kernel `name`, and of what is around it."""
    jitted, record = jax.jit(run), {}
    for temperature, args in (("warm", inputs[:1]), ("cold", inputs)):
        runs = common.runs_us(jitted, list(itertools.islice(itertools.cycle(args), RUNS)))[2:]
        for what in ("device", "around"):
            sums = [sum(us for n, us in kernels if (name in n) == (what == "device")) for kernels in runs]
            record |= common.summary(f"{temperature}_{what}", np.asarray(sums))
    return record


def torch_topk_us(shape: tuple[int, int], k: int) -> dict[str, float]:
    """Median time of `torch.topk` between two events, over inputs that go round; nothing where torch isn't there."""
    try:
        import torch
    except ImportError:
        return {}
    copies = max(2, 3 * CACHE_BYTES // (4 * shape[0] * shape[1]))
    inputs = [torch.randn(shape, device="cuda") for _ in range(min(copies, 12))]
    times = []
    for i in range(RUNS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.topk(inputs[i % len(inputs)], k)
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return {"torch_us": float(np.median(times[3:])), "torch": torch.__version__}


def topk_launches(rows: int, context: int) -> list[TopkTuning]:
    """Launches worth a try."""
    out = []
    for programs, threads, in_flight in itertools.product((1, 2, 4, 8), (4, 8), (2, 4)):
        fits = 4 * share_of(context, programs) <= RESIDENT_BYTES
        if rows * programs >= 32:
            out += [TopkTuning(programs, threads, in_flight, kept) for kept in ((True, False) if fits else (False,))]
    return out


def topks(peak: dict[str, float], *, sweep: bool) -> Iterator[dict[str, Any]]:
    """index_topk at its shapes; scores of several kinds."""
    for name in TOPK:
        spec = topk_specs.SPECS[name]
        copies = min(max(2, 3 * CACHE_BYTES // (4 * spec.rows * spec.context)), 24)
        key = jax.random.key(0)
        normal = [jax.random.normal(k, (spec.rows, spec.context)) for k in jax.random.split(key, copies)]
        kinds = {
            "normal": normal,
            "positive": [5 + jnp.abs(x) for x in normal],
            "zeros": [jnp.where(x > 2, x, 0) for x in normal],
            "equal": [jnp.zeros_like(x) for x in normal],
        }
        length = jnp.full(spec.rows, spec.context, jnp.int32)
        want_of = jax.jit(functools.partial(topk_reference.index_topk, k=spec.selected, newest=spec.newest))
        size = 4 * spec.rows * (spec.context + spec.selected)
        at = {"op": "index_topk", "name": name, **spec._asdict(), "bytes": size, **peak}
        at["floor_us"] = size / peak["hbm_read_gb_s"] / 1e3
        chosen = topk_tuning(spec.rows, spec.context)
        others = (
            [how for how in topk_launches(spec.rows, spec.context) if how != chosen] if sweep and name in SWEPT else []
        )
        for kind, how in [*((kind, chosen) for kind in kinds), *(("normal", how) for how in others)]:
            inputs = [(x, length) for x in kinds[kind]]
            run = functools.partial(topk_kernel.index_topk, k=spec.selected, newest=spec.newest, how=how)
            record = at | {"scores": kind, "how": how._asdict()}
            try:
                right = bool(jnp.array_equal(jax.jit(run)(*inputs[0]), want_of(*inputs[0])))
                record |= {"right": right} | timed(run, inputs, "index_topk_kernel")
                record["share_of_floor"] = record["floor_us"] / record["cold_device_us"]
            except Exception as error:  # a launch that doesn't fit must not end the sweep
                record["error"] = str(error)[:200]
            yield record
        times = common.total_us(want_of, normal[0], length)
        yield at | {"implementation": "xla", "cold_device_us": float(np.median(times))}
        yield at | {"implementation": "torch"} | torch_topk_us((spec.rows, spec.context), spec.selected)


def scores(peak: dict[str, float], *, sweep: bool) -> Iterator[dict[str, Any]]:
    """dsa_scores, quest_scores and msa_scores at their shapes, each with as many layers as the cache can't hold."""

    def fill(args: Any, seed: int) -> Any:
        keys = iter(jax.random.split(jax.random.key(seed), len(args)))

        def one(arg: jax.ShapeDtypeStruct) -> jax.Array:
            if arg.dtype == jnp.int32:
                return jnp.ones(arg.shape, jnp.int32)
            key = next(keys)
            return jax.jit(lambda: jax.random.normal(key, arg.shape, jnp.bfloat16).astype(arg.dtype))()

        return jax.tree.map(one, args)

    def launches(name: str, how: ScoresTuning) -> list[ScoresTuning]:
        grid = itertools.product((64, 128), (2, 3, 4, 6), (how.parts // 2, how.parts, 2 * how.parts))
        return [ScoresTuning(*g) for g in grid if g[2] and g != tuple(how)] if sweep and name in SWEPT else []

    def with_layers(spec: Any, layer_bytes: int) -> Any:
        return spec._replace(layers=max(spec.layers, 1 + 3 * CACHE_BYTES // layer_bytes))

    for name, spec in scores_specs.DSA.items():
        if spec.records < 4096:
            continue
        fp8 = spec.keys == "float8_e4m3fn"
        width = 132 if fp8 else 256
        spec = with_layers(spec, spec.rows * spec.records * width)
        args, options = scores_specs.dsa_args(spec)
        args = fill(args, 0) | {"length": jnp.full(spec.rows, spec.records, jnp.int32)}
        work = {
            "bytes": spec.rows * spec.records * (width + 4),
            "flop": 2 * 128 * spec.rows * spec.records * spec.heads,
        }
        arrays = tuple(args[n] for n in ("length", "query", "weight", "keys", "key_scale"))
        base = scores_tuning(spec.rows, spec.records, width)
        for how in (base, *launches(name, base)):

            def run(length: Any, *arrays: Any, how: Any = how, scale: float = options["scale"]) -> jax.Array:
                return scores_kernel.dsa_scores(*arrays, scale=scale, length=length, how=how)

            def xla(length: Any, *arrays: Any, scale: float = options["scale"]) -> jax.Array:
                return dsa.dsa_scores(*arrays, scale=scale)

            yield from _scored("dsa_scores", name, spec, work, how, run, xla, arrays, peak, with_xla=how is base)
    for name, spec in scores_specs.QUEST.items():
        if spec.pages < 1024:
            continue
        pairs = spec.rows * spec.groups * spec.pages
        spec = with_layers(spec, 512 * pairs)
        args = fill(scores_specs.quest_args(spec), 1)
        work = {"bytes": pairs * (512 + 4 * spec.heads), "flop": 4 * 128 * pairs * spec.heads}
        base = scores_tuning(spec.rows * spec.groups, spec.pages, 512)
        for how in (base, *launches(name, base)):
            run = functools.partial(scores_kernel.quest_scores, how=how)
            arrays = args["query"], args["key_min"], args["key_max"]
            xla = scores_reference.quest_scores
            yield from _scored("quest_scores", name, spec, work, how, run, xla, arrays, peak, with_xla=how is base)
    for name, spec in scores_specs.MSA.items():
        if spec.records < 4096:
            continue
        spec = with_layers(spec, 256 * spec.rows * spec.records)
        args = fill(scores_specs.msa_args(spec), 2)
        length = jnp.full(spec.rows, spec.records, jnp.int32)
        blocks = spec.rows * spec.heads * spec.records // 128
        work = {
            "bytes": 256 * spec.rows * spec.records + 4 * blocks,
            "flop": 2 * 128 * spec.rows * spec.records * spec.heads,
        }
        base = scores_tuning(spec.rows, spec.records, 256)
        for how in (base, *(how for how in launches(name, base) if how.block == base.block)):

            def run_msa(length: Any, query: Any, keys: Any, layer: Any, how: Any = how) -> jax.Array:
                return scores_kernel.msa_scores(query, keys, layer, length, block_tokens=128, how=how)

            def xla_msa(length: Any, query: Any, keys: Any, layer: Any) -> jax.Array:
                return scores_reference.msa_scores(query, keys, layer, length, block_tokens=128)

            arrays = length, args["query"], args["keys"]
            yield from _scored(
                "msa_scores", name, spec, work, how, run_msa, xla_msa, arrays, peak, with_xla=how is base
            )


def _scored(
    op: str, name: str, spec: Any, work: dict[str, Any], how: Any, run: Any, xla: Any, arrays: Any,
    peak: dict[str, float], *, with_xla: bool,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The kernel's record, and the reference's; both take the arrays and a layer, and go round the layers."""
    at = {"op": op, "name": name, **spec._asdict(), **work, **peak}
    at["hbm_floor_us"] = work["bytes"] / peak["hbm_read_gb_s"] / 1e3
    at["flop_floor_us"] = work["flop"] / peak["bf16_tflop_s"] / 1e6
    at["floor_us"] = max(at["hbm_floor_us"], at["flop_floor_us"])
    record = at | {"how": how._asdict()}
    inputs = [(*arrays, jnp.int32(layer)) for layer in range(spec.layers)]
    try:
        if with_xla:
            got, want = jax.jit(run)(*inputs[1]), jax.jit(xla)(*inputs[1])
            record["largest_error"] = float(jnp.max(jnp.abs(got - want)))
            record["largest_score"] = float(jnp.max(jnp.abs(want)))
        record |= timed(run, inputs, f"{op}_kernel")
        record["share_of_floor"] = at["floor_us"] / record["cold_device_us"]
        record["gb_s"] = work["bytes"] / record["cold_device_us"] / 1e3
        record["tflop_s"] = work["flop"] / record["cold_device_us"] / 1e6
    except Exception as error:  # a launch that doesn't fit must not end the sweep
        record["error"] = str(error)[:200]
    yield record
    if with_xla:
        runs = common.runs_us(jax.jit(xla), list(itertools.islice(itertools.cycle(inputs), 5)))
        times = [sum(us for _, us in kernels) for kernels in runs]
        yield at | {"implementation": "xla", "cold_device_us": float(np.median(times))}


COLUMNS = (
    "op", "name", "implementation", "scores", "how", "right", "largest_error", "warm_device_us", "cold_device_us",
    "cold_around_us", "torch_us", "floor_us", "share_of_floor", "error",
)  # fmt: skip

if __name__ == "__main__":
    common.run_plans("selection", {"topk": topks, "scores": scores}, COLUMNS, __doc__)
