# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoint folders: from `model_type` to a config, a decoder and a name map."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from hisparse_jax.checkpoint.load import Entry
from hisparse_jax.checkpoint.safetensors import SafetensorsFolder, read_json
from hisparse_jax.errors import UserError
from hisparse_jax.selection import QuestRule
from hisparse_jax.tokenizer import Tokenizer
from models import dsa_config
from models.config import GqaConfig
from models.decoder import QuestDecoder
from models.dsa import DsaDecoder, DsaOptions
from models.dsa_config import DsaConfig
from models.dsa_params import dsa_entries, expert_entries, ignored
from models.opened import Opened, opened
from models.params import HUGGING_FACE, gqa_entries
from pallas_kernels.common import Implementation
from pallas_kernels.row_format import RecordType

GQA_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
SUPPORTED = tuple(sorted((*GQA_TYPES, *dsa_config.MODEL_TYPES)))

Records = Literal["plain", "fp8", "bfloat16", "float32"]


def read_config(folder: Path) -> GqaConfig | DsaConfig:
    """The shape of the model in a folder, from its `config.json`.

    Raises:
      UserError: no such file, a model type or a setting that is not supported, a missing key.
    """
    path = Path(folder) / "config.json"
    config = read_json(path)
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in SUPPORTED:
        raise UserError(f"{path}: model type {kind!r} is not supported yet; supported: {', '.join(SUPPORTED)}")
    return dsa_config.read_config(config) if kind in dsa_config.MODEL_TYPES else _read_gqa(config)


def open_folder(
    folder: Path, *, rule: QuestRule | None = None, dtype: DTypeLike = jnp.float32, records: Records = "plain",
    index_keys: Records | None = None, prefetch: bool = True, implementation: Implementation = "auto",
    tokenizer: Tokenizer | None = None,
) -> Opened:  # fmt: skip
    """The model of a checkpoint folder, without its parameters.

    Args:
      folder: with `config.json` and safetensors files.
      rule: how pages are selected; for the families that decode with Quest.
      dtype: type of parameters, arithmetic and plain records.
      records: how a DSA family stores records: as `dtype` ("plain"), or as named.
      index_keys: how it stores index keys; like records if not given.
      prefetch: see `models.dsa.DsaOptions`.
      implementation: of the kernels.
      tokenizer: passed on.
    Raises:
      UserError: a checkpoint that is not supported or not whole, or settings that don't go with its family.
    """
    folder = Path(folder)
    config, source = read_config(folder), SafetensorsFolder(folder)
    if isinstance(config, DsaConfig):
        record, keys = (_stored_type(name, dtype) for name in (records, index_keys or records))
        options = DsaOptions(record, keys, prefetch, implementation)
        return opened(
            config,
            lambda rngs: DsaDecoder(config, options, dtype=dtype, rngs=rngs),
            source,
            dsa_entries(config),
            ignore=(ignored(config),),
            reason=f"of multi-token prediction (layer {config.layers} and above)",
            tokenizer=tokenizer,
        )
    if records != "plain" or index_keys not in (None, "plain"):
        raise UserError(f"model.records: {records} is a format of DSA families; {folder} stores keys and values")
    if rule is None:
        raise UserError(f"selection.kind: {folder} decodes with quest, it has no indexer of its own")
    return opened(
        config,
        lambda rngs: QuestDecoder(config, rule, dtype=dtype, rngs=rngs, implementation=implementation),
        source,
        _gqa_entries(config),
        ignore=(r".*\.rotary_emb\.inv_freq", *(["lm_head.weight"] if config.tied_head else [])),
        tokenizer=tokenizer,
    )


def _stored_type(name: Records, dtype: DTypeLike) -> RecordType:
    if name != "plain":
        return name
    return "bfloat16" if jnp.dtype(dtype) == jnp.bfloat16 else "float32"


def _gqa_entries(config: GqaConfig) -> list[Entry]:
    entries = gqa_entries(config, HUGGING_FACE)
    if not config.experts:
        return entries
    dense = [entry for entry in entries if not entry.path.startswith("layers.mlp.")]
    return dense + expert_entries("layers.mlp", "model.layers.{layer}.mlp", range(config.layers), config.experts)


def _read_gqa(config: Mapping[str, Any]) -> GqaConfig:
    kind = config["model_type"]
    fixed: list[tuple[str, Any]] = [("hidden_act", "silu"), ("attention_bias", False), ("use_sliding_window", False)]
    fixed += [("mlp_bias", False), ("decoder_sparse_step", 1), ("mlp_only_layers", [])]
    for key, wanted in fixed:
        if (config.get(key) or wanted) != wanted:
            raise UserError(f"config.json: {key} must be {wanted!r}, got {config[key]!r}: this is not supported yet")
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling != "default":
        raise UserError(f"config.json: rope type must be default for {kind}, got {scaling!r}: not supported yet")
    theta = rope.get("rope_theta", config.get("rope_theta"))

    def need(*keys: str) -> Any:
        found = [config[key] for key in keys if config.get(key) is not None]
        if not found:
            raise UserError(f"config.json: {' or '.join(keys)} is missing: a {kind} config must give it")
        return found[0]

    heads, hidden, moe = need("num_attention_heads"), need("hidden_size"), kind == "qwen3_moe"
    return GqaConfig(
        vocab=need("vocab_size"),
        hidden=hidden,
        layers=need("num_hidden_layers"),
        query_heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        mlp_width=need("moe_intermediate_size" if moe else "intermediate_size"),
        rope_theta=float(theta if theta is not None else 10000.0),
        rope_pairing="halves",
        norm_eps=config.get("rms_norm_eps", 1e-6),
        max_tokens=need("max_position_embeddings"),
        tied_head=bool(config.get("tie_word_embeddings")),
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        experts=need("num_experts", "num_local_experts") if moe else 0,
        experts_used=need("num_experts_per_tok") if moe else 0,
        renormalise=bool(config.get("norm_topk_prob", False)) or not moe,
    )
