# SPDX-License-Identifier: Apache-2.0
"""One rank's share of published models: what is divided, what is whole, and how many parameters that makes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.dsa import DsaDecoder, DsaOptions
from models.share import rank_parameters, rank_share, tables_before
from models.sizes import PUBLISHED, dsa_parameters

GLM, V32 = PUBLISHED["GLM-5.2"], PUBLISHED["DeepSeek-V3.2"]


def glm52_by_hand(ranks: int) -> int:
    """Parameters of one rank, from the published widths: 78 layers, 21 indexers, 3 dense MLPs, 75 of experts."""
    query = 6144 * 2048 + 2048 + 2048 * 64 * (192 + 64)
    key_value = 6144 * (512 + 64) + 512 + 512 * 64 * (192 + 256)
    attention = query + key_value + 64 * 256 * 6144
    indexer = 2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32
    dense, expert = 3 * 6144 * 12288, 3 * 6144 * 2048
    router = (6144 + 1) * (256 // ranks)
    layers = 78 * (attention + 2 * 6144) + 21 * indexer + 3 * dense + 75 * ((256 // ranks + 1) * expert + router)
    return layers + 2 * (154880 // ranks) * 6144 + 6144


def v32_by_hand(ranks: int) -> int:
    """The same for DeepSeek-V3.2: 61 layers, all with an indexer, 3 dense MLPs, 58 of experts."""
    query = 7168 * 1536 + 1536 + 1536 * 128 * (128 + 64)
    key_value = 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    attention = query + key_value + 128 * 128 * 7168
    indexer = 1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64
    dense, expert = 3 * 7168 * 18432, 3 * 7168 * 2048
    router = (7168 + 1) * (256 // ranks)
    layers = 61 * (attention + indexer + 2 * 7168) + 3 * dense + 58 * ((256 // ranks + 1) * expert + router)
    return layers + 2 * (129280 // ranks) * 7168 + 7168


@pytest.mark.parametrize("ranks", [1, 8, 16, 32])
def test_parameters_of_a_rank(ranks):
    assert rank_parameters(GLM, ranks) == glm52_by_hand(ranks)
    assert rank_parameters(V32, ranks) == v32_by_hand(ranks)


def test_one_rank_has_the_whole_model():
    assert rank_parameters(GLM, 1) == dsa_parameters(GLM)
    assert rank_share(GLM, 1) == GLM
    one = dataclasses.replace(V32, expert_groups=1, expert_groups_used=1)  # which only limits the choice
    assert rank_share(V32, 1) == one


def test_what_is_divided_and_what_is_not():
    share = rank_share(GLM, 8, 6, 8)
    assert (share.vocab, share.experts, share.experts_used) == (19360, 32, 8)
    assert share.anchors == (True, False, False, False) * 2 and share.group_sizes == (4, 4)
    assert share.dense == (False,) * 8
    divided = {"vocab", "experts", "expert_groups", "expert_groups_used", "anchors", "dense"}
    for field in dataclasses.fields(GLM):
        if field.name not in divided:
            assert getattr(share, field.name) == getattr(GLM, field.name), field.name
    share = rank_share(V32, 8)
    assert (share.expert_groups, share.expert_groups_used, share.layers) == (1, 1, 61)


def test_all_layers_from_the_first_on():
    assert rank_share(GLM, 8, 70).anchors == (True, False, False, False) * 2
    assert rank_share(GLM, 8, 2, 4).dense == (True, False, False, False)
    assert rank_share(GLM, 8, 77 - 3, 2).anchors == (True, False)  # a group may be cut short


def test_a_vocabulary_that_does_not_divide_is_rounded_up():
    assert rank_share(dataclasses.replace(GLM, vocab=154881), 8).vocab == 19361


def test_tables_before_a_layer():
    """Layers 0 and 1 stand alone, then come groups of four; DeepSeek-V3.2 has a table for each layer."""
    assert [tables_before(GLM, layer) for layer in (0, 1, 2, 6, 34, 74)] == [0, 1, 2, 3, 10, 20]
    assert tables_before(V32, 3) == 3


def test_parameters_are_those_of_the_module():
    share = rank_share(GLM, 8, 6, 8)
    options = DsaOptions("bfloat16", "fp8")
    module = nnx.eval_shape(lambda: DsaDecoder(share, options, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(nnx.state(module))) == dsa_parameters(share)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((8, 7, 4), "layer 7 takes the selection of a layer before it; begin with an anchor"),
        ((8, 74, 5), r"layers 74\.\.78 are not all among the model's 78"),
        ((8, 78, 1), r"layers 78\.\.78 are not all among"),
        ((8, 90), "are not all among"),
        ((8, -4, 4), "are not all among"),
        ((8, 2, 0), "are not all among"),
        ((7,), "256 experts, of which a token uses 8, do not go into 7 ranks"),
        ((64,), "256 experts, of which a token uses 8, do not go into 64 ranks"),  # 4 each: fewer than a token uses
    ],
)
def test_what_can_not_be_had(arguments, says):
    with pytest.raises(ValueError, match=says):
        rank_share(GLM, *arguments)
