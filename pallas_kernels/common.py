# SPDX-License-Identifier: Apache-2.0
"""What every operation shares: argument checks, the choice of an implementation, host-side execution."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.compute_on import compute_on

Implementation = Literal["auto", "xla", "mosaic_gpu"]

HOST = jax.memory.Space.Host
DEVICE = jax.memory.Space.Device
SHARED_BYTES = 220 * 1024  # of the 227 KiB a program of a kernel can have


def choose(implementation: str, operation: str, mosaic_gpu: str | None) -> str:
    """Turns `auto` into the implementation that the current platform runs; a named one that can't run is an error.

    Args:
      implementation: "auto", "xla" or "mosaic_gpu".
      operation: name used in errors.
      mosaic_gpu: why the Mosaic GPU kernel can't take these arguments, or None if it can.
    Returns:
      "xla" or "mosaic_gpu".
    Raises:
      ValueError: the name is unknown, or the named implementation can't run here.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"{operation}: implementation must be one of {', '.join(get_args(Implementation))}, got {implementation!r}"
        )
    if implementation == "xla":
        return "xla"
    reason = mosaic_gpu or _no_mosaic_gpu()
    if implementation == "auto":
        return "xla" if reason else "mosaic_gpu"
    if reason:
        raise ValueError(f"{operation}: implementation 'mosaic_gpu' can't run: {reason}; those that can: xla")
    return "mosaic_gpu"


def _no_mosaic_gpu() -> str | None:
    """Why this process can't run or lower Mosaic GPU kernels, or None. An abstract mesh that names a GPU counts."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return None if abstract.platform in ("gpu", "cuda") else f"the mesh names a {abstract.platform} device"
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, the default device is {device.device_kind} ({device.platform})"
    capability = getattr(device, "compute_capability", "0")
    if float(capability) < 9.0:
        return f"it needs compute capability 9.0 or newer, {device.device_kind} has {capability}"
    return None


def shared[**P, T](*static: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Marks an operation whose calls of one shape share what is traced and lowered, and on a GPU one compiled kernel.

    Without it a program of 78 layers compiles a kernel 78 times, as every lowering of it gets a name of its own.

    Args:
      static: arguments that are no arrays.
    """
    return lambda function: jax.jit(function, static_argnames=static)


def check(operation: str, argument: str, value: Array, shape: tuple[int | None, ...], dtype: Any = None) -> None:
    """Raises ValueError unless `value` has this shape (None: any length) and dtype."""
    want = tuple("any" if n is None else n for n in shape)
    if value.ndim != len(shape) or any(n is not None and n != m for n, m in zip(shape, value.shape, strict=True)):
        raise ValueError(f"{operation}: {argument} must have shape {list(want)}, got {list(value.shape)}")
    if dtype is not None and value.dtype != jnp.dtype(dtype):
        raise ValueError(f"{operation}: {argument} must be {jnp.dtype(dtype)}, got {value.dtype}")


def on_host(function: Callable[..., Array]) -> Callable[..., Any]:
    """Runs `function` on the host beside the device that called it; its arrays are, and stay, in host memory.

    This is the one portable way to index an array in `pinned_host`: XLA refuses to gather from it directly.
    """
    return compute_on(function, compute_type="device_host", out_memory_spaces=HOST)


@functools.cache
def _tuned_table(device_kind: str) -> dict[str, Any]:
    """Measured launches of this kind of device, or of the H200 where none were measured."""
    folder = Path(__file__).parent / "tuned"
    own = folder / f"{device_kind.lower().replace(' ', '_')}.json"
    return json.loads((own if own.exists() else folder / "nvidia_h200.json").read_text())


def tuned(operation: str, **sizes: int) -> dict[str, Any]:
    """The measured launch of an operation on the current device: the first whose limits hold, {} if none does.

    Args:
      sizes: limits of a launch are `<name>_at_most`; one that it doesn't have holds.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    kind = abstract.device_kind if abstract is not None else jax.devices()[0].device_kind
    for choice in _tuned_table(kind)[operation]["choices"]:
        if all(size <= choice.get(f"{name}_at_most", size) for name, size in sizes.items()):
            return choice["how"]
    return {}
