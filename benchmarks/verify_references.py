# SPDX-License-Identifier: Apache-2.0
"""Runs `hisparse verify` over the reference folders of the tests and writes one JSON line a folder.

python -m benchmarks.verify_references --out benchmarks/results
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from hisparse_jax.environment import environment
from hisparse_jax.verify import verify

DATA = Path(__file__).parent.parent / "tests/data"
FOLDERS = ("deepseek_v32", "glm5", "glm52_indexshare", "qwen3", "qwen3_moe")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    lines = []
    for name in FOLDERS:
        report = verify(DATA / name)
        lines.append(
            {
                "folder": name,
                "ok": report.ok,
                "logit_difference": max(result.logit_difference for result in report.results),
                "selections_differ": sum(result.selections_differ for result in report.results),
                "selections": sum(result.selections for result in report.results),
                "bitwise": all(result.bitwise for result in report.results),
                "cases": [dataclasses.asdict(result) for result in report.results],
                "environment": environment(),
            }
        )
        print(name, *(f"{key} {lines[-1][key]}" for key in ("ok", "logit_difference", "selections_differ", "bitwise")))
    (out / "verify_references.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
