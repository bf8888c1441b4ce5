# SPDX-License-Identifier: Apache-2.0
"""Named real shapes of fetch, for tests, the tuner and benchmarks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.resolve.types import Plan


class Spec(NamedTuple):
    """R, K, hot slots of a request with its ring, rows of a space, bytes of a row."""

    requests: int
    selected: int
    slots: int
    rows_per_space: int
    row_bytes: int


SPECS = {
    "dsa_mla_bf16": Spec(16, 2048, 4160, 16 * 32768, 1152),
    "dsa_mla_fp8": Spec(64, 2048, 6208, 64 * 32768, 656),
    "deepseek_v4_c4": Spec(8, 512, 1040, 8 * 32768, 584),
    "quest_pages": Spec(4, 128, 260, 8192, 16384),
    "msa_blocks": Spec(4, 16, 65, 4096, 65536),
    "small": Spec(1, 7, 20, 50, 8),
}


def abstract_args(spec: Spec) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments of `fetch` by name, and its keywords."""

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    words = spec.row_bytes // 4
    per_place = array(spec.requests, spec.selected)
    args = {
        "pool": jax.ShapeDtypeStruct((2 * spec.rows_per_space, words), jnp.uint32),
        "hot_rows": jax.ShapeDtypeStruct((2, spec.requests * spec.slots, words), jnp.uint32),
        "plan": Plan(per_place, per_place, array(spec.requests)),
        "base": array(spec.requests),
        "space": array(),
        "group": array(),
    }
    return args, {"rows_per_space": spec.rows_per_space}
