# SPDX-License-Identifier: Apache-2.0
"""Imports go one way, memory kinds have one home, and what must not need JAX does not: read off the source."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "hisparse_jax", "models")
# What puts models, cache and engine together; nothing below may know these.
COMPOSITION_ROOTS = tuple(
    f"hisparse_jax.{name}"
    for name in ["assembly", "experiment", "simulated", "throughput", "verify", "presets", "generation", "cli"]
)
# Known before anything is allocated, or usable without a backend.
WITHOUT_JAX = (
    "hisparse_jax.config",
    "hisparse_jax.cache.layout",
    "hisparse_jax.cache.pages",
    "models.config",
    "models.share",
    "models.sizes",
)
MEMORY_HOME = "hisparse_jax/cache/memory.py"
MEMORY_WORDS = {"pinned_host", "unpinned_host", "memory_kind", "memory_space", "Space", "HOST", "HOST_KIND"}


def files(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def modules() -> dict[str, Path]:
    return {name_of(path): path for path in files(*PACKAGES)}


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, inside functions too but not for types alone.

    `from a import b` gives a.b where that is a module, else a.
    """
    tree, found = ast.parse(path.read_text()), set()
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports are not used here"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules() else node.module)
    return frozenset(found)


def top(module: str) -> str:
    return module.split(".")[0]


def test_the_packages_are_there():
    """The checks below read these files: none found would be none checked."""
    assert {top(name) for name in modules()} == set(PACKAGES)
    assert {*WITHOUT_JAX, *COMPOSITION_ROOTS[:-1]} <= set(modules())
    assert imports(ROOT / "hisparse_jax/resolve.py") >= {"pallas_kernels.resolve", "hisparse_jax.cache.state", "jax"}


@pytest.mark.parametrize("path", files("pallas_kernels"), ids=name_of)
def test_kernels_are_a_leaf(path):
    allowed = {"jax", "jaxlib", "numpy", "pallas_kernels"} | sys.stdlib_module_names
    assert {module for module in imports(path) if top(module) not in allowed} == set()


@pytest.mark.parametrize("path", files("hisparse_jax"), ids=name_of)
def test_only_composition_roots_import_models(path):
    name, found = name_of(path), imports(path)
    if name in COMPOSITION_ROOTS:
        return
    assert {module for module in found if top(module) == "models"} == set()
    if name == "hisparse_jax.__main__":  # `python -m hisparse_jax` is the command line
        return
    assert found.isdisjoint(COMPOSITION_ROOTS)


@pytest.mark.parametrize("path", files("models"), ids=name_of)
def test_models_do_not_know_what_puts_them_together(path):
    assert imports(path).isdisjoint(COMPOSITION_ROOTS)


@pytest.mark.parametrize("path", files("hisparse_jax/cache"), ids=name_of)
def test_the_cache_knows_no_selector_and_no_engine(path):
    allowed = ("hisparse_jax.cache", "hisparse_jax.errors")
    ours = {module for module in imports(path) if top(module) in ("hisparse_jax", "models")}
    assert {module for module in ours if not module.startswith(allowed)} == set()


@pytest.mark.parametrize("path", files(*PACKAGES), ids=name_of)
def test_nothing_imports_tests_or_configs(path):
    assert {module for module in imports(path) if top(module) in ("tests", "configs", "benchmarks", "docs")} == set()


@pytest.mark.parametrize("path", files("hisparse_jax", "models"), ids=name_of)
def test_memory_kinds_are_named_in_one_file(path):
    """Outside of it and the kernels no identifier and no string that is code names a memory space."""
    tree = ast.parse(path.read_text())
    texts = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    named = {
        word
        for node in ast.walk(tree)
        for word in (
            getattr(node, "id", None),
            getattr(node, "attr", None),
            getattr(node, "arg", None),
            node.name if isinstance(node, ast.alias) else None,
            node.value if isinstance(node, ast.Constant) and id(node) not in texts else None,
        )
        if word in MEMORY_WORDS
    }
    if path == ROOT / MEMORY_HOME:
        assert {"pinned_host", "HOST"} <= named, "the check finds what it looks for"
    else:
        assert named == set()


def test_unpinned_host_memory_is_never_used():
    for path in files(*PACKAGES):
        assert "unpinned_host" not in path.read_text(), path


@pytest.mark.parametrize("name", WITHOUT_JAX)
def test_without_jax(name):
    """Neither these modules nor any of ours that they import."""
    seen, waiting = set(), [name]
    while waiting:
        module = waiting.pop()
        if module not in seen and module in modules():
            seen.add(module)
            waiting += imports(modules()[module])
        assert top(module) not in ("jax", "jaxlib", "flax", "chex"), f"{name} imports {module} by way of {seen}"


def test_the_oracle_imports_nothing_of_ours():
    allowed = {"numpy"} | sys.stdlib_module_names
    assert {module for module in imports(ROOT / "tests/oracles.py") if top(module) not in allowed} == set()


@pytest.mark.parametrize("path", files(*PACKAGES, "tests", "docs", "examples"), ids=name_of)
def test_every_file_names_its_licence_and_can_be_read_in_one_go(path):
    lines = path.read_text().splitlines()
    assert "# SPDX-License-Identifier: Apache-2.0" in lines[:2]
    assert len(lines) <= 700
