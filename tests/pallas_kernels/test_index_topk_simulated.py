# SPDX-License-Identifier: Apache-2.0
"""The top-k kernel as compiled for an H200, run by the simulator: several programs and warps, without a GPU.

Needs jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc and nvidia-nvvm in a folder of their own, which
HISPARSE_CUDA_PACKAGES names (`pip install --no-deps --target DIR ...`); it is skipped without.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.pallas_kernels.selection_cases import SCORES, expected_topk, poison
from tests.ptx_simulator import Program

PACKAGES = os.environ.get("HISPARSE_CUDA_PACKAGES")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PACKAGES, reason="needs HISPARSE_CUDA_PACKAGES")]
ROOT = Path(__file__).parents[2]
H200 = """
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
COMPILE = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from pallas_kernels.index_topk import mosaic_gpu
from pallas_kernels.index_topk.tuning import Tuning

rows, context, k, programs, threads, in_flight, resident = map(int, sys.argv[1:])
devices = topologies.get_topology_desc(
    platform="cuda", topology_name="h200", target_config=sys.stdin.read(), topology="1x1x1"
).devices
one = jax.sharding.SingleDeviceSharding(devices[0])
args = (
    jax.ShapeDtypeStruct((rows, context), jnp.float32, sharding=one),
    jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=one),
)
how = Tuning(programs, threads, in_flight, bool(resident))
gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=gpu)):
    traced = jax.jit(lambda s, n: mosaic_gpu.index_topk(s, n, k, how=how)).trace(*args)
    lowered = traced.lower(lowering_platforms=("cuda",))
lowered.compile()
"""


@functools.cache
def program(*numbers: int) -> Program:
    """The kernel compiled in a process of its own, for rows, context, k and the launch."""
    tools = Path(PACKAGES or "") / "nvidia" / "cu13"
    environment = os.environ | {
        "PYTHONPATH": f"{PACKAGES}:{ROOT}", "PATH": f"{tools / 'bin'}:{os.environ['PATH']}", "CUDA_ROOT": str(tools),
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": "cuda,cpu", "MOSAIC_GPU_DUMP_PTX": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *map(str, numbers)], input=H200, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert done.returncode == 0 and ".version" in text, text[-2000:]
    return Program(text[text.index(".version") :])


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(
    "context, k, how",
    [
        (3000, 200, (2, 4, 2, 1)), (3001, 333, (4, 8, 2, 0)), (2500, 16, (8, 4, 1, 1)), (4096, 2048, (1, 8, 4, 1)),
        (129, 100, (1, 4, 1, 0)), (40000, 2048, (8, 8, 4, 1)), (70000, 4096, (2, 8, 4, 0)),
    ],
    ids=str,
)  # fmt: skip
def test_corners(context, k, how, name):
    length = [context, k + 1, context - 5, k, context // 2 + 3, 0, 1]
    scores = poison(SCORES[name](np.random.default_rng(0), (len(length), context)), length)
    got = np.full((len(length), k), -77, np.int32)
    program(len(length), context, k, *how).run([np.asarray(length, np.int32), got, scores], clusters=len(length))
    np.testing.assert_array_equal(got, expected_topk(scores, length, k))
