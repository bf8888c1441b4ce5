# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoint folders: from `model_type` to a config, a decoder and a name map."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from hisparse_jax.checkpoint.load import Entry
from hisparse_jax.checkpoint.safetensors import SafetensorsFolder, read_json
from hisparse_jax.errors import UserError
from hisparse_jax.prefetch import Prefetch
from hisparse_jax.selection import QuestRule
from hisparse_jax.tokenizer import Tokenizer
from models import dsa_config
from models.config import GqaConfig
from models.config_file import ConfigFile
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
      UserError: no such file, a model type or a setting that is not supported, a key that is missing or of wrong type.
    """
    path = Path(folder) / "config.json"
    config = read_json(path)
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in SUPPORTED:
        raise UserError(f"{path}: model type {kind!r} is not supported yet; supported: {', '.join(SUPPORTED)}")
    if kind in dsa_config.MODEL_TYPES:
        return dsa_config.read_config(config, str(path))
    return _read_gqa(ConfigFile(config, str(path)))


def open_folder(
    folder: Path, *, rule: QuestRule | None = None, dtype: DTypeLike = jnp.float32, records: Records = "plain",
    index_keys: Records | None = None, prefetch: Prefetch = "exact", fetch_programs: int | None = None,
    parts: int | None = None, implementation: Implementation = "auto", tokenizer: Tokenizer | None = None,
) -> Opened:  # fmt: skip
    """The model of a checkpoint folder, without its parameters.

    Args:
      folder: with `config.json` and safetensors files.
      rule: how pages are selected; for the families that decode with Quest.
      dtype: type of parameters, arithmetic and plain records.
      records: how a DSA family stores records: as `dtype` ("plain"), or as named.
      index_keys: how it stores index keys; like records if not given.
      prefetch, fetch_programs, parts: see `models.dsa.DsaOptions`.
      implementation: of the kernels.
      tokenizer: passed on.
    Raises:
      UserError: a checkpoint that is not supported or not whole, or settings that don't go with its family.
    """
    folder = Path(folder)
    config, source = read_config(folder), SafetensorsFolder(folder)
    if isinstance(config, DsaConfig):
        record, keys = (_stored_type(name, dtype) for name in (records, index_keys or records))
        options = DsaOptions(record, keys, prefetch, fetch_programs, parts, implementation=implementation)
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
    if config.experts:
        for layer in range(config.layers):
            entries += expert_entries(f"layers.{layer}.mlp", f"model.layers.{layer}.mlp", config.experts)
    return entries


def _read_gqa(file: ConfigFile) -> GqaConfig:
    kind = file.get("model_type")
    fixed: list[tuple[str, Any]] = [("hidden_act", "silu"), ("attention_bias", False), ("use_sliding_window", False)]
    fixed += [("mlp_bias", False), ("decoder_sparse_step", 1), ("mlp_only_layers", [])]
    for key, wanted in fixed:
        if (file.get(key) or wanted) != wanted:
            raise UserError(f"{file.wrong(key, repr(wanted))}: this is not supported yet")
    rope = file.rope()
    scaling = rope.values.get("rope_type", rope.values.get("type", "default"))
    if scaling != "default":
        raise UserError(f"{file.name}: rope type must be default for {kind}, got {scaling!r}: not supported yet")
    theta = (file if rope.get("rope_theta") is None else rope).number("rope_theta", 10000.0)
    heads, hidden, moe = file.integer("num_attention_heads"), file.integer("hidden_size"), kind == "qwen3_moe"
    return GqaConfig(
        vocab=file.integer("vocab_size"),
        hidden=hidden,
        layers=file.integer("num_hidden_layers"),
        query_heads=heads,
        kv_heads=file.integer("num_key_value_heads", heads),
        head_dim=file.integer("head_dim", hidden // heads),
        mlp_width=file.integer("moe_intermediate_size" if moe else "intermediate_size"),
        rope_theta=float(theta),
        rope_pairing="halves",
        norm_eps=file.number("rms_norm_eps", 1e-6),
        max_tokens=file.integer("max_position_embeddings"),
        tied_head=file.flag("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        experts=file.integer(file.first("num_experts", "num_local_experts")) if moe else 0,
        experts_used=file.integer("num_experts_per_tok") if moe else 0,
        renormalise=file.flag("norm_topk_prob", False) or not moe,
    )
