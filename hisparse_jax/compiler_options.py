# SPDX-License-Identifier: Apache-2.0
"""What XLA is asked for when the decode loop is compiled for a GPU, and what happens if it doesn't know the words."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp

Options = dict[str, bool | int | str]

# Kernels that don't depend on each other become parallel branches of one CUDA graph: a follower's fetch then runs
# beside the layers before it. On one stream every order of fetches costs as much as fetching just before the attention.
CONCURRENT: Options = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
    ),
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
NO_GRAPHS: Options = {"xla_gpu_enable_command_buffer": ""}
# Matmuls of one operand would be merged by concatenating their weights, at every step.
SEPARATE_MATMULS: Options = {"xla_gpu_dot_merger_threshold_mb": 0}


def decode_options(*, graphs: bool = True) -> Options | None:
    """The options of the decode loop for the default device; None where there are none to give.

    Args:
      graphs: kernels run in CUDA graphs, side by side where they can; otherwise one after the other, under their names.
    """
    if jax.devices()[0].platform not in ("gpu", "cuda"):
        return None
    overlap = (
        _accepted(CONCURRENT, "prefetches will not overlap with compute")
        if graphs
        else _accepted(NO_GRAPHS, "kernels of a profile may have no names")
    )
    return overlap | _accepted(SEPARATE_MATMULS, "weights of neighbouring matmuls may be copied at every step")


def _accepted(options: Options, otherwise: str) -> Options:
    """These options if the compiler takes them; else none, and a warning."""
    return options if _takes(tuple(options.items()), otherwise) else {}


@functools.cache
def _takes(options: tuple[tuple[str, bool | int | str], ...], otherwise: str) -> bool:
    try:
        jax.jit(lambda x: x + 1, compiler_options=dict(options)).lower(jnp.int32(0)).compile()
    except Exception as error:  # the type of the error is XLA's affair
        warnings.warn(
            f"the compiler does not take {', '.join(name for name, _ in options)}: {otherwise} ({error})", stacklevel=4
        )
        return False
    return True
