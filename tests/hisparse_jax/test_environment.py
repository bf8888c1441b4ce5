# SPDX-License-Identifier: Apache-2.0
"""What a record says of its origin: the commit, wherever the package lies."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from hisparse_jax import environment

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setattr(environment, "_ROOT", tmp_path)


def git(folder: Path, *command: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *identity, *command], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def head(tmp_path: Path) -> str:
    """The commit of a repository in `tmp_path`."""
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message=a")
    return git(tmp_path, "rev-parse", "HEAD").strip()


@needs_git
def test_the_commit_of_the_checkout(head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment.commit()
    assert found is not None and len(found) >= 4 and head.startswith(found)
    git(tmp_path, "worktree", "add", "--quiet", "--detach", "other")  # whose .git is a file
    monkeypatch.setattr(environment, "_ROOT", tmp_path / "other")
    assert environment.commit() == found


@needs_git
def test_a_given_commit_comes_first(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "1234567")
    assert environment.commit() == "1234567"
    monkeypatch.setenv("COMMIT", "")
    assert head.startswith(str(environment.commit()))


@needs_git
def test_an_installed_package_has_none(head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the repository that its environment lies in."""
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(environment, "_ROOT", tmp_path / "site-packages")
    assert environment.commit() is None


@needs_git
def test_a_repository_without_a_commit_has_none(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    assert environment.commit() is None


def test_without_git_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.commit() is None


def test_it_is_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "1234567")
    found = environment.environment()
    assert found["commit"] == "1234567" and json.loads(json.dumps(found)) == found
