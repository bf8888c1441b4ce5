# SPDX-License-Identifier: Apache-2.0
"""Launches of a follower's fetch beside compute, in the decode chunk of one selection group of GLM-5.2.

A fetch takes multiprocessors from the matmuls beside it; with too few of them, or too little under way, it comes late.
Which launch hides most is measured here, at every concurrency beside the step without IO and the one that fetches just
before each attention, in the same run.

`python -m benchmarks.bench_prefetch [--requests 8 16 32] [--launches 2,8,8 ...]` (programs, warpgroups, loads in
flight and, if given, buckets for address order and lanes of the bulk copy engine) writes
benchmarks/results/prefetch_*.jsonl; the best goes into `fetch_beside` of `pallas_kernels/tuned`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks import common
from hisparse_jax.config import Mode, load
from hisparse_jax.simulated import Point, Share
from hisparse_jax.throughput import Pool, lower_point, time_point
from hisparse_jax.throughput_report import ratios
from pallas_kernels import common as kernels
from pallas_kernels.fetch.tuning import Tuning

LAUNCHES = ("2,8,8,64", "4,8,1,64", "2,1,1,64,128", "1,1,1,64,128", "2,4,1,64,128", "4,1,1,64,64", "2,1,2,64,64")
CONTEXT = 32768
COLUMNS = ("requests", "mode", "how", "step_ms", "hidden_share", "of_no_io", "same_tokens")


def records(requests: list[int], launches: list[Tuning], preset: str) -> Iterator[dict[str, Any]]:
    """The step time of every launch at every concurrency."""
    settings = (
        f"contexts=[{CONTEXT}]", f"concurrency={requests}", "modes=[no_io, sync, prefetch]", "layers=4",
        "cold_concurrency=[]",
    )  # fmt: skip
    share = Share(load(preset, [f"synthetic.{setting}" for setting in settings]))
    followers = 1 - len(share.shape.group_sizes) / share.shape.layers
    params, pool = share.parameters(), Pool()
    table = kernels._tuned_table(jax.devices()[0].device_kind)["fetch_beside"]

    def timed(count: int, mode: Mode) -> dict[str, Any]:
        jax.clear_caches()  # the launch is no argument of what is traced
        point = Point(CONTEXT, count, mode)
        record = time_point(share, point, lower_point(share, point, params).compile(), params, pool, Path())
        kept = ("step_ms", "step_ms_samples", "miss_rate", "tokens")
        return {"requests": count, "mode": mode} | {name: record[name] for name in kept}

    for count in requests:
        no_io, sync = timed(count, "no_io"), timed(count, "sync")
        yield from (no_io, sync)
        for how in launches:
            table["choices"] = [{"span_bytes_at_most": 1 << 62, "how": how._asdict()}]
            record = timed(count, "prefetch")
            compared = ratios({"no_io": no_io, "sync": sync, "prefetch": record}, followers)
            yield compared | record | {"how": how._asdict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", nargs="*", type=int, default=[8, 16, 32])
    parser.add_argument("--launches", nargs="*", default=list(LAUNCHES), help="programs,warpgroups,loads,buckets,bulk")
    parser.add_argument("--preset", default="glm52_prefetch")
    parser.add_argument("--out", default=str(common.RESULTS), help="folder of the record")
    options = parser.parse_args()
    launches = [Tuning(*map(int, launch.split(","))) for launch in options.launches]
    environment, done = common.environment(), []
    device = environment["device"].lower().replace(" ", "_")
    for record in records(options.requests, launches, options.preset):
        done.append(record | environment)
        common.write_records(f"{options.out}/prefetch_{device}.jsonl", done)
    common.print_table(done, COLUMNS)


if __name__ == "__main__":
    main()
