# SPDX-License-Identifier: Apache-2.0
"""Small GGUF files of every supported architecture, made from the tiny Qwen3 reference checkpoint."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

from models.params import GGUF, HUGGING_FACE

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDTH = 4, 8, 2, 16, 64, 128


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head reordered so that channels that rotated as halves rotate as neighbours."""
    return weight.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(path: Path, data: Path, family: str = "qwen3", **changes: object) -> Path:
    """A GGUF file of the reference checkpoint in the shape of a family."""
    tensors = load_file(data / "qwen3/model.safetensors")
    names = {}
    for part, name in HUGGING_FACE.items():
        for layer in range(LAYERS) if "{layer}" in name else [None]:
            names[name.format(layer=layer) + ".weight"] = GGUF[part].format(layer=layer) + ".weight"
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_context_length(4096)
    if changes.pop("scaled", False):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    for name, tensor in tensors.items():
        ours = names[name]
        if family != "qwen3" and "_norm.weight" in ours and ("attn_q" in ours or "attn_k" in ours):
            continue
        if ours in changes and changes[ours] is None:
            continue
        if family == "llama" and (".attn_q." in ours or ".attn_k." in ours):
            tensor = permuted(tensor, HEADS if ".attn_q." in ours else KV_HEADS)
        writer.add_tensor(ours, np.ascontiguousarray(changes.get(ours, tensor)))
    if family == "qwen2":
        rng = np.random.default_rng(0)
        for layer in range(LAYERS):
            for part, width in (("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
                bias = rng.standard_normal(width, np.float32) * changes.get("bias", 0.0)
                writer.add_tensor(f"blk.{layer}.attn_{part}.bias", bias.astype(np.float32))
    kinds = [gguf.TokenType.NORMAL] * 190 + [gguf.TokenType.CONTROL] * 2
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "qwen2"))
    writer.add_token_list([chr(33 + i) for i in range(94)] + ["ab"] + [f"token{i}" for i in range(95, 192)])
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(191)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
