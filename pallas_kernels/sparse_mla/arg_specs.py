# SPDX-License-Identifier: Apache-2.0
"""Named real shapes of latent attention, for tests and benchmarks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.row_format import RecordType, RowFormat


class Spec(NamedTuple):
    """R, N, K, slots of a group, and type of the records."""

    requests: int
    heads: int
    selected: int
    slots: int
    record: RecordType = "bfloat16"

    @property
    def row(self) -> RowFormat:
        return RowFormat(512, 64, self.record)


SPECS = {
    "r64_n64_bf16": Spec(64, 64, 2048, 64 * 4160),
    "r64_n128_bf16": Spec(64, 128, 2048, 64 * 4160),
    "r64_n64_fp8": Spec(64, 64, 2048, 64 * 4160, "fp8"),
    "r64_n128_fp8": Spec(64, 128, 2048, 64 * 4160, "fp8"),
    "r1_n64_bf16": Spec(1, 64, 2048, 4160),
    "r1_n64_fp8": Spec(1, 64, 2048, 4160, "fp8"),
    "full_rows": Spec(16, 128, 2048, 16 * 131072),
    "few_heads": Spec(4, 16, 2048, 4 * 4160),
    "uneven_heads": Spec(2, 96, 512, 2 * 1088),
    "odd": Spec(3, 24, 77, 300, "fp8"),
    "widest": Spec(200, 64, 4096, 200 * 8192),
}


def abstract_args(spec: Spec) -> dict[str, jax.ShapeDtypeStruct]:
    """Arguments of `sparse_mla` by name."""
    return {
        "query": jax.ShapeDtypeStruct((spec.requests, spec.heads, spec.row.width), jnp.bfloat16),
        "hot_rows": jax.ShapeDtypeStruct((2, spec.slots, spec.row.words), jnp.uint32),
        "group": jax.ShapeDtypeStruct((), jnp.int32),
        "place": jax.ShapeDtypeStruct((spec.requests, spec.selected), jnp.int32),
    }
