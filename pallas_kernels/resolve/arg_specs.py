# SPDX-License-Identifier: Apache-2.0
"""Named real shapes of resolve (and its fetch), for tests, the tuner and benchmarks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

HOST = jax.memory.Space.Host


class Spec(NamedTuple):
    """R, K, H, W; records of a host page and pages of a request; bytes of a row; tables and spaces."""

    requests: int
    selected: int
    hot_slots: int
    ring_slots: int
    page_records: int
    pages: int
    row_bytes: int
    tables: int = 4


SPECS = {
    "dsa_mla_bf16_r1": Spec(1, 2048, 4096, 64, 16, 2048, 1152),
    "dsa_mla_bf16_r64": Spec(64, 2048, 4096, 64, 16, 2048, 1152),
    "dsa_mla_fp8_r16": Spec(16, 2048, 6144, 64, 64, 2048, 656),
    "deepseek_v4_c4": Spec(8, 512, 1024, 16, 16, 2048, 584),
    "quest_pages": Spec(4, 128, 256, 4, 1, 2048, 16384),
    "msa_blocks": Spec(4, 16, 64, 1, 1, 1024, 65536),
    "odd": Spec(3, 77, 151, 3, 1, 801, 8),
    "widest": Spec(1, 4096, 32767, 64, 64, 2048, 704),
    "million": Spec(1, 2048, 8192, 64, 64, 32768, 640),
}


def abstract_args(spec: Spec) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, int]]:
    """Arguments of `resolve_and_fetch` by name, and its keywords."""
    words, slots = spec.row_bytes // 4, spec.hot_slots + spec.ring_slots
    rows = spec.requests * spec.pages * spec.page_records

    def array(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    args = {
        "pool": jax.ShapeDtypeStruct((rows, words), jnp.uint32),
        "hot_rows": array((2, spec.requests * slots, words), jnp.uint32),
        "selected": array((spec.requests, spec.selected)),
        "length": array((spec.requests,)),
        "slot_ids": array((spec.tables, spec.requests, spec.hot_slots)),
        "recency": array((spec.tables, spec.requests, spec.hot_slots), jnp.int16),
        "page_table": array((spec.requests, spec.pages)),
        "base": array((spec.requests,)),
        "table": array(()),
        "space": array(()),
        "group": array(()),
    }
    return args, {"rows_per_space": rows, "ring_slots": spec.ring_slots, "page_records": spec.page_records}
