# SPDX-License-Identifier: Apache-2.0
"""The wheel holds everything, and works from any folder without the checkout."""

from __future__ import annotations

import ast
import re
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


def test_what_is_imported_is_declared() -> None:
    """So that an install brings all that the packages import, whatever else an environment holds."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [
        *settings["dependencies"],
        *(one for extra in settings["optional-dependencies"].values() for one in extra),
    ]
    names = {re.split(r"[><=\[]", one)[0].lower() for one in declared} | {"huggingface_hub"}  # which is never required
    known = {name.replace("-", "_").removeprefix("ruamel.").replace("yaml", "ruamel") for name in names} | names
    imported = {
        alias.split(".")[0]
        for top in TOP_LEVEL
        for path in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for alias in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    assert imported - sys.stdlib_module_names - TOP_LEVEL - known == set()


@pytest.mark.slow
def test_installed_in_a_clean_environment_with_all_it_declares(wheel: Path, tmp_path: Path, data: Path) -> None:
    """Downloads what the package depends on, and runs an experiment with it."""
    venv.create(tmp_path / "env", with_pip=True, symlinks=True)
    python = tmp_path / "env/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"{wheel}[models,plots]"], check=True)
    (tmp_path / "tests").mkdir()
    shutil.copytree(data, tmp_path / "tests/data")
    done = subprocess.run(
        [tmp_path / "env/bin/hisparse", "run", "tiny_glm52"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert "outputs identical (full, hisparse): yes, bitwise" in done.stdout


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
