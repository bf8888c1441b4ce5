# SPDX-License-Identifier: Apache-2.0
"""The one file of this package that knows memory kinds: where things live, and how much room there is."""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax import Array
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from pallas_kernels.common import HOST

HOST_KIND, DEVICE_KIND = "pinned_host", "device"
_DEFAULT_PINNED_GB = 64  # what the GPU host allocator takes unless the variable below is set
_PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT_DEVICE_SHARE = "0.75"  # of the device's memory that is lent unless the variable below is set
_DEVICE_SHARES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"  # the new name and the old one


def sharding(host: bool) -> SingleDeviceSharding:
    """Placement on the default device, or in the pinned host memory beside it."""
    return SingleDeviceSharding(jax.devices()[0], memory_kind=HOST_KIND if host else DEVICE_KIND)


def host_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Zeros in pinned host memory, in a buffer that can be donated."""
    if device_is_host():
        # device_put may alias NumPy's memory here, and an alias can't be donated.
        return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding(host=True))()
    # A jitted zeros would take the whole size in HBM first. NumPy's pages are untouched, so host memory is taken once
    # (36 s for 40 GiB on an H200 machine).
    return jax.device_put(np.zeros(shape, dtype), sharding(host=True))


def stays_on_host(value: Array) -> Array:
    """Says inside a traced function that `value` is in host memory; abstract arguments do not carry that."""
    return jax.device_put(value, HOST)


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree, which may be abstract."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_limit() -> int | None:
    """Bytes the default device lends to this process, or None if it doesn't say."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit")


def device_bytes() -> int:
    """Memory of the default device: what its allocator lends is a share of it.

    Raises:
      RuntimeError: a device that doesn't say.
    """
    limit = device_limit()
    if limit is None and not device_is_host():
        raise RuntimeError("the device does not say how much memory it has: its allocator must be the default one")
    if limit is None:
        return psutil.virtual_memory().total
    shares = [os.environ[name] for name in _DEVICE_SHARES if name in os.environ]
    return int(limit / float([*shares, _DEFAULT_DEVICE_SHARE][0]))


def device_is_host() -> bool:
    return jax.devices()[0].platform == "cpu"


def host_limit() -> int:
    """Bytes of host memory to be had: what is free, and on a GPU what its host allocator may pin."""
    free = psutil.virtual_memory().available
    if device_is_host():
        return free
    return min(free, int(float(os.environ.get(_PINNED_LIMIT, _DEFAULT_PINNED_GB)) * 2**30))
