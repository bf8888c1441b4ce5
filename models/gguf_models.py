# SPDX-License-Identifier: Apache-2.0
"""Decoders that GGUF files carry: architecture names, metadata keys, parameters."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

from hisparse_jax.checkpoint.gguf import GgufFile
from hisparse_jax.errors import UserError
from hisparse_jax.selection import QuestRule
from hisparse_jax.tokenizer import from_gguf
from models.config import GqaConfig, RopePairing
from models.decoder import QuestDecoder
from models.opened import Opened, opened
from models.params import GGUF, gqa_entries
from pallas_kernels.common import Implementation

# Rows of "llama" files are permuted so that neighbouring channels rotate together.
_PAIRING: dict[str, RopePairing] = {"llama": "pairs", "qwen2": "halves", "qwen3": "halves"}
SUPPORTED = tuple(_PAIRING)

_DERIVED = r"rope_freqs\.weight"


def read_config(file: GgufFile) -> GqaConfig:
    """The decoder's shape from the metadata of a GGUF file.

    Raises:
      UserError: an architecture or a rope scaling that is not supported.
    """
    family = file.field("general.architecture")
    if family not in SUPPORTED:
        raise UserError(f"{file.path}: model type {family!r} is not supported; supported: {', '.join(SUPPORTED)}")

    def number(key: str, default: float | None = None) -> float:
        return file.field(f"{family}.{key}", default)

    scaling = file.field(f"{family}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.shapes():
        raise UserError(f"{file.path}: rope scaling is not supported for {family} ({scaling})")
    heads, hidden = int(number("attention.head_count")), int(number("embedding_length"))
    head_dim = int(number("attention.key_length", hidden // heads))
    return GqaConfig(
        vocab=file.shapes()["token_embd.weight"][0],
        hidden=hidden,
        layers=int(number("block_count")),
        query_heads=heads,
        kv_heads=int(number("attention.head_count_kv", heads)),
        head_dim=head_dim,
        mlp_width=int(number("feed_forward_length")),
        rope_theta=float(number("rope.freq_base", 10000.0)),
        rope_pairing=_PAIRING[family],
        norm_eps=float(number("attention.layer_norm_rms_epsilon")),
        max_tokens=int(number("context_length")),
        tied_head="output.weight" not in file.shapes(),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def open_gguf(
    file: GgufFile, rule: QuestRule, dtype: DTypeLike = jnp.float32, implementation: Implementation = "auto"
) -> Opened:
    """The model of a GGUF file, to be dequantised to `dtype`.

    Raises:
      UserError: an architecture, rope scaling or tokenizer that is not supported.
    """
    config = read_config(file)
    return opened(
        config,
        lambda rngs: QuestDecoder(config, rule, dtype=dtype, rngs=rngs, implementation=implementation),
        file,
        gqa_entries(config, GGUF),
        ignore=(_DERIVED,),
        tokenizer=from_gguf(file),
    )
