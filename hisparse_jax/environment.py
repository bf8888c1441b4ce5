# SPDX-License-Identifier: Apache-2.0
"""What a result was made with: versions and devices, for every record that is written."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from typing import Any

import jax
import psutil

_PACKAGES = ("hisparse-jax", "jax", "jaxlib", "flax", "numpy")


def environment() -> dict[str, Any]:
    """Versions, device and host of this process, as JSON."""
    device = jax.devices()[0]
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
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
