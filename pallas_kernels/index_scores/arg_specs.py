# SPDX-License-Identifier: Apache-2.0
"""Named real shapes of the index scores, for tests, the tuner and benchmarks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Dsa(NamedTuple):
    """R, N, S, the type of the keys, and layers."""

    rows: int
    heads: int
    records: int
    keys: str
    layers: int = 2


class Quest(NamedTuple):
    """R, KV groups, heads of a group, pages, and layers."""

    rows: int
    groups: int
    heads: int
    pages: int
    layers: int = 2


class Msa(NamedTuple):
    """R, index heads, S, and layers."""

    rows: int
    heads: int
    records: int
    layers: int = 2


DSA = {
    "glm52_fp8_r32": Dsa(32, 32, 65536, "float8_e4m3fn"),
    "glm52_bf16_r32": Dsa(32, 32, 65536, "bfloat16"),
    "v32_fp8_r1": Dsa(1, 64, 131072, "float8_e4m3fn"),
    "v32_bf16_r64": Dsa(64, 64, 32768, "bfloat16"),
    "odd": Dsa(3, 8, 1000, "float8_e4m3fn"),
    "short": Dsa(2, 16, 72, "bfloat16"),
}
QUEST = {
    "llama_r64": Quest(64, 8, 4, 8192),
    "qwen_r8": Quest(8, 4, 7, 2048),
    "short": Quest(2, 1, 16, 72),
}
MSA = {
    "m3_r64": Msa(64, 4, 131072),
    "m3_r8": Msa(8, 4, 65536),
    "odd": Msa(3, 9, 1000),
    "short": Msa(2, 4, 128),
}


def dsa_args(spec: Dsa) -> tuple[dict[str, jax.ShapeDtypeStruct | None], dict[str, float]]:
    """Arguments of `dsa_scores` by name, and its keywords."""
    kind = jnp.dtype(spec.keys)
    stored = (spec.layers, spec.rows, spec.records)
    fp8 = kind == jnp.float8_e4m3fn
    args = {
        "query": jax.ShapeDtypeStruct((spec.rows, spec.heads, 128), jnp.bfloat16),
        "weight": jax.ShapeDtypeStruct((spec.rows, spec.heads), jnp.float32),
        "keys": jax.ShapeDtypeStruct((*stored, 128), kind),
        "key_scale": jax.ShapeDtypeStruct(stored, jnp.float32) if fp8 else None,
        "layer": jax.ShapeDtypeStruct((), jnp.int32),
        "length": jax.ShapeDtypeStruct((spec.rows,), jnp.int32),
    }
    return args, {"scale": 128**-0.5}


def quest_args(spec: Quest) -> dict[str, jax.ShapeDtypeStruct]:
    """Arguments of `quest_scores` by name."""
    bounds = jax.ShapeDtypeStruct((spec.layers, spec.rows, spec.pages, spec.groups, 128), jnp.bfloat16)
    return {
        "query": jax.ShapeDtypeStruct((spec.rows, spec.groups, spec.heads, 128), jnp.bfloat16),
        "key_min": bounds,
        "key_max": bounds,
        "layer": jax.ShapeDtypeStruct((), jnp.int32),
    }


def msa_args(spec: Msa) -> dict[str, jax.ShapeDtypeStruct]:
    """Arguments of `msa_scores` by name."""
    return {
        "query": jax.ShapeDtypeStruct((spec.rows, spec.heads, 128), jnp.bfloat16),
        "keys": jax.ShapeDtypeStruct((spec.layers, spec.rows, spec.records, 128), jnp.bfloat16),
        "layer": jax.ShapeDtypeStruct((), jnp.int32),
        "length": jax.ShapeDtypeStruct((spec.rows,), jnp.int32),
    }
