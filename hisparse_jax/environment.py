# SPDX-License-Identifier: Apache-2.0
"""What a result was made with: commit, versions and devices, for every record that is written."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import psutil

_PACKAGES = ("hisparse-jax", "jax", "jaxlib", "flax", "numpy")
_ROOT = Path(__file__).parents[1]  # of the checkout, if this is one


def commit() -> str | None:
    """The commit that runs: the variable COMMIT, else that of the checkout; None without either, as from a wheel."""
    if given := os.environ.get("COMMIT"):
        return given
    # The repository is named, so that an installed package does not give the commit of a repository around it.
    command = ["git", "--git-dir", str(_ROOT / ".git"), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:  # there is no git
        return None


def environment() -> dict[str, Any]:
    """Commit, versions, device and host of this process, as JSON."""
    device = jax.devices()[0]
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "packages": versions,
        "device": device.device_kind,
        "platform": device.platform,
        "devices": len(jax.devices()),
        "backend": " ".join(device.client.platform_version.split()),
        "cpu_cores": os.cpu_count(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "machine": platform.machine(),
    }
