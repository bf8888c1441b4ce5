# SPDX-License-Identifier: Apache-2.0
"""Time of resolve with and without its fetch, of fetch and of backup, beside what the link alone would need.

Workload: K - 1 - m ids that are selected in every step, m fresh ones a step that cycle through the rest of the context,
and the newest; rows at random places of a pool of R x S rows; tables in their steady state, never reset.

`device_us` is the kernel's own time (CUPTI, median over the steps of a scan). Two more are a single call between two
GPU time stamps, launch gaps included: `call_us` with an idle GPU, so that it also waits for the host to launch one
kernel after the other, and `queued_us` with the launches already queued, as they are in a decode loop. `empty` records
give the same for a kernel that does nothing. The portable implementation (`xla`) is timed by the wall clock.

`python -m benchmarks.bench_resolve [--plans core rows more portable pages] [--wide GiB ...]` writes a file of records a
plan into benchmarks/results/, and a plot of the first; with `--show FILES` it prints and plots what is there.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import common
from pallas_kernels import indexed
from pallas_kernels.backup import mosaic_gpu as backup_kernel
from pallas_kernels.fetch import mosaic_gpu as fetch_kernel
from pallas_kernels.fetch import reference as fetch_reference
from pallas_kernels.fetch.tuning import Tuning as FetchTuning
from pallas_kernels.fetch.tuning import tuning as fetch_tuning
from pallas_kernels.resolve import mosaic_gpu, reference
from pallas_kernels.resolve.tuning import Tuning, tuning

SELECTED, HOT_SLOTS, CONTEXT, RING = 2048, 4096, 32768, 64
WARM_UP, STEPS, CALLS = 10, 20, 20
MISSES = (0, 20, 102, 275, 615, 2046)


class Sizes(NamedTuple):
    """K, H and S of a setting."""

    selected: int = SELECTED
    hot_slots: int = HOT_SLOTS
    context: int = CONTEXT


TOKENS, PAGES = Sizes(), Sizes(128, 256, 2048)


def sizes_of(row_bytes: int) -> Sizes:
    """Rows of kilobytes are tokens, rows of 16 KiB and more are pages, of which a step reads fewer."""
    return PAGES if row_bytes >= 16384 else TOKENS


def workload(requests: int, misses: int, steps: int, *, selected: int = SELECTED, context: int = CONTEXT) -> np.ndarray:
    """Selected ids, int32 `[steps, R, K]`."""
    rng = np.random.default_rng(misses)
    out = np.empty((steps, requests, selected), np.int32)
    for r in range(requests):
        ids = rng.permutation(context - RING).astype(np.int32)
        core, rest = ids[: selected - 1 - misses], ids[selected - 1 - misses :]
        at = np.arange(steps * misses).reshape(steps, misses) % len(rest)
        out[:, r, : len(core)], out[:, r, len(core) : -1], out[:, r, -1] = core, rest[at], context - 1
    out.sort(axis=-1)
    return out


class Setting:
    """One pool, R and H: buffers, and the programs that step through a workload, compiled once for all of them."""

    def __init__(self, pool: jax.Array, requests: int, span_rows: int = 0) -> None:
        self.pool, self.requests, self.row_bytes = pool, requests, 4 * pool.shape[1]
        self.sizes = sizes_of(self.row_bytes)
        _, hot_slots, context = self.sizes
        self.rows = span_rows or requests * context
        self.slots = hot_slots + RING
        rng = np.random.default_rng(1)
        rows = rng.choice(self.rows, requests * context, replace=False) if span_rows else rng.permutation(self.rows)
        ids = jnp.full((1, requests, hot_slots), -1, jnp.int32)
        self.fixed = {
            "page_table": jnp.asarray(rows.reshape(requests, context), jnp.int32),
            "base": jnp.arange(requests, dtype=jnp.int32) * self.slots,
            "length": jnp.full(requests, context, jnp.int32),
        }
        self.tables = ids, jnp.broadcast_to(jnp.arange(hot_slots, dtype=jnp.int16), ids.shape)
        self.programs: dict[Any, Any] = {}
        self.steps: dict[int, jax.Array] = {}

    def step(self, pool: jax.Array, fixed: Any, state: Any, selected: jax.Array, table: jax.Array, *, io: bool,
             how: Tuning | None = None, apart: FetchTuning | None = None, xla: bool = False) -> Any:  # fmt: skip
        """One step: fused, as two kernels (`apart`), or the portable implementation (`xla`)."""
        hot, ids, ages = state
        zero, base = jnp.int32(0), fixed["base"]
        args = (selected, fixed["length"], ids, ages, fixed["page_table"], base, table)
        if xla:
            got = reference.resolve(*args, ring_slots=RING, page_records=1)
        else:
            rows = (pool, hot, zero, zero) if io and not apart else None
            got, new = mosaic_gpu.resolve(
                *args, ring_slots=RING, page_records=1, rows=rows, rows_per_space=self.rows, how=how
            )
            hot = hot if new is None else new
        if io and (xla or apart):
            fetch = fetch_reference.fetch if xla else functools.partial(fetch_kernel.fetch, how=apart)
            hot = fetch(pool, hot, got.plan, base, zero, zero, rows_per_space=self.rows)
            hot = hot if xla else hot[0]
        return (hot, got.slot_ids, got.recency), got.counters, got.plan.count

    def scan(self, **how: Any) -> Callable[..., Any]:
        def run(pool: jax.Array, fixed: Any, state: Any, steps: jax.Array) -> Any:
            def step(state, x):
                return self.step(pool, fixed, state, x, jnp.int32(0), **how)[:2]

            return jax.lax.scan(step, state, steps)

        if how.get("xla"):  # whose gather wants to be told that the pool is in host memory

            def told(pool, *rest):
                return run(jax.device_put(pool, common.HOST), *rest)

            return self._once(("scan", *how.items()), lambda: jax.jit(told))
        return self._once(("scan", *how.items()), lambda: jax.jit(run))

    def call(self, **how: Any) -> Callable[..., Any]:
        def run(pool: jax.Array, fixed: Any, state: Any, selected: jax.Array, hold: jax.Array) -> Any:
            begin, table = common.stamp(jnp.zeros(1, jnp.int32), hold)
            state, _, count = self.step(pool, fixed, state, selected, table[0], **how)
            end, _ = common.stamp(count)  # whole: a slice would be one more kernel
            return state, begin, end

        return self._once(("call", *how.items()), lambda: jax.jit(run, donate_argnums=2))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.programs:
            self.programs[key] = make()
        return self.programs[key]

    def measure(self, misses: int, **how: Any) -> dict[str, Any]:
        """A record of one number of misses; the keywords are those of `step`."""
        if misses not in self.steps:
            count, (selected, _, context) = WARM_UP + STEPS + 2 * CALLS, self.sizes
            self.steps[misses] = jnp.asarray(workload(self.requests, misses, count, selected=selected, context=context))
        steps, xla, io = self.steps[misses], how.get("xla", False), how["io"]
        state = (jnp.zeros((1, self.requests * self.slots, self.row_bytes // 4), jnp.uint32), *self.tables)
        record = {
            "op": "resolve", "implementation": "xla" if xla else "mosaic_gpu", "R": self.requests,
            "K": self.sizes.selected, "H": self.sizes.hot_slots, "S": self.sizes.context,
            "row_bytes": self.row_bytes, "misses": misses, "io": io,
            "kernels": 2 if how.get("apart") else 1, "bytes": self.requests * misses * self.row_bytes * io,
        }  # fmt: skip
        if xla:
            state, _ = self.scan(io=io)(self.pool, self.fixed, state, steps[:WARM_UP])  # the kernel warms up sooner
            run, timed = self.scan(**how), steps[WARM_UP : WARM_UP + 2]
            jax.block_until_ready(run(self.pool, self.fixed, state, timed))
            begin = time.perf_counter()
            jax.block_until_ready(run(self.pool, self.fixed, state, timed))
            return record | {"loop_us": (time.perf_counter() - begin) / 2 * 1e6}
        record["how"] = (how.get("how") or tuning(self.requests, self.row_bytes * self.rows if io else 0))._asdict()
        run = self.scan(**how)
        state, _ = run(self.pool, self.fixed, state, steps[:WARM_UP])
        timed = steps[WARM_UP : WARM_UP + STEPS]
        kernels = common.kernel_times_us(run, self.pool, self.fixed, state, timed, name="_kernel")
        times = np.asarray(kernels).reshape(STEPS, -1).sum(1)
        record |= common.summary("device", times)
        state, counters = run(self.pool, self.fixed, state, timed)
        record["misses_seen"] = float(np.asarray(counters)[..., 2].mean())
        if not how.get("apart"):
            for turn, (name, hold) in enumerate((("call", 0), ("queued", 8))):
                call, calls, hold = self.call(**how), [], jnp.full(1, hold, jnp.int32)
                begin_at = WARM_UP + STEPS + turn * CALLS  # selections that came before would be hot
                for selected in steps[begin_at : begin_at + CALLS]:
                    state, begin, end = call(self.pool, self.fixed, state, selected, hold)
                    calls.append(common.stamped_us(begin, end))
                record |= common.summary(name, np.asarray(calls[2:]))
        return record


def empty() -> Iterator[dict[str, Any]]:
    """A kernel that does nothing, timed in the same way: what the launches alone take."""

    def empty_kernel(value_ref: Any, out_ref: Any) -> None:
        at = indexed.positions(indexed.LANES)
        at = jnp.where(at < 1, at, -1)
        indexed.scatter(out_ref, at, indexed.gather(value_ref, at))

    record: dict[str, Any] = {"op": "empty"}

    @jax.jit
    def call(hold: jax.Array) -> Any:
        begin, value = common.stamp(jnp.zeros(1, jnp.int32), hold)
        value = plgpu.kernel(empty_kernel, out_type=jax.ShapeDtypeStruct((1,), jnp.int32))(value)
        return begin, common.stamp(value)[0]

    for name, hold in (("call", 0), ("queued", 8)):
        times = [common.stamped_us(*call(jnp.full(1, hold, jnp.int32))) for _ in range(CALLS)]
        record |= common.summary(name, np.asarray(times[2:]))
    yield record


def fetches(pool: jax.Array, span_rows: int, peak: float) -> Iterator[dict[str, Any]]:
    """A plan of 4, 16 and 64 MiB of random rows replayed by 16 programs."""
    words = pool.shape[1]
    how = fetch_tuning(1, span_rows * words * 4)
    for mebibytes in (4, 16, 64):
        run, plan, hot = common.fetch_of(pool, span_rows, mebibytes, how)
        times = [t for _ in range(4) for t in common.kernel_times_us(run, pool, hot, name="fetch_kernel")]
        size = int(plan.count[0]) * words * 4
        record = {"op": "fetch", "row_bytes": words * 4, "bytes": size, "span_bytes": span_rows * words * 4,
                  "how": how._asdict(), "link_peak_gb_s": peak}  # fmt: skip
        record |= common.summary("device", np.asarray(times))
        rate = size / record["device_us"] / 1e3
        yield record | {"gb_s": rate, "share_of_peak": rate / peak}


def backups(pool: jax.Array, rows: int, peak: float) -> Iterator[dict[str, Any]]:
    """A prefill chunk to pages of 64 rows."""
    words = pool.shape[1]
    pages = np.random.default_rng(0).permutation(pool.shape[0] // 64)[: rows // 64]
    at = jnp.asarray((pages[:, None] * 64 + np.arange(64)).reshape(-1), jnp.int32)
    chunk = jnp.ones((rows, words), jnp.uint32)

    def run(pool: jax.Array, chunk: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 10, lambda i, p: backup_kernel.backup(p, chunk + i.astype(jnp.uint32), at), pool)

    times = common.kernel_times_donated_us(
        jax.jit(run, donate_argnums=0, out_shardings=common.pinned()), pool, chunk, name="backup_kernel"
    )
    record = {"op": "backup", "row_bytes": words * 4, "rows": rows, "bytes": rows * words * 4, "link_peak_gb_s": peak}
    record |= common.summary("device", np.asarray(times))
    rate = record["bytes"] / record["device_us"] / 1e3
    yield record | {"gb_s": rate, "share_of_peak": rate / peak}


# What is measured, in this order: row bytes, R, misses that are fetched, and what else of resolve at 275 misses.
PLANS = {
    "core": (
        (1152, ((1, MISSES, ("no_io",)), (64, MISSES, ()), (16, MISSES, ()), (4, (0, 275), ()))),
    ),
    "rows": (
        (656, ((64, (0, 275, 615), ()), (1, (0, 275, 2046), ()), (16, (0, 275, 615), ()))),
        (640, ((64, (0, 275, 615), ()),)),
        (704, ((64, (0, 275, 615), ()),)),
        (584, ((16, (0, 275), ()),)),
        (1280, ((16, (0, 275), ()),)),
    ),
    "more": (
        (1152, ((128, (0, 275), ("no_io",)), (64, (275,), ("no_io", "apart")), (16, (275,), ("no_io", "apart")),
                (1, (275,), ("apart", "xla")))),
    ),
    "portable": (
        (1152, ((1, (), ("xla", "xla_no_io")), (16, (), ("xla", "xla_no_io")), (64, (), ("xla", "xla_no_io")))),
    ),
    "pages": tuple((size << 10, ((1, (0, 18, 64), ()), (16, (0, 18, 64), ()))) for size in (16, 24, 64)),
}  # fmt: skip


def resolves(plans: Any) -> Iterator[dict[str, Any]]:
    """All records of resolve, each with the link peak of its span in the same run."""
    for row_bytes, parts in plans:
        context = sizes_of(row_bytes).context
        pool = common.make_pool(max(part[0] for part in parts) * context, row_bytes // 4)
        for requests, misses, others in parts:
            span = requests * context
            peaks = common.link_peaks_gb_s(pool, span)
            peak = max(peaks.values())
            at = {"R": requests, "row_bytes": row_bytes, "span_bytes": span * row_bytes, "link_peak_gb_s": peak}
            yield {"op": "link", "peaks": peaks} | at
            setting = Setting(pool, requests)
            settings = [(m, {"io": True}) for m in misses]
            settings += [(275, {"io": False})] * ("no_io" in others)
            settings += [(275, {"io": True, "apart": fetch_tuning(requests, span * row_bytes)})] * ("apart" in others)
            settings += [(275, {"io": True, "xla": True})] * ("xla" in others)
            settings += [(275, {"io": False, "xla": True})] * ("xla_no_io" in others)
            for m, how in settings:
                record = setting.measure(m, **how)
                yield record | at | {"link_us": record["bytes"] / peak / 1e3}
            if row_bytes == 1152 and requests in (16, 64) and misses:
                yield from fetches(pool, span, peak)
        if row_bytes in (1152, 656) and parts[0][1]:
            yield from backups(pool, 2048, common.device_to_host_peak_gb_s())


def wide(gibibytes: int) -> Iterator[dict[str, Any]]:
    """Rows of 1152 bytes spread over a larger pool, in miss order and in address order."""
    words = 288
    span = (gibibytes << 30) // (4 * words)
    pool = common.make_pool(span, words)
    peaks = common.link_peaks_gb_s(pool, span)
    peak = max(peaks.values())
    yield {"op": "link", "R": 16, "row_bytes": 4 * words, "span_bytes": span * 4 * words, "peaks": peaks}
    setting = Setting(pool, 16, span_rows=span)
    for how in (None, Tuning(8, 8, 4)):
        record = setting.measure(275, io=True, how=how)
        yield record | {"link_peak_gb_s": peak, "span_bytes": span * 4 * words, "link_us": record["bytes"] / peak / 1e3}
    yield from fetches(pool, span, peak)


def table(records: list[dict[str, Any]]) -> None:
    """What was measured, for people."""
    from rich.console import Console
    from rich.table import Table

    columns = ("op", "implementation", "R", "row_bytes", "misses", "io", "kernels", "device_us", "queued_us", "call_us",
               "loop_us", "link_us", "gb_s", "share_of_peak", "link_peak_gb_s")  # fmt: skip
    out = Table(*columns)
    for record in records:
        values = [record.get(column, "") for column in columns]
        if record["op"] != "link":
            out.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in values))
    Console(width=200).print(out)


def plot(records: list[dict[str, Any]], path: Any) -> None:
    """Time against misses with the floor of the link, 1152-byte rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    for colour, requests in enumerate((1, 4, 16, 64)):
        points = sorted(
            (r["misses"], r["device_us"], r["link_us"])
            for r in records
            if r["op"] == "resolve" and r["R"] == requests and r["row_bytes"] == 1152 and r["io"]
            if r["kernels"] == 1 and r["implementation"] == "mosaic_gpu"
        )
        misses, times, floors = zip(*points, strict=True)
        axes.plot(misses, times, "o-", color=f"C{colour}", label=f"R = {requests}")
        axes.plot(misses[1:], floors[1:], ":", color=f"C{colour}")
    axes.set_xscale("symlog", linthresh=20)
    axes.set_xticks(MISSES, MISSES)
    axes.set(yscale="log", xlabel="misses of a request", ylabel="us, kernel time")
    axes.set_title("resolve and fetch, 1152-byte rows; dotted: the bytes at the link's peak")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", nargs="*", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--wide", type=int, nargs="*", default=[8, 40], help="GiB of larger pools")
    parser.add_argument("--out", default=str(common.RESULTS))
    parser.add_argument("--show", nargs="*", help="files of records: prints and plots them, measures nothing")
    options = parser.parse_args()
    if options.show:
        records = [record for path in options.show for record in common.read_records(path)]
        table(records)
        plot(records, f"{options.out}/{Path(options.show[0]).stem}.png")
        return
    environment = common.environment()
    sources = {plan: resolves(PLANS[plan]) for plan in options.plans}
    sources |= {f"wide_{gibibytes}": wide(gibibytes) for gibibytes in options.wide}
    for name, source in sources.items():
        path = common.record_path(options.out, "resolve", environment, name)
        records = common.keep(path, itertools.chain(empty(), source), environment)
        table(records)
        if name == "core":
            plot(records, str(path.with_suffix(".png")))


if __name__ == "__main__":
    main()
