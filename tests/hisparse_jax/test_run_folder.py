# SPDX-License-Identifier: Apache-2.0
"""Run folders are whole or not there."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hisparse_jax.errors import UserError
from hisparse_jax.run_folder import run_folder


def test_a_finished_run_is_renamed_and_two_in_a_second_are_kept_apart(tmp_path: Path) -> None:
    finals = []
    for _ in range(2):
        with run_folder(tmp_path / "runs", "x") as folder:
            (folder.partial / "result.json").write_text("{}")
            assert folder.partial.name.startswith(".x-")
        finals.append(folder.final)
    assert finals[0] != finals[1]
    assert sorted((tmp_path / "runs").iterdir()) == sorted(finals)
    assert all((final / "result.json").read_text() == "{}" for final in finals)


def test_a_failed_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), run_folder(tmp_path, "x") as folder:
        (folder.partial / "result.json").write_text("{}")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_a_killed_run_leaves_no_run_folder(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib\n"
        "from hisparse_jax.run_folder import run_folder\n"
        "with run_folder(pathlib.Path(sys.argv[1]), 'x') as folder:\n"
        "    (folder.partial / 'result.json').write_text('{')\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    time.sleep(0.1)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_a_parent_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the run folder can't be made"), run_folder(tmp_path / "file", "x"):
        pass
