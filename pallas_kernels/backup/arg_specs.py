# SPDX-License-Identifier: Apache-2.0
"""Named real shapes of backup, for tests, the tuner and benchmarks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Spec(NamedTuple):
    """Rows to write, rows of the pool, bytes of a row."""

    rows: int
    pool_rows: int
    row_bytes: int


SPECS = {
    "decode_step": Spec(64 * 61, 1 << 20, 1152),
    "prefill_chunk_bf16": Spec(2048, 1 << 20, 1152),
    "prefill_chunk_fp8": Spec(2048, 1 << 20, 656),
    "deepseek_v4_c4": Spec(512, 1 << 18, 584),
    "quest_pages": Spec(128, 1 << 14, 16384),
    "one": Spec(1, 50, 8),
}


def abstract_args(spec: Spec) -> dict[str, jax.ShapeDtypeStruct]:
    """Arguments of `backup` by name."""
    words = spec.row_bytes // 4
    return {
        "pool": jax.ShapeDtypeStruct((spec.pool_rows, words), jnp.uint32),
        "rows": jax.ShapeDtypeStruct((spec.rows, words), jnp.uint32),
        "host_row": jax.ShapeDtypeStruct((spec.rows,), jnp.int32),
    }
