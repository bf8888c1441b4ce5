# SPDX-License-Identifier: Apache-2.0
"""Time of sparse_mla, sparse_entries and sparse_gqa, beside their floors and beside the jnp references under jit.

The floors are bytes over the HBM read peak and FLOP over the bfloat16 matmul peak, both measured in the same run. Bytes
are the selected rows, once, with queries and results; FLOP are those of the definition, `2 R N K (576 + 512)`. Calls go
round selections that together don't fit in the L2 cache, as in a decode step.

`device_us` is the time of all kernels of a call (CUPTI), `kernel_us` that of the attention kernel alone (without the
merge of its parts), `loop_us` a call in a jitted loop by the wall clock. `difference` is the largest one from the
reference, and `met` says whether the figure that was asked for was reached.

`python -m benchmarks.bench_attention [--plans mla entries gqa] [--sweep]` writes benchmarks/results/attention_*.jsonl;
`--sweep` also measures other launches, whose best goes into the tuning files; for other numbers of parts of sparse_mla
see benchmarks/results/attention_nvidia_h200_mla_sweep.jsonl.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from pallas_kernels.online_softmax import Split, split
from pallas_kernels.sparse_gqa import arg_specs as gqa_specs
from pallas_kernels.sparse_gqa import mosaic_gpu as gqa_kernel
from pallas_kernels.sparse_gqa import reference as gqa_reference
from pallas_kernels.sparse_gqa.tuning import tuning as gqa_tuning
from pallas_kernels.sparse_mla import arg_specs as mla_specs
from pallas_kernels.sparse_mla import mosaic_gpu as mla_kernel
from pallas_kernels.sparse_mla import reference as mla_reference
from pallas_kernels.sparse_mla.tuning import tiles_of
from pallas_kernels.sparse_mla.tuning import tuning as mla_tuning

CACHE_BYTES, LOOP = 60 << 20, 20
SLOTS = 64 * 4160  # of every group, so that even one request's rows are far apart
# fp8 shapes come right after the bfloat16 ones that they are compared with.
MLA = ("r64_n64_bf16", "r64_n64_fp8", "r64_n128_bf16", "r64_n128_fp8", "r1_n64_bf16", "r1_n64_fp8", "few_heads")
ENTRIES = ("c4_r64", "c4_r1", "c128_r64")
GQA = ("quest_r64", "quest_r64_masked", "quest_r1", "four_kv_heads", "msa_r64")
# Figures to reach: share of the HBM floor, TFLOP/s of the definition, or microseconds.
REQUIRED = {
    "r64_n64_bf16": ("share_of_hbm", 0.45, 0.65),
    "r64_n128_bf16": ("tflop_s", 230, 400),
    "r64_n64_fp8": ("times_bf16", 1.0, 1.3),
    "r64_n128_fp8": ("times_bf16", 1.0, 1.3),
    "r1_n64_bf16": ("device_us", 25, 15),
    "quest_r64": ("share_of_hbm", 0.55, 0.75),
}


def random_words(slots: int, words: int, key: int, *, fp8: bool = False) -> jax.Array:
    """uint32 `[1, slots, words]`: normal bf16 numbers; fp8 records: normal e4m3 values, scales of 1/16, bf16."""

    def normal(n: int, dtype: Any, at: int) -> jax.Array:
        values = jax.random.normal(jax.random.fold_in(jax.random.key(key), at), (slots, n), jnp.bfloat16)
        values = values.astype(dtype)
        per_word = 4 // values.dtype.itemsize
        return jax.lax.bitcast_convert_type(values.reshape(slots, -1, per_word), jnp.uint32)

    def make() -> jax.Array:
        if not fp8:
            return normal(2 * words, jnp.bfloat16, 0)[None]
        scales = jnp.full((slots, 4), 0x3D800000, jnp.uint32)
        return jnp.concatenate([normal(512, jnp.float8_e4m3fn, 0), scales, normal(64, jnp.bfloat16, 1)], axis=-1)[None]

    return jax.block_until_ready(jax.jit(make)())


def places(requests: int, selected: int, slots: int, row_bytes: int) -> list[jax.Array]:
    """Selections to go round, each of different slots as far as there are enough."""
    copies = min(24, max(2, 2 * CACHE_BYTES // (requests * selected * row_bytes)))
    rng, count = np.random.default_rng(0), requests * selected
    flat = np.concatenate([rng.permutation(slots) for _ in range(-(-copies * count // slots))]).astype(np.int32)
    return [jnp.asarray(flat[i * count : (i + 1) * count].reshape(requests, selected)) for i in range(copies)]


def measure(
    run: Callable[..., Any], reference: Callable[..., Any] | None, inputs: list[tuple[Any, ...]], name: str
) -> dict[str, Any]:
    """Times of `run(*input)`, whose first argument is the query, and its difference from the reference."""
    jitted, record = jax.jit(run), {}
    got = jax.block_until_ready(jitted(*inputs[0]))
    runs = common.runs_us(jitted, list(itertools.islice(itertools.cycle(inputs), max(12, len(inputs)))))[2:]
    record |= common.summary("device", np.asarray([sum(us for _, us in times) for times in runs]))
    record |= common.summary("kernel", np.asarray([sum(us for n, us in times if name in n) for times in runs]))

    @jax.jit
    def loop(query: jax.Array, *rest: Any) -> jax.Array:
        def step(_: Any, query: jax.Array) -> jax.Array:
            out, _ = run(query, *rest)
            return query.at[..., : out.shape[-1]].add((0 * out).astype(query.dtype))

        return jax.lax.fori_loop(0, LOOP, step, query)

    jax.block_until_ready(loop(*inputs[0]))
    times = []
    for i in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(loop(*inputs[i % len(inputs)]))
        times.append((time.perf_counter() - begin) / LOOP * 1e6)
    record |= common.summary("loop", np.asarray(times))
    if reference is not None:
        plain = jax.jit(reference)
        want = jax.block_until_ready(plain(*inputs[0]))
        record["difference"] = float(max(jnp.max(jnp.abs(a - b)) for a, b in zip(got, want, strict=True)))
        slow = common.runs_us(plain, inputs[:4])
        record["reference_us"] = float(np.median([sum(us for _, us in times) for times in slow]))
        record["times_faster"] = record["reference_us"] / record["device_us"]
    return record


def judged(record: dict[str, Any], peak: dict[str, float], name: str) -> dict[str, Any]:
    """With floors, shares of the peaks, and whether what was asked for was reached."""
    record["hbm_floor_us"] = record["bytes"] / peak["hbm_read_gb_s"] / 1e3
    record["matmul_floor_us"] = record["flop"] / peak["bf16_tflop_s"] / 1e6
    record["gb_s"] = record["bytes"] / record["device_us"] / 1e3
    record["tflop_s"] = record["flop"] / record["device_us"] / 1e6
    record["share_of_hbm"] = record["hbm_floor_us"] / record["device_us"]
    record["share_of_matmul"] = record["matmul_floor_us"] / record["device_us"]
    if name in REQUIRED:
        what, required, aim = REQUIRED[name]
        less = what.endswith("_us")
        record |= {"required": required, "aim": aim, "figure": what}
        record["met"] = "no"
        for word, value in (("required", required), ("aim", aim)):
            if record[what] <= value if less else record[what] >= value:
                record["met"] = word
    return record


def attempt(record: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The record with what `work` gives, or with its error: one launch that doesn't fit must not end a sweep."""
    try:
        return record | work()
    except Exception as error:
        return record | {"error": str(error)[:300]}


def mla(peak: dict[str, float], *, sweep: bool) -> Iterator[dict[str, Any]]:
    """sparse_mla at its shapes; fp8 records beside the bf16 ones that came before."""
    bf16_us: dict[str, float] = {}
    for name in MLA:
        spec = mla_specs.SPECS[name]
        row, fp8 = spec.row, spec.record == "fp8"
        words, zero = random_words(SLOTS, row.words, 1, fp8=fp8), jnp.int32(0)
        query = jax.random.normal(jax.random.key(0), (spec.requests, spec.heads, row.width), jnp.bfloat16)
        at = places(spec.requests, spec.selected, SLOTS, row.row_bytes)
        inputs = [(query, words, zero, place) for place in at]
        size = spec.requests * (spec.selected * row.row_bytes + spec.heads * (2 * row.width + 4 * row.latent))
        flop = 2 * spec.requests * spec.heads * spec.selected * (row.width + row.latent)
        base = {"op": "sparse_mla", "name": name, **spec._asdict(), "bytes": size, "flop": flop, **peak}
        chosen = mla_tuning(spec.requests, spec.heads, spec.selected)
        launches = [chosen]
        if sweep:
            launches.append(chosen._replace(handed_on=False, consumer_registers=(240, 240), producer_registers=24))
        for i, how in enumerate(launches):
            run = functools.partial(mla_kernel.sparse_mla, row=row, scale=0.05, how=how)
            plain = functools.partial(mla_reference.sparse_mla, row=row, scale=0.05) if i == 0 else None
            work = functools.partial(measure, run, plain, inputs, "mla_kernel")
            record = attempt(base | {"how": how._asdict()}, work)
            same = name.replace("fp8", "bf16")
            if "device_us" in record:
                if i == 0:
                    bf16_us[name] = record["device_us"]
                record["times_bf16"] = bf16_us.get(same, float("nan")) / record["device_us"]
            yield judged(record, peak, name) if "device_us" in record else record


def entries(peak: dict[str, float], *, sweep: bool) -> Iterator[dict[str, Any]]:
    """sparse_entries at its shapes: random entries, the window's 128 rows one after the other, a sink for each head."""
    for name in ENTRIES:
        spec = mla_specs.ENTRY_SPECS[name]
        requests, heads, width = spec.requests, spec.heads, 512
        words, zero = random_words(SLOTS, width // 2, 1), jnp.int32(0)
        query = jax.random.normal(jax.random.key(0), (requests, heads, width), jnp.bfloat16)
        window_words = random_words(requests * spec.window, width // 2, 2)
        window_place = jnp.arange(requests * spec.window, dtype=jnp.int32).reshape(requests, -1)
        sink = jax.random.normal(jax.random.key(3), (heads,), jnp.float32)
        window = (window_words, zero, window_place, sink)
        inputs = [(query, words, zero, place, *window) for place in places(requests, spec.selected, SLOTS, 2 * width)]
        records = spec.selected + spec.window
        size = requests * (records * 2 * width + heads * (2 + 4) * width)
        flop = 4 * requests * heads * records * width
        base = {"op": "sparse_entries", "name": name, **spec._asdict(), "bytes": size, "flop": flop, **peak}
        chosen = mla_tuning(requests, heads, spec.selected, window=spec.window)
        launches = [chosen]
        if sweep:
            tiles = tiles_of(spec.selected) + tiles_of(spec.window)
            splits = [Split(parts, -(-tiles // parts)) for parts in (1, 2, 3, 5, tiles)]
            launches += [chosen._replace(split=other) for other in splits if other != chosen.split]
        for i, how in enumerate(launches):
            run = functools.partial(mla_kernel.sparse_entries, scale=0.05, how=how)
            plain = functools.partial(mla_reference.sparse_entries, record="bfloat16", scale=0.05)
            work = functools.partial(measure, run, plain if i == 0 else None, inputs, "mla_kernel")
            record = attempt(base | {"how": how._asdict()}, work)
            yield judged(record, peak, name) if "device_us" in record else record


def gqa(peak: dict[str, float], *, sweep: bool) -> Iterator[dict[str, Any]]:
    """sparse_gqa at its shapes; every page wholly visible."""
    for name in GQA:
        spec = gqa_specs.SPECS[name]
        token_bytes = 2 * spec.kv_heads * gqa_specs.CHANNELS * 2
        slots = min(spec.slots * 64 // spec.requests, 64 * 260)
        words, zero = random_words(slots, spec.tokens * token_bytes // 4, 1), jnp.int32(0)
        heads = (spec.requests, spec.kv_heads, spec.heads)
        query = jax.random.normal(jax.random.key(0), (*heads, gqa_specs.CHANNELS), jnp.bfloat16)
        visible = jnp.full((spec.requests, spec.selected), spec.tokens, jnp.int32)
        mask = jax.random.bernoulli(jax.random.key(2), 0.5, (*heads, spec.selected)) if spec.masked else None
        at = places(spec.requests, spec.selected, slots, spec.tokens * token_bytes)
        inputs = [(query, words, zero, place, visible, mask) for place in at]
        tokens = spec.selected * spec.tokens
        size = spec.requests * tokens * token_bytes + query.size * (2 + 4)
        flop = 4 * query.size * tokens
        base = {"op": "sparse_gqa", "name": name, **spec._asdict(), "bytes": size, "flop": flop, **peak}
        chosen = gqa_tuning(spec.requests, spec.kv_heads, tokens, spec.masked)
        launches = [chosen]
        if sweep:
            for consumers, stages in ((1, 3), (1, 6), (2, 3)):
                part = split(spec.requests * spec.kv_heads // consumers, tokens)
                launches.append(chosen._replace(split=part, consumers=consumers, stages=stages))
        for i, how in enumerate(launches):
            run = functools.partial(gqa_kernel.sparse_gqa, scale=0.1, how=how)
            plain = functools.partial(gqa_reference.sparse_gqa, scale=0.1, dtype=jnp.dtype(jnp.bfloat16))
            work = functools.partial(measure, run, plain if i == 0 else None, inputs, "gqa_kernel")
            record = attempt(base | {"how": how._asdict()}, work)
            yield judged(record, peak, name) if "device_us" in record else record


COLUMNS = (
    "name", "how", "device_us", "kernel_us", "loop_us", "hbm_floor_us", "share_of_hbm", "tflop_s", "times_faster",
    "times_bf16", "difference", "error", "met",
)  # fmt: skip

if __name__ == "__main__":
    common.run_plans("attention", {"mla": mla, "entries": entries, "gqa": gqa}, COLUMNS, __doc__)
