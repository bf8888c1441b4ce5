# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: environment, device times, a stamped call, pools in pinned host memory, records."""

from __future__ import annotations

import argparse
import functools
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import profiler
from jax.experimental.pallas import mosaic_gpu as plgpu

from hisparse_jax.environment import commit
from pallas_kernels import indexed
from pallas_kernels.fetch import mosaic_gpu as fetch_kernel
from pallas_kernels.fetch.tuning import Tuning as FetchTuning
from pallas_kernels.resolve.types import Plan

HOST = jax.memory.Space.Host
RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """What a record must say to be compared with another."""

    def shell(*command):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return {
        "device": jax.devices()[0].device_kind,
        "driver": shell("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def pinned() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def make_pool(rows: int, words: int) -> jax.Array:
    """uint32 `[rows, words]` in pinned host memory, not constant; made on the device, so it must fit there once."""

    def make() -> jax.Array:
        row = jax.lax.broadcasted_iota(jnp.uint32, (rows, words), 0)
        return row * jnp.uint32(2654435761) + jax.lax.broadcasted_iota(jnp.uint32, (rows, words), 1)

    return jax.block_until_ready(jax.jit(make, out_shardings=pinned())())


def kernel_times_us(function: Callable[..., Any], *args: Any, name: str) -> list[float]:
    """Device time of every kernel whose name holds `name` in one run of `function` (CUPTI; a first run warms up)."""
    _, timings = profiler.measure(function, aggregate=False)(*args)
    return [1e3 * ms for kernel, ms in timings or [] if name in kernel]


def stamp(value: jax.Array, hold: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The GPU's global timer in ns when this kernel runs, and `value` (int32 `[n]`) passed through to order it.

    With `hold` (int32 `[1]`) the kernel first waits so often 20 us or more, so that what comes behind it is queued by
    the time it is done.
    """

    def stamp_kernel(value_ref: Any, hold_ref: Any, time_ref: Any, out_ref: Any) -> None:
        if hold is not None:
            lax.fori_loop(0, hold_ref[0], lambda _, carry: (indexed.sleep(20), carry)[1], jnp.int32(0))
        at = indexed.positions(indexed.LANES)
        at = jnp.where(at < value.shape[0], at, -1)
        indexed.scatter(out_ref, at, indexed.gather(value_ref, at))
        indexed.put(time_ref, indexed.now())

    def shape(n):
        return jax.ShapeDtypeStruct((n,), jnp.int32)

    run = plgpu.kernel(stamp_kernel, out_type=(shape(1), shape(value.shape[0])))
    return run(value, jnp.zeros(1, jnp.int32) if hold is None else hold)


def stamped_us(begin: Any, end: Any) -> float:
    """Microseconds between two stamps."""
    return int(np.uint32(np.asarray(end)[0].view(np.uint32) - np.asarray(begin)[0].view(np.uint32))) / 1e3


def summary(name: str, times_us: np.ndarray) -> dict[str, float]:
    """Median, p95 and number of samples of a time."""
    return {
        f"{name}_us": float(np.median(times_us)),
        f"{name}_p95_us": float(np.percentile(times_us, 95)),
        f"{name}_samples": len(times_us),
    }


def runs_us(function: Callable[..., Any], inputs: list[tuple[Any, ...]]) -> list[list[tuple[str, float]]]:
    """Name and device time of every kernel (CUPTI) of each run of a jitted function; one run before warms up."""
    jax.block_until_ready(function(*inputs[0]))
    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        jax.block_until_ready([function(*args) for args in inputs])
    finally:
        timings = cupti._cupti_get_timings(True)
    each, left = divmod(len(timings), len(inputs))
    assert not left, f"{len(timings)} kernels in {len(inputs)} runs"
    kernels = [(kernel, 1e3 * ms) for kernel, ms in timings]
    return [kernels[i * each : (i + 1) * each] for i in range(len(inputs))]


def total_us(function: Callable[..., Any], *args: Any) -> list[float]:
    """Device time of all kernels of each of 5 runs."""
    return [sum(us for _, us in kernels) for kernels in runs_us(function, [args] * 5)]


def peaks() -> dict[str, float]:
    """GB/s of reading 2 GiB, and TFLOP/s of an 8192-wide bfloat16 matmul; best of 5."""
    values, square = jnp.ones(1 << 29, jnp.float32), jnp.ones((8192, 8192), jnp.bfloat16)
    read, matmul = jax.jit(jnp.sum), jax.jit(lambda a: a @ a)

    return {
        "hbm_read_gb_s": values.nbytes / min(total_us(read, values)) / 1e3,
        "bf16_tflop_s": 2 * 8192**3 / min(total_us(matmul, square)) / 1e6,
    }


def kernel_times_donated_us(
    function: Callable[..., jax.Array], donated: jax.Array, *args: Any, name: str
) -> list[float]:
    """As `kernel_times_us`, for a function that takes its first argument and gives back the one to use next."""
    donated = jax.block_until_ready(function(donated, *args))
    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        jax.block_until_ready(function(donated, *args))
    finally:
        timings = cupti._cupti_get_timings(True)
    return [1e3 * ms for kernel, ms in timings if name in kernel]


def fetch_of(
    pool: jax.Array, span_rows: int, mebibytes: int, how: FetchTuning
) -> tuple[Callable[..., Any], Plan, jax.Array]:
    """A jitted fetch of so many MiB of random rows of the pool's first `span_rows`, its plan and hot rows."""
    words = pool.shape[1]
    count = (mebibytes << 20) // (4 * words)
    rng = np.random.default_rng(0)
    rows = rng.permutation(span_rows)[:count] if count <= span_rows else rng.integers(0, span_rows, count)
    plan = Plan(*(jnp.asarray(x, jnp.int32) for x in (rows[None], np.arange(count)[None], [count])))
    zero, base = jnp.int32(0), jnp.zeros(1, jnp.int32)
    fetch = functools.partial(fetch_kernel.fetch, rows_per_space=span_rows, how=how)
    jitted = jax.jit(lambda pool, hot, plan: fetch(pool, hot, plan, base, zero, zero)[0])
    return lambda pool, hot: jitted(pool, hot, plan), plan, jnp.zeros((1, count, words), jnp.uint32)


def link_peaks_gb_s(pool: jax.Array, span_rows: int) -> dict[str, float]:
    """Host-to-device bandwidth of 64 MiB of random rows of this span: GB/s by grid, best of 3.

    The last of a name is the number of address buckets: 0 copies the rows in their random order.
    """
    words, out = pool.shape[1], {}
    for grid in ((132, 8, 4, 0), (64, 8, 1, 64)):
        run, plan, hot = fetch_of(pool, span_rows, 64, FetchTuning(*grid))
        times = [t for _ in range(3) for t in kernel_times_us(run, pool, hot, name="fetch_kernel")]
        out["x".join(map(str, grid))] = int(plan.count[0]) * words * 4 / min(times) / 1e3
    return out


def device_to_host_peak_gb_s() -> float:
    """Bandwidth of a copy of 1 GiB to pinned host memory, best of 4 by the wall clock."""
    source, times = jnp.ones(1 << 28, jnp.uint32), []
    for _ in range(4):
        begin = time.perf_counter()
        jax.device_put(source, pinned()).block_until_ready()
        times.append(time.perf_counter() - begin)
    return source.nbytes / min(times) / 1e9


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """What `write_records` wrote."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_records(path: str | Path, records: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def record_path(out: str, stem: str, stamp: dict[str, Any], part: str = "") -> Path:
    """Where records of a device go: `<stem>_<device>[_<part>].jsonl`; `stamp` is of `environment`."""
    device = stamp["device"].lower().replace(" ", "_")
    return Path(out) / f"{stem}_{device}{'_' * bool(part)}{part}.jsonl"


def keep(path: Path, records: Iterable[dict[str, Any]], stamp: dict[str, Any]) -> list[dict[str, Any]]:
    """Stamps records and writes the file anew after each, so that what was measured before a crash is there."""
    done: list[dict[str, Any]] = []
    for record in records:
        done.append(record | stamp)
        write_records(path, done)
    return done


def print_table(records: list[dict[str, Any]], columns: Iterable[str]) -> None:
    """What was measured, for people."""
    from rich.console import Console
    from rich.table import Table

    out, columns = Table(*columns), list(columns)
    for record in records:
        values = [record.get(column, "") for column in columns]
        values = [" ".join(str(v) for v in value.values()) if isinstance(value, dict) else value for value in values]
        out.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values))
    Console(width=200).print(out)


def run_plans(
    stem: str, plans: dict[str, Callable[..., Iterable[dict[str, Any]]]], columns: Iterable[str], about: str | None
) -> None:
    """A benchmark's command line: each plan, called as `plan(peaks, sweep=...)`, gives the records of one file."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="*", default=list(plans), choices=list(plans))
    parser.add_argument("--sweep", action="store_true", help="also measure other launches")
    parser.add_argument("--out", default=str(RESULTS), help="folder of the records")
    options = parser.parse_args()
    stamp_of_run, peak = environment(), peaks()
    for plan in options.plans:
        path = record_path(options.out, stem, stamp_of_run, plan)
        print_table(keep(path, plans[plan](peak, sweep=options.sweep), stamp_of_run), columns)
