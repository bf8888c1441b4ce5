# SPDX-License-Identifier: Apache-2.0
"""Name map of DeepSeek-V3.2 and GLM-5 checkpoints, and of expert layers: which tensors make up which parameter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hisparse_jax.checkpoint.load import Entry
from models.dsa_config import DsaConfig

_ATTENTION = {
    "query_down": "q_a_proj",
    "query_up": "q_b_proj",
    "latent_down": "kv_a_proj_with_mqa",
    "out": "o_proj",
}
_INDEXER = {"query": "wq_b", "key": "wk", "weight": "weights_proj"}
_LAYER = "model.layers.{layer}"


def dsa_entries(config: DsaConfig) -> list[Entry]:
    """The name map of a decoder, one entry for each parameter."""
    entries = [
        Entry("embed.embedding", "model.embed_tokens.weight"),
        Entry("norm.scale", "model.norm.weight"),
    ]
    if not config.tied_head:
        entries.append(Entry("head.kernel", "lm_head.weight", transpose=True))
    for number, run in enumerate(config.runs()):
        for position, dense in enumerate(run.dense):
            path, layers = f"runs.{number}.layers.{position}", run.layers(position)
            entries += _attention(config, path, layers)
            if position == 0:
                entries += _indexer(path, layers)
            entries.append(Entry(f"{path}.mlp_norm.scale", f"{_LAYER}.post_attention_layernorm.weight", layers=layers))
            mlp = f"{_LAYER}.mlp"
            if dense:
                entries += mlp_entries(f"{path}.mlp", mlp, layers)
                continue
            entries += expert_entries(f"{path}.mlp", mlp, layers, config.experts)
            bias = f"{mlp}.gate.e_score_correction_bias"
            entries.append(Entry(f"{path}.mlp.router_bias", bias, layers=layers))
            if config.shared_experts:
                entries += mlp_entries(f"{path}.mlp.shared", f"{mlp}.shared_experts", layers)
    return entries


def ignored(config: DsaConfig) -> str:
    """Regular expression of the tensors of multi-token prediction, which lie behind the last layer."""
    digits = [rf"(?!(?:{'|'.join(str(n) for n in range(config.layers))})\.)\d+"]
    return rf"model\.layers\.{digits[0]}\..*"


def mlp_entries(path: str, name: str, layers: Sequence[int]) -> list[Entry]:
    """A dense MLP."""
    return [
        Entry(f"{path}.{part}.kernel", f"{name}.{part}_proj.weight", transpose=True, layers=layers)
        for part in ("gate", "up", "down")
    ]


def expert_entries(path: str, name: str, layers: Sequence[int], experts: int) -> list[Entry]:
    """Router and routed experts."""
    entries = [Entry(f"{path}.router", f"{name}.gate.weight", transpose=True, layers=layers)]
    for part in ("gate", "up", "down"):
        tensor = f"{name}.experts.{{expert}}.{part}_proj.weight"
        entries.append(Entry(f"{path}.experts.{part}", tensor, transpose=True, layers=layers, experts=experts))
    return entries


def _attention(config: DsaConfig, path: str, layers: Sequence[int]) -> list[Entry]:
    name = f"{_LAYER}.self_attn"
    entries = [
        Entry(f"{path}.attention_norm.scale", f"{_LAYER}.input_layernorm.weight", layers=layers),
        Entry(f"{path}.attention.query_norm.scale", f"{name}.q_a_layernorm.weight", layers=layers),
        Entry(f"{path}.attention.latent_norm.scale", f"{name}.kv_a_layernorm.weight", layers=layers),
    ]
    for part, tensor in _ATTENTION.items():
        entries.append(
            Entry(f"{path}.attention.{part}.kernel", f"{name}.{tensor}.weight", transpose=True, layers=layers)
        )
    shape = (config.heads * (config.nope + config.value), config.latent)

    def by_head(tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(config.heads, config.nope + config.value, config.latent)

    up = f"{name}.kv_b_proj.weight"  # per head, keys then values
    for part, pick in (
        ("key_up", lambda tensor: by_head(tensor)[:, : config.nope]),
        ("value_up", lambda tensor: by_head(tensor)[:, config.nope :]),
    ):
        entries.append(Entry(f"{path}.attention.{part}", up, layers=layers, part=pick, tensor_shape=shape))
    return entries


def _indexer(path: str, layers: Sequence[int]) -> list[Entry]:
    name = f"{_LAYER}.self_attn.indexer"
    entries = [
        Entry(f"{path}.indexer.{part}.kernel", f"{name}.{tensor}.weight", transpose=True, layers=layers)
        for part, tensor in _INDEXER.items()
    ]
    for ours, theirs in (("scale", "weight"), ("bias", "bias")):
        entries.append(Entry(f"{path}.indexer.key_norm.{ours}", f"{name}.k_norm.{theirs}", layers=layers))
    return entries
