# SPDX-License-Identifier: Apache-2.0
"""Qwen3, Qwen3-MoE and their relatives from Hugging Face folders. Their Quest cases are in test_verify.py."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hisparse_jax.cache.layout import Layout
from hisparse_jax.errors import UserError
from hisparse_jax.selection import QuestRule
from models.config import GqaConfig
from models.registry import SUPPORTED, open_folder, read_config

RULE = QuestRule("shared", 5, 2, 8)
LLAMA = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 5e5, "tie_word_embeddings": False,
}  # fmt: skip
TOLERANCE = 2e-5  # stated with the reference: what two float32 implementations differ by


def write(folder, config, tensors=None):
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_caches_after_a_prompt(family, data):
    case = load_file(data / family / "case_mid.safetensors")
    opened = open_folder(data / family, rule=RULE)
    model, params, prompt = opened.model, opened.load(), case["input_ids"]
    sizes = Layout(residency="full", request_slots=1, context_tokens=64, hot_slots=5, ring_slots=2, page_records=8,
                   host_pages=1, **model.records(64)._asdict())  # fmt: skip
    tokens = jnp.asarray(np.pad(prompt, (0, 64 - len(prompt))))
    _, scratch = jax.jit(model.prefill)(params, tokens, jnp.int32(0), model.new_scratch(sizes, 64))
    assert opened.config.layers == 4
    for layer in range(opened.config.layers):
        pages = np.asarray(model.rows(scratch, layer, sizes)).view(np.float32)
        by_token = pages.reshape(64, 2, 2, 16)[: len(prompt)]  # token, key or value, KV head, channel
        for number, name in enumerate("kv"):
            want = np.moveaxis(case[f"cache.layer{layer}.{name}"], 0, 1)
            np.testing.assert_allclose(by_token[:, number], want, rtol=0, atol=TOLERANCE)


def test_one_row_is_projected_as_any_other(data):
    """Its keys and values are of two equal rows, whose matmul XLA leaves one."""
    opened = open_folder(data / "qwen3", rule=RULE)
    attention = opened.model.module(opened.load()).layers[0].attention
    x, position = jax.random.normal(jax.random.key(0), (3, 64)), jnp.arange(3)
    row = slice(1, 2)
    got = jax.jit(attention.project)(x[row], position[row])
    for one, several in zip(got, attention.project(x, position), strict=True):
        np.testing.assert_allclose(one, several[row], rtol=0, atol=TOLERANCE)
    text = jax.jit(attention.project).lower(x[row], position[row]).as_text()
    assert text.count("(tensor<2x64xf32>, tensor<64x32xf32>)") == 2 == text.count("x64xf32>, tensor<64x32xf32>)")


def test_qwen3_configs(data):
    dense, moe = (read_config(data / family) for family in ("qwen3", "qwen3_moe"))
    shared = {
        "vocab": 192, "hidden": 64, "layers": 4, "query_heads": 8, "kv_heads": 2, "head_dim": 16, "rope_theta": 1e6,
        "rope_pairing": "halves", "norm_eps": 1e-6, "max_tokens": 4096, "qk_norm": True,
    }  # fmt: skip
    assert dense == GqaConfig(**shared, mlp_width=128, tied_head=True)
    assert moe == GqaConfig(**shared, mlp_width=24, experts=8, experts_used=2, renormalise=True)


def test_relatives_differ_where_they_should(tmp_path):
    write(tmp_path, LLAMA)
    llama = read_config(tmp_path)
    assert (llama.head_dim, llama.qk_norm, llama.qkv_bias, llama.rope_theta) == (4, False, False, 5e5)
    write(tmp_path, LLAMA | {"model_type": "qwen2", "rope_theta": None, "rope_parameters": {"rope_theta": 1e6}})
    qwen2 = read_config(tmp_path)
    assert (qwen2.qk_norm, qwen2.qkv_bias, qwen2.rope_theta) == (False, True, 1e6)


def test_a_qwen2_checkpoint_with_biases_and_a_tied_head(tmp_path):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    tensors = {"model.embed_tokens.weight": normal(32, 16), "model.norm.weight": normal(16)}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()  # some files repeat a tied head
    for layer in range(2):
        name = f"model.layers.{layer}"
        for part, rows in (("q", 16), ("k", 8), ("v", 8)):
            tensors[f"{name}.self_attn.{part}_proj.weight"] = normal(rows, 16)
            tensors[f"{name}.self_attn.{part}_proj.bias"] = normal(rows)
        tensors[f"{name}.self_attn.o_proj.weight"] = normal(16, 16)
        tensors[f"{name}.self_attn.rotary_emb.inv_freq"] = normal(2)
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{part}.weight"] = normal(16)
        for part, shape in (("gate", (24, 16)), ("up", (24, 16)), ("down", (16, 24))):
            tensors[f"{name}.mlp.{part}_proj.weight"] = normal(*shape)
    write(tmp_path, LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True}, tensors)
    opened = open_folder(tmp_path, rule=RULE)
    module = opened.model.module(opened.load())
    bias = tensors["model.layers.1.self_attn.k_proj.bias"]
    assert np.array_equal(module.layers[1].attention.key.bias[...], bias)
    assert np.array_equal(module.layers[0].mlp.down.kernel[...], tensors["model.layers.0.mlp.down_proj.weight"].T)
    assert opened.note == "3 tensors that are no parameters are skipped"


@pytest.mark.parametrize(
    "change,message",
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope type must be default for llama, got 'llama3'"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window must be False"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers must be"),
        ({"model_type": "qwen3_moe"}, "moe_intermediate_size is missing: a qwen3_moe config must give it"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"model_type": "mamba"}, "model type 'mamba' is not supported yet; supported: " + ", ".join(SUPPORTED)),
    ],
)
def test_what_is_not_understood_is_said(tmp_path, change, message):
    write(tmp_path, LLAMA | change)
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


def test_settings_that_do_not_go_with_the_family(data, tmp_path):
    with pytest.raises(UserError, match=r"model\.records: fp8 is a format of DSA families"):
        open_folder(data / "qwen3", rule=RULE, records="fp8")
    with pytest.raises(UserError, match="decodes with quest, it has no indexer of its own"):
        open_folder(data / "qwen3")
    shutil.copytree(data / "qwen3_moe", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path, config | {"num_local_experts": 9})  # config and tensors disagree
    with pytest.raises(UserError, match=r"12 missing: model\.layers\.0\.mlp\.experts\.8\.gate_proj\.weight"):
        open_folder(tmp_path, rule=RULE).load()
