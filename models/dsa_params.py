# SPDX-License-Identifier: Apache-2.0
"""Name map of DeepSeek-V3.2 and GLM-5 checkpoints, and of expert layers: which tensors make up which parameter."""

from __future__ import annotations

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


def dsa_entries(config: DsaConfig) -> list[Entry]:
    """The name map of a decoder, one entry for each parameter."""
    entries = [
        Entry("embed.embedding", "model.embed_tokens.weight"),
        Entry("norm.scale", "model.norm.weight"),
    ]
    if not config.tied_head:
        entries.append(Entry("head.kernel", "lm_head.weight", transpose=True))
    for group in config.sharing():
        for position, dense in enumerate(group.dense):
            layer = group.first_layer + position
            path, name = f"groups.{group.table}.layers.{position}", f"model.layers.{layer}"
            entries += _attention(config, path, name)
            if position == 0:
                entries += _indexer(path, name)
            entries.append(Entry(f"{path}.mlp_norm.scale", f"{name}.post_attention_layernorm.weight"))
            mlp = f"{name}.mlp"
            if dense:
                entries += mlp_entries(f"{path}.mlp", mlp)
                continue
            entries += expert_entries(f"{path}.mlp", mlp, config.experts)
            entries.append(Entry(f"{path}.mlp.router_bias", f"{mlp}.gate.e_score_correction_bias"))
            if config.shared_experts:
                entries += mlp_entries(f"{path}.mlp.shared", f"{mlp}.shared_experts")
    return entries


def ignored(config: DsaConfig) -> str:
    """Regular expression of the tensors of multi-token prediction, which lie behind the last layer."""
    digits = [rf"(?!(?:{'|'.join(str(n) for n in range(config.layers))})\.)\d+"]
    return rf"model\.layers\.{digits[0]}\..*"


def mlp_entries(path: str, name: str) -> list[Entry]:
    """A dense MLP."""
    return [
        Entry(f"{path}.{part}.kernel", f"{name}.{part}_proj.weight", transpose=True) for part in ("gate", "up", "down")
    ]


def expert_entries(path: str, name: str, experts: int) -> list[Entry]:
    """Router and routed experts."""
    entries = [Entry(f"{path}.router", f"{name}.gate.weight", transpose=True)]
    for part in ("gate", "up", "down"):
        tensor = f"{name}.experts.{{expert}}.{part}_proj.weight"
        entries.append(Entry(f"{path}.experts.{part}", tensor, transpose=True, experts=experts))
    return entries


def _attention(config: DsaConfig, path: str, layer: str) -> list[Entry]:
    name = f"{layer}.self_attn"
    entries = [
        Entry(f"{path}.attention_norm.scale", f"{layer}.input_layernorm.weight"),
        Entry(f"{path}.attention.query_norm.scale", f"{name}.q_a_layernorm.weight"),
        Entry(f"{path}.attention.latent_norm.scale", f"{name}.kv_a_layernorm.weight"),
    ]
    for part, tensor in _ATTENTION.items():
        entries.append(Entry(f"{path}.attention.{part}.kernel", f"{name}.{tensor}.weight", transpose=True))
    shape = (config.heads * (config.nope + config.value), config.latent)

    def by_head(tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(config.heads, config.nope + config.value, config.latent)

    up = f"{name}.kv_b_proj.weight"  # per head, keys then values
    for part, pick in (
        ("key_up", lambda tensor: by_head(tensor)[:, : config.nope]),
        ("value_up", lambda tensor: by_head(tensor)[:, config.nope :]),
    ):
        entries.append(Entry(f"{path}.attention.{part}", up, part=pick, tensor_shape=shape))
    return entries


def _indexer(path: str, layer: str) -> list[Entry]:
    name = f"{layer}.self_attn.indexer"
    entries = [
        Entry(f"{path}.indexer.{part}.kernel", f"{name}.{tensor}.weight", transpose=True)
        for part, tensor in _INDEXER.items()
    ]
    for ours, theirs in (("scale", "weight"), ("bias", "bias")):
        entries.append(Entry(f"{path}.indexer.key_norm.{ours}", f"{name}.k_norm.{theirs}"))
    return entries
