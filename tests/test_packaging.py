# SPDX-License-Identifier: Apache-2.0
"""The wheel holds everything, and works from any folder without the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP_LEVEL = {"hisparse_jax", "models", "pallas_kernels"}


def test_every_package_is_listed() -> None:
    found = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for top in TOP_LEVEL
        for path in (ROOT / top).rglob("__init__.py")
    }
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(settings["tool"]["setuptools"]["packages"]) == found | {"hisparse_jax.configs"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From a copy: setuptools reuses what an earlier build left in the source tree.
    source = tmp_path_factory.mktemp("source")
    for name in (*sorted(TOP_LEVEL), "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    [built] = (source / "dist").glob("*.whl")
    return built


def test_wheel_has_the_presets_and_nothing_else_at_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"hisparse_jax/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")} <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == TOP_LEVEL


def test_installed_wheel_runs_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True, symlinks=True)
    python = tmp_path / "env/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    # What it depends on is taken from this environment. A path file adds the folder and runs none of its path files,
    # so the editable install of the checkout is not seen.
    [site] = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    where = "import hisparse_jax, models, pallas_kernels as p; print(*(m.__file__ for m in (hisparse_jax, models, p)))"
    found = subprocess.run([python, "-c", where], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert all(str(site) in path for path in found.split()), found
    done = subprocess.run(
        [tmp_path / "env/bin/hisparse", "presets"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert "quickstart" in done.stdout
