# SPDX-License-Identifier: Apache-2.0
"""Shares of decoders over Quest pages: some layers of a model that one rank has all of."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hisparse_jax.errors import UserError
from hisparse_jax.selection import QuestRule
from models.config import GqaConfig
from models.decoder import QuestDecoder
from models.share import rank_parameters, rank_share
from models.sizes import PUBLISHED, PUBLISHED_DSA, PUBLISHED_GQA, gqa_parameters, parameters, published

QWEN = PUBLISHED_GQA["Qwen3-8B"]
SMALL = GqaConfig(
    vocab=64, hidden=32, layers=3, query_heads=4, kv_heads=2, head_dim=16, mlp_width=48, rope_theta=1e6,
    rope_pairing="halves", norm_eps=1e-6, max_tokens=4096,
)  # fmt: skip


def of_module(config: GqaConfig) -> int:
    """Parameters that the decoder really has."""
    rule = QuestRule("shared", 4, 2)
    module = nnx.eval_shape(lambda: QuestDecoder(config, rule, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(nnx.state(module)))


def test_qwen3_8b_by_hand():
    """36 layers of 32 query and 8 KV heads of 128 channels with their norms, an MLP, and a head of its own."""
    attention = 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 4096 + 2 * 128
    layer = attention + 3 * 4096 * 12288 + 2 * 4096
    assert parameters(QWEN) == gqa_parameters(QWEN) == 36 * layer + 2 * 151936 * 4096 + 4096 == 8_190_735_360
    assert of_module(QWEN) == 8_190_735_360


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_head": True}, {"qkv_bias": True}, {"qk_norm": True}, {"experts": 8, "experts_used": 2}],
)
def test_parameters_are_those_of_the_module(changes):
    config = dataclasses.replace(SMALL, **changes)
    assert gqa_parameters(config) == of_module(config)


def test_a_share_is_some_layers():
    share = rank_share(QWEN, 1, 4, 8)
    assert share == dataclasses.replace(QWEN, layers=8)
    assert share.group_sizes == (1,) * 8
    assert rank_share(QWEN, 1, 30).layers == 6 and rank_share(QWEN, 1) == QWEN
    assert rank_parameters(QWEN, 1) == gqa_parameters(QWEN)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((2,), "a decoder over Quest pages is not divided; expected 1 rank, got 2"),
        ((1, 30, 8), r"layers 30\.\.37 are not all among the model's 36"),
        ((1, -1, 2), "are not all among"),
        ((1, 36), "are not all among"),
        ((1, 2, 0), "are not all among"),
    ],
)
def test_what_can_not_be_had(arguments, says):
    with pytest.raises(ValueError, match=says):
        rank_share(QWEN, *arguments)


def test_published_by_name():
    assert published("Qwen3-8B") is QWEN and published("GLM-5.2") is PUBLISHED_DSA["GLM-5.2"]
    assert {**PUBLISHED_DSA, **PUBLISHED_GQA} == PUBLISHED
    with pytest.raises(UserError, match=r"'Qwen4' is not known; known: DeepSeek-V3\.2, .*, Qwen3-8B"):
        published("Qwen4")
