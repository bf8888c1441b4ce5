# SPDX-License-Identifier: Apache-2.0
"""Every example runs and says what its text promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"own_model.py"}


def test_own_model() -> None:
    assert len((EXAMPLES / "own_model.py").read_text().splitlines()) <= 60
    found = re.fullmatch(r"same tokens: True, records fetched from the host: (\d+)\n", run("own_model.py"))
    assert found and int(found[1]) > 0
