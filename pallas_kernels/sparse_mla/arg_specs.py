# SPDX-License-Identifier: Apache-2.0
"""Named real shapes of attention over latents and over entries with a window, for tests and benchmarks."""

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


class EntrySpec(NamedTuple):
    """R, N, K entries, slots of their group, and places of the window."""

    requests: int
    heads: int
    selected: int
    slots: int
    window: int = 128


ENTRY_SPECS = {
    "c4_r64": EntrySpec(64, 64, 512, 64 * 1040),
    "c4_r1": EntrySpec(1, 64, 512, 1040),
    "c128_r64": EntrySpec(64, 64, 1024, 64 * 1024),  # all entries of 131,072 tokens
    "window_only": EntrySpec(64, 64, 0, 1),
    "no_window": EntrySpec(16, 64, 512, 16 * 1040, 0),
    "uneven": EntrySpec(3, 24, 77, 300, 100),
}


def abstract_entry_args(spec: EntrySpec) -> dict[str, jax.ShapeDtypeStruct]:
    """Arguments of `sparse_entries` by name: bfloat16 entries of 512 numbers."""
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    return {
        "query": jax.ShapeDtypeStruct((spec.requests, spec.heads, 512), jnp.bfloat16),
        "hot_rows": jax.ShapeDtypeStruct((2, spec.slots, 256), jnp.uint32),
        "group": scalar,
        "place": jax.ShapeDtypeStruct((spec.requests, spec.selected), jnp.int32),
        "window_rows": jax.ShapeDtypeStruct((2, spec.requests * 128, 256), jnp.uint32),
        "window_group": scalar,
        "window_place": jax.ShapeDtypeStruct((spec.requests, spec.window), jnp.int32),
        "sink": jax.ShapeDtypeStruct((spec.heads,), jnp.float32),
    }
