# SPDX-License-Identifier: Apache-2.0
"""Published configs in all their spellings."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import numpy as np
import pytest

from hisparse_jax.errors import UserError
from models import registry
from models.dsa_config import Sharing, read_config
from models.mla import rope_frequencies
from models.sizes import PUBLISHED

GLM_52 = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": 78, "hidden_size": 6144, "num_attention_heads": 64,
    "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "head_dim": 192, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_topk_freq": 4,
    "index_skip_topk_offset": 3, "first_k_dense_replace": 3, "intermediate_size": 12288, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "vocab_size": 154880, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}, "max_position_embeddings": 1048576,
}  # fmt: skip
DEEPSEEK_V32 = GLM_52 | {
    "model_type": "deepseek_v32", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "index_n_heads": 64, "intermediate_size": 18432,
    "n_group": 8, "topk_group": 4, "vocab_size": 129280, "rms_norm_eps": 1e-6, "rope_parameters": None,
    "rope_theta": 10000, "max_position_embeddings": 163840, "index_topk_freq": None, "index_skip_topk_offset": None,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip


def test_published_shapes_are_what_their_configs_say():
    assert read_config(GLM_52) == PUBLISHED["GLM-5.2"]
    got, want = (asdict(config) for config in (read_config(DEEPSEEK_V32), PUBLISHED["DeepSeek-V3.2"]))
    assert got["yarn"].pop("logit_factor") == pytest.approx(want["yarn"].pop("logit_factor"), rel=1e-15)
    assert got == want
    glm51 = GLM_52 | {"index_topk_freq": None, "index_skip_topk_offset": None, "max_position_embeddings": 202752}
    glm51["rope_parameters"] = {"rope_theta": 1000000, "rope_type": "default"}
    assert read_config(glm51) == PUBLISHED["GLM-5.1"]


def test_softmax_scales():
    assert round(PUBLISHED["DeepSeek-V3.2"].softmax_scale, 5) == 0.13523
    assert PUBLISHED["GLM-5.2"].softmax_scale == 0.0625


@pytest.mark.parametrize("spelling", ["types", "types_with_mtp", "pattern", "frequency"])
def test_three_spellings_of_the_sharing_pattern(spelling):
    full = [0, 1, *range(2, 78, 4)]
    kinds = ["full" if layer in full else "shared" for layer in range(78)]
    config = {key: entry for key, entry in GLM_52.items() if not key.startswith("index_topk_f")}
    if spelling == "frequency":
        config |= {"index_topk_freq": 4, "index_skip_topk_offset": 3, "index_topk_pattern": None}
    elif spelling == "pattern":
        config |= {"index_topk_pattern": "".join("F" if layer in full else "S" for layer in range(78))}
    else:  # it comes before the others
        config |= {"indexer_types": kinds + ["full"] * (spelling == "types_with_mtp"), "index_topk_pattern": "F" * 78}
    got = read_config(config)
    assert [layer for layer, anchor in enumerate(got.anchors) if anchor] == full
    assert got.group_sizes == (1, 1) + (4,) * 19


def test_without_a_pattern_every_layer_selects():
    config = {key: entry for key, entry in GLM_52.items() if not key.startswith(("index_topk_", "index_skip"))}
    assert read_config(config).group_sizes == (1,) * 78


def test_sharing_of_the_published_pattern():
    groups = PUBLISHED["GLM-5.2"].sharing()
    assert len(groups) == 21
    assert groups[:4] == (
        Sharing(0, 0, (True,), (0,)),
        Sharing(1, 1, (True,), (1,)),
        Sharing(2, 2, (True, False, False, False), (2, 0, 0, 0)),
        Sharing(6, 3, (False,) * 4, (3, 1, 1, 1)),
    )
    assert groups[-1] == Sharing(74, 20, (False,) * 4, (20, 18, 18, 18))
    groups = PUBLISHED["DeepSeek-V3.2"].sharing()
    assert groups == tuple(Sharing(layer, layer, (layer < 3,), (layer,)) for layer in range(61))


def test_dense_layers_in_both_spellings():
    kinds = ["dense", "sparse"] * 39
    assert read_config(GLM_52 | {"mlp_layer_types": kinds}).dense == (True, False) * 39
    assert read_config(GLM_52).dense == (True,) * 3 + (False,) * 75


def test_rope_pairings():
    glm, v32 = read_config(GLM_52), read_config(DEEPSEEK_V32)
    assert (glm.rope_pairing, glm.index_pairing) == ("pairs", "pairs")
    assert (v32.rope_pairing, v32.index_pairing) == ("pairs", "halves")
    other = read_config(GLM_52 | {"rope_interleave": False, "indexer_rope_interleave": False})
    assert (other.rope_pairing, other.index_pairing) == ("halves", "halves")


def test_yarn_frequencies():
    config = PUBLISHED["DeepSeek-V3.2"]
    plain = np.array(rope_frequencies(replace(config, yarn=None)))
    np.testing.assert_allclose(plain, 10000.0 ** (-np.arange(32) / 32), rtol=1e-12)
    # corr(32) = 10.47 and corr(1) = 22.5: channels up to 10 stay, from 23 on they turn 40 times slower.
    ratio = np.array(rope_frequencies(config)) / plain
    assert np.allclose(ratio[:11], 1) and np.allclose(ratio[23:], 1 / 40)
    np.testing.assert_allclose(ratio[11:23], 1 - (np.arange(11, 23) - 10) / 13 * (1 - 1 / 40), rtol=1e-12)
    assert config.yarn.rotation_factor == 1.0


def test_yarn_without_mscale_multiplies_sine_and_cosine():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = read_config(DEEPSEEK_V32 | {"rope_scaling": scaling})
    assert config.yarn.rotation_factor == pytest.approx(0.1 * np.log(4) + 1)
    assert config.softmax_scale == 192**-0.5
    assert (config.yarn.beta_fast, config.yarn.beta_slow) == (32, 1)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is missing: a glm_moe_dsa config must give it"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1}}, "must be default or yarn, got 'llama3'"),
        ({"indexer_types": ["full"] * 5}, "must name all 78 layers, it names 5"),
        ({"indexer_types": ["shared"] * 78}, "it must be full"),
        ({"indexer_types": ["full", "half"] * 39}, "may hold full and shared, it holds half"),
        ({"index_topk_pattern": "FX" * 39}, "may hold F and S, it holds X"),
        ({"mlp_layer_types": ["wide"] * 78}, "may hold dense and sparse, it holds wide"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', got 'softmax'"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"index_head_dim": 32}, "of its 32 it can't rotate 64"),
        ({"n_group": 7}, "can't use 8 of 256 experts in 1 of 7 groups"),
        ({"num_experts_per_tok": 40, "n_group": 8}, "can't use 40 of 256 experts in 1 of 8 groups"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank must be a whole number of at least 1, got '512'"),
        ({"kv_lora_rank": 512.0}, r"kv_lora_rank must be a whole number of at least 1, got 512\.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number of at least 1, got True"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a whole number of at least 1, got -1"),
        ({"n_group": "1"}, "n_group must be a whole number of at least 0, got '1'"),
        ({"n_shared_experts": [1]}, r"n_shared_experts must be a whole number of at least 0, got \[1\]"),
        ({"index_topk_freq": "4"}, "index_topk_freq must be a whole number of at least 0, got '4'"),
        ({"index_skip_topk_offset": 2.5}, r"index_skip_topk_offset must be a whole number, got 2\.5"),
        ({"first_k_dense_replace": "3"}, "first_k_dense_replace must be a whole number of at least 0, got '3'"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a finite number, got '1e-5'"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor must be a finite number, got nan"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false, got 'yes'"),
        ({"indexer_types": 4}, "indexer_types must be a list of names, got 4"),
        ({"indexer_types": [["full"]] * 78}, "indexer_types must be a list of names, got"),
        ({"mlp_layer_types": 3}, "mlp_layer_types must be a list of names, got 3"),
        ({"rope_parameters": "default"}, "rope_parameters must be a mapping, got 'default'"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, r"rope_parameters\.rope_theta must be a finite number, got '1e6'"),
        (
            {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": "40"}},
            r"rope_scaling\.factor must be a finite number, got '40'",
        ),
    ],
)
def test_what_is_not_understood_is_said(change, message):
    with pytest.raises(UserError, match=message):
        read_config(GLM_52 | change)


@pytest.mark.parametrize(
    "family,change,message",
    [
        ("qwen3", {"num_key_value_heads": "2"}, "num_key_value_heads must be a whole number of at least 1, got '2'"),
        ("qwen3", {"head_dim": [16]}, r"head_dim must be a whole number of at least 1, got \[16\]"),
        ("qwen3", {"num_attention_heads": 0}, "num_attention_heads must be a whole number of at least 1, got 0"),
        ("qwen3", {"rope_parameters": {"rope_theta": None}, "rope_theta": "x"}, "rope_theta must be a finite number"),
        ("qwen3", {"rope_scaling": ["yarn"]}, r"rope_scaling must be a mapping, got \['yarn'\]"),
        ("qwen3", {"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ("qwen3_moe", {"num_experts": 8.5}, r"num_experts must be a whole number of at least 1, got 8\.5"),
        ("glm5", {"v_head_dim": None}, "v_head_dim is missing: a glm_moe_dsa config must give it"),
        ("glm5", {"v_head_dim": "16"}, "v_head_dim must be a whole number of at least 1, got '16'"),
    ],
)
def test_values_of_wrong_type_in_a_folder(family, change, message, data, tmp_path):
    config = json.loads((data / family / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=rf"^{re.escape(str(tmp_path))}/config\.json: {message}"):
        registry.read_config(tmp_path)


@pytest.mark.parametrize("folder", ["deepseek_v32", "glm5", "glm52_indexshare"])
def test_norm_settings_of_the_reference_folders(folder, data):
    config = read_config(json.loads((data / folder / "config.json").read_text()))
    assert config.latent_norm_eps == 1e-6
    assert config.norm_eps == (1e-6 if folder == "deepseek_v32" else 1e-5)
