# SPDX-License-Identifier: Apache-2.0
"""Name maps of the GQA decoders: which tensors of a checkpoint make up which parameter."""

from __future__ import annotations

from collections.abc import Mapping

from hisparse_jax.checkpoint.load import Entry
from models.config import GqaConfig

# The parts of a decoder as the two file formats call them; weights are `<name>.weight`, biases `<name>.bias`.
HUGGING_FACE = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers.attention_norm": "model.layers.{layer}.input_layernorm",
    "layers.attention.query": "model.layers.{layer}.self_attn.q_proj",
    "layers.attention.key": "model.layers.{layer}.self_attn.k_proj",
    "layers.attention.value": "model.layers.{layer}.self_attn.v_proj",
    "layers.attention.out": "model.layers.{layer}.self_attn.o_proj",
    "layers.attention.query_norm": "model.layers.{layer}.self_attn.q_norm",
    "layers.attention.key_norm": "model.layers.{layer}.self_attn.k_norm",
    "layers.mlp_norm": "model.layers.{layer}.post_attention_layernorm",
    "layers.mlp.gate": "model.layers.{layer}.mlp.gate_proj",
    "layers.mlp.up": "model.layers.{layer}.mlp.up_proj",
    "layers.mlp.down": "model.layers.{layer}.mlp.down_proj",
}
GGUF = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "layers.attention_norm": "blk.{layer}.attn_norm",
    "layers.attention.query": "blk.{layer}.attn_q",
    "layers.attention.key": "blk.{layer}.attn_k",
    "layers.attention.value": "blk.{layer}.attn_v",
    "layers.attention.out": "blk.{layer}.attn_output",
    "layers.attention.query_norm": "blk.{layer}.attn_q_norm",
    "layers.attention.key_norm": "blk.{layer}.attn_k_norm",
    "layers.mlp_norm": "blk.{layer}.ffn_norm",
    "layers.mlp.gate": "blk.{layer}.ffn_gate",
    "layers.mlp.up": "blk.{layer}.ffn_up",
    "layers.mlp.down": "blk.{layer}.ffn_down",
}


def gqa_entries(config: GqaConfig, names: Mapping[str, str]) -> list[Entry]:
    """The name map of a decoder, less its expert layers if it has any.

    Args:
      config: shapes; says which parameters there are.
      names: `HUGGING_FACE` or `GGUF`.
    """

    def entry(path: str, part: str, parameter: str, suffix: str = "weight", layer: int | None = None) -> Entry:
        name = names[part].format(layer=layer)
        return Entry(f"{path}.{parameter}", f"{name}.{suffix}", transpose=parameter == "kernel")

    entries = [entry("embed", "embed", "embedding"), entry("norm", "norm", "scale")]
    if not config.tied_head:
        entries.append(entry("head", "head", "kernel"))
    projections = ["query", "key", "value", "out"]
    for layer in range(config.layers):

        def in_layer(part: str, parameter: str, suffix: str = "weight", layer: int = layer) -> Entry:
            return entry(f"layers.{layer}.{part}", f"layers.{part}", parameter, suffix, layer)

        entries += [in_layer(norm, "scale") for norm in ("attention_norm", "mlp_norm")]
        entries += [in_layer(f"attention.{part}", "kernel") for part in projections]
        if not config.experts:
            entries += [in_layer(f"mlp.{part}", "kernel") for part in ("gate", "up", "down")]
        if config.qkv_bias:
            entries += [in_layer(f"attention.{part}", "bias", "bias") for part in projections[:3]]
        if config.qk_norm:
            entries += [in_layer(f"attention.{part}_norm", "scale") for part in ("query", "key")]
    return entries
