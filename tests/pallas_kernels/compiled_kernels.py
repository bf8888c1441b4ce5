# SPDX-License-Identifier: Apache-2.0
"""Kernels as compiled for an H200, without one, for the simulator of `tests/ptx_simulator.py`.

Needs jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc and nvidia-nvvm in a folder of their own, which
HISPARSE_CUDA_PACKAGES names (`pip install --no-deps --target DIR ...`).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ptx_simulator import Program

PACKAGES = os.environ.get("HISPARSE_CUDA_PACKAGES")
needs_packages = [pytest.mark.slow, pytest.mark.skipif(not PACKAGES, reason="needs HISPARSE_CUDA_PACKAGES")]
_ROOT = Path(__file__).parents[2]
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560
  clock_rate_ghz: 1.98 device_memory_size: 150110011392 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 patch: 0 } runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""
# `run` and `args` are the kernel's: a function, and the shape and dtype of each argument.
_COMPILE = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies

numbers = list(map(int, sys.argv[1:]))
{kernel}
devices = topologies.get_topology_desc(
    platform="cuda", topology_name="h200", target_config=sys.stdin.read(), topology="1x1x1"
).devices
one = jax.sharding.SingleDeviceSharding(devices[0])
gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=gpu)):
    traced = jax.jit(run).trace(*(jax.ShapeDtypeStruct(*arg, sharding=one) for arg in args))
    lowered = traced.lower(lowering_platforms=("cuda",))
lowered.compile()
"""


@functools.cache
def compiled(kernel: str, *numbers: int) -> Program:
    """A kernel compiled in a process of its own.

    Args:
      kernel: Python that makes `run` and `args` of the list `numbers`.
      numbers: sizes and launch.
    """
    tools = Path(PACKAGES or "") / "nvidia" / "cu13"
    environment = os.environ | {
        "PYTHONPATH": f"{PACKAGES}:{_ROOT}", "PATH": f"{tools / 'bin'}:{os.environ['PATH']}", "CUDA_ROOT": str(tools),
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": "cuda,cpu", "MOSAIC_GPU_DUMP_PTX": "1",
    }  # fmt: skip
    source = _COMPILE.replace("{kernel}", kernel)
    done = subprocess.run(
        [sys.executable, "-c", source, *map(str, numbers)], input=_H200, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert done.returncode == 0 and ".version" in text, text[-2000:]
    return Program(text[text.index(".version") :])
