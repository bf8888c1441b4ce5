# SPDX-License-Identifier: Apache-2.0
"""Launches of a follower's fetch beside compute, in the decode chunk of one selection group of GLM-5.2.

A fetch takes multiprocessors from the matmuls beside it; with too few of them, or too little under way, it comes late.
Which launch hides most is measured here, at every concurrency beside the step without IO and the one that fetches just
before each attention, in the same run.

`python -m benchmarks.bench_prefetch [--requests 8 16 32] [--pool 43] [--launches 2,8,8 ...]` (programs, warpgroups,
loads in flight and, if given, buckets for address order; a host pool for at least so many requests) writes
benchmarks/results/prefetch_*.jsonl; the best goes into `fetch_beside` of `pallas_kernels/tuned`. Requests are resolved
in one part, whatever `selection_parts` says.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import common
from benchmarks.decode_points import Variant, times
from hisparse_jax.config import Mode, load
from hisparse_jax.simulated import Point, Share
from hisparse_jax.throughput import lower_point
from hisparse_jax.throughput_report import ratios
from pallas_kernels import common as kernels
from pallas_kernels.fetch.tuning import Tuning

LAUNCHES = ("2,8,8,64", "4,8,1,64", "8,8,1,64")
CONTEXT = 32768
COLUMNS = ("requests", "mode", "how", "step_ms", "hidden_share", "of_no_io", "same_tokens")


def records(requests: list[int], pool: int, launches: list[Tuning], preset: str) -> Iterator[dict[str, Any]]:
    """The step time of every launch at every concurrency, with a host pool for at least `pool` requests."""
    settings = (
        f"contexts=[{CONTEXT}]", f"concurrency={[*requests, pool]}", "modes=[no_io, sync, prefetch]", "layers=4",
        "cold_concurrency=[]",
    )  # fmt: skip
    share = Share(load(preset, ["decode.parts=1", *(f"synthetic.{setting}" for setting in settings)]))
    followers = 1 - len(share.shape.group_sizes) / share.shape.layers
    params, variants = share.parameters(), []
    table = kernels._tuned_table(jax.devices()[0].device_kind)["fetch_beside"]

    def add(count: int, mode: Mode, how: Tuning | None = None) -> None:
        if how is not None:
            table["choices"] = [{"span_bytes_at_most": 1 << 62, "how": how._asdict()}]
        jax.clear_caches()  # the launch is no argument of what is traced
        point = Point(CONTEXT, count, mode)
        label = {"pool_requests": max(*requests, pool)} | ({} if how is None else {"how": how._asdict()})
        variants.append(Variant(label, share, point, lower_point(share, point, params)))

    for count in requests:
        add(count, "no_io")
        add(count, "sync")
        for how in launches:
            add(count, "prefetch", how)
    without: dict[tuple[int, Mode], dict[str, Any]] = {}
    for record in times(variants, params):
        count, mode = record["requests"], record["mode"]
        if mode == "prefetch":
            beside = {other: without[count, other] for other in ("no_io", "sync")}
            record = ratios(beside | {"prefetch": record}, followers) | record
        else:
            without[count, mode] = record
        yield record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", nargs="*", type=int, default=[8, 16, 32])
    parser.add_argument("--pool", type=int, default=1, help="at least so many requests' rows fit in the host pool")
    parser.add_argument("--launches", nargs="*", default=list(LAUNCHES), help="programs,warpgroups,loads,buckets")
    parser.add_argument("--preset", default="glm52_prefetch")
    parser.add_argument("--out", default=str(common.RESULTS), help="folder of the record")
    options = parser.parse_args()
    launches = [Tuning(*map(int, launch.split(","))) for launch in options.launches]
    environment = common.environment()
    path = common.record_path(options.out, "prefetch", environment)
    found = records(options.requests, options.pool, launches, options.preset)
    common.print_table(common.keep(path, found, {"preset": options.preset} | environment), COLUMNS)


if __name__ == "__main__":
    main()
