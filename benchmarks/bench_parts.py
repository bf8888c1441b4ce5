# SPDX-License-Identifier: Apache-2.0
"""Requests selected and resolved in parts: while one part's rows are fetched, the next part is selected.

What a part more gains is the selection that it hides; what it costs is a fetch that begins anew. Which of the two is
more is measured here, at every concurrency beside the step without IO in the same run.

`python -m benchmarks.bench_parts [--preset dsv32_decode] [--context 131072] [--requests 16 28] [--parts 1 2 3]` writes
benchmarks/results/parts_*.jsonl; what is best goes into `selection_parts` of `pallas_kernels/tuned`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks import common
from benchmarks.decode_points import Variant, times
from hisparse_jax.config import Mode, load
from hisparse_jax.simulated import Point, Share
from hisparse_jax.throughput import lower_point

COLUMNS = ("context", "requests", "mode", "parts", "step_ms", "of_no_io", "same_tokens")


def records(preset: str, context: int, requests: list[int], parts: list[int]) -> Iterator[dict[str, Any]]:
    """The step time of every number of parts at every concurrency."""

    def share_of(count: int) -> Share:
        settings = f"contexts=[{context}]", f"concurrency={requests}", "cold_concurrency=[]"
        return Share(load(preset, [f"decode.parts={count}", *(f"synthetic.{setting}" for setting in settings)]))

    shares = {count: share_of(count) for count in parts}
    share = shares[parts[0]]
    fetching: Mode = "sync" if max(share.shape.group_sizes) == 1 else "prefetch"
    params, variants = share.parameters(), []
    for count in requests:
        point = Point(context, count, "no_io")
        variants.append(Variant({}, share, point, lower_point(share, point, params)))
        for number, split in shares.items():
            point = Point(context, count, fetching)
            variants.append(Variant({"parts": number}, split, point, lower_point(split, point, params)))
    for record in times(variants, params):
        if "parts" not in record:
            no_io, first = record, None
        else:
            first = first or record
            record["of_no_io"] = no_io["step_ms"] / record["step_ms"]
            record["same_tokens"] = record["tokens"] == first["tokens"]
        yield record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="glm52_prefetch")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--requests", nargs="*", type=int, default=[8, 16, 32, 43])
    parser.add_argument("--parts", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--out", default=str(common.RESULTS), help="folder of the record")
    options = parser.parse_args()
    environment = common.environment()
    path = common.record_path(options.out, "parts", environment, f"{options.preset}_{options.context // 1024}k")
    found = records(options.preset, options.context, options.requests, options.parts)
    common.print_table(common.keep(path, found, {"preset": options.preset} | environment), COLUMNS)


if __name__ == "__main__":
    main()
