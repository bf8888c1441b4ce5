# SPDX-License-Identifier: Apache-2.0
"""Run folders: written under a temporary name and renamed when complete, so that none is ever half-written."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

from hisparse_jax.errors import UserError


class RunFolder:
    """A folder being filled.

    Attributes:
      partial: where to write.
      final: where it will be.
    """

    def __init__(self, partial: Path, final: Path) -> None:
        self.partial, self.final = partial, final


@contextlib.contextmanager
def run_folder(parent: Path, name: str) -> Generator[RunFolder]:
    """A new folder `parent/name-TIME`, there once the block has ended well and not at all if it hasn't.

    Raises:
      UserError: the parent can't be written to.
    """
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{name}-", suffix=".partial", dir=parent))
    except OSError as error:
        raise UserError(
            f"{parent}: the run folder can't be made: {error.strerror}; choose another one with --runs"
        ) from error
    try:
        folder = RunFolder(partial, parent / f"{name}-{stamp}")
        yield folder
        number = 1
        while folder.final.exists():
            number += 1
            folder.final = parent / f"{name}-{stamp}-{number}"
        partial.chmod(0o755)
        os.replace(partial, folder.final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
