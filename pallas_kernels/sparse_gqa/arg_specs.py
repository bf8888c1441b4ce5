# SPDX-License-Identifier: Apache-2.0
"""Named real shapes of page attention, for tests and benchmarks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

CHANNELS = 128


class Spec(NamedTuple):
    """R, KV heads, query heads of each, K, tokens of a record, slots of a group; with a mask of heads or without."""

    requests: int
    kv_heads: int
    heads: int
    selected: int
    tokens: int
    slots: int
    masked: bool = False


SPECS = {
    "quest_r64": Spec(64, 8, 4, 128, 16, 64 * 260),
    "quest_r64_masked": Spec(64, 8, 4, 256, 16, 64 * 260, True),
    "quest_r1": Spec(1, 8, 4, 128, 16, 260),
    "msa_blocks": Spec(4, 1, 16, 16, 128, 4 * 65),  # rows are (request, KV group), here one request of four groups
    "msa_r64": Spec(64 * 4, 1, 16, 16, 128, 64 * 4 * 65),
    "four_kv_heads": Spec(8, 4, 8, 64, 16, 8 * 130),
    "odd": Spec(3, 3, 5, 11, 10, 60, True),
    "all_heads": Spec(2, 1, 64, 20, 7, 60),
}


def abstract_args(spec: Spec) -> dict[str, jax.ShapeDtypeStruct | None]:
    """Arguments of `sparse_gqa` by name."""
    heads = (spec.requests, spec.kv_heads, spec.heads)
    words = spec.tokens * spec.kv_heads * CHANNELS
    place = jax.ShapeDtypeStruct((spec.requests, spec.selected), jnp.int32)
    return {
        "query": jax.ShapeDtypeStruct((*heads, CHANNELS), jnp.bfloat16),
        "hot_rows": jax.ShapeDtypeStruct((2, spec.slots, words), jnp.uint32),
        "group": jax.ShapeDtypeStruct((), jnp.int32),
        "place": place,
        "visible": place,
        "head_mask": jax.ShapeDtypeStruct((*heads, spec.selected), jnp.bool_) if spec.masked else None,
    }
