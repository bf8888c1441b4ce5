# SPDX-License-Identifier: Apache-2.0
"""Named real shapes of index_topk, for tests, the tuner and benchmarks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Spec(NamedTuple):
    """R, S, K, and how many of the K are the newest."""

    rows: int
    context: int
    selected: int
    newest: int = 0


SPECS = {
    "dsa_r64_128k": Spec(64, 131072, 2048),
    "dsa_r8_128k": Spec(8, 131072, 2048),
    "dsa_r64_32k": Spec(64, 32768, 2048),
    "deepseek_v4_c4": Spec(64, 16384, 512),
    "quest_pages": Spec(512, 8192, 128, newest=2),
    "msa_blocks": Spec(256, 1024, 16),
    "million": Spec(4, 1 << 20, 4096),
    "odd": Spec(3, 1001, 77),
    "short": Spec(2, 40, 64),
}


def abstract_args(spec: Spec) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, int]]:
    """Arguments of `index_topk` by name, and its keywords."""
    args = {
        "scores": jax.ShapeDtypeStruct((spec.rows, spec.context), jnp.float32),
        "length": jax.ShapeDtypeStruct((spec.rows,), jnp.int32),
    }
    return args, {"k": spec.selected, "newest": spec.newest}
