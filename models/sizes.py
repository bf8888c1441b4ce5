# SPDX-License-Identifier: Apache-2.0
"""What planning needs to know of a model, from its config, and the shapes of published models. Imports no JAX."""

from __future__ import annotations

from dataclasses import replace

from hisparse_jax.errors import UserError
from hisparse_jax.planner import Sizes
from models.config import GqaConfig
from models.dsa_config import DsaConfig, Yarn
from pallas_kernels.row_format import RecordType, index_key_bytes

Shape = DsaConfig | GqaConfig


def parameters(shape: Shape) -> int:
    """How many parameters a decoder has."""
    return dsa_parameters(shape) if isinstance(shape, DsaConfig) else gqa_parameters(shape)


def dsa_parameters(config: DsaConfig) -> int:
    """How many parameters a DSA decoder has."""
    heads, hidden = config.heads, config.hidden
    attention = (
        hidden * (config.query_latent + config.latent + config.rope)
        + config.query_latent * heads * (config.nope + config.rope)
        + heads * (config.nope + config.value) * config.latent
        + heads * config.value * hidden
        + config.query_latent + config.latent  # the latent norms
    )  # fmt: skip
    indexer = (
        config.query_latent * config.index_heads * config.index_dim
        + hidden * (config.index_dim + config.index_heads)
        + 2 * config.index_dim
    )  # fmt: skip
    expert = 3 * hidden * config.expert_width
    sparse = (config.experts + config.shared_experts) * expert + hidden * config.experts + config.experts
    total = config.vocab * hidden * (1 if config.tied_head else 2) + hidden
    for anchor, dense in zip(config.anchors, config.dense, strict=True):
        total += attention + 2 * hidden + (indexer if anchor else 0)
        total += 3 * hidden * config.mlp_width if dense else sparse
    return total


def gqa_parameters(config: GqaConfig) -> int:
    """How many parameters a decoder over Quest pages has."""
    hidden, queries, keys = config.hidden, config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    attention = 2 * hidden * queries + 2 * hidden * keys
    attention += queries + 2 * keys if config.qkv_bias else 0
    attention += 2 * config.head_dim if config.qk_norm else 0
    mlp = 3 * hidden * config.mlp_width
    if config.experts:
        mlp = config.experts * (mlp + hidden)  # an expert and its row of the router
    embedding = config.vocab * hidden * (1 if config.tied_head else 2)
    return embedding + hidden + config.layers * (attention + mlp + 2 * hidden)


def dsa_sizes(
    name: str, config: DsaConfig, *, record: RecordType, index_keys: RecordType, parameter_bytes: int
) -> Sizes:
    """Sizes of a DSA decoder with these types of records and index keys."""
    with_scale, scale = index_key_bytes(config.index_dim, index_keys), 4 if index_keys == "fp8" else 0
    return Sizes(
        name=name,
        group_sizes=config.group_sizes,
        record_tokens=1,
        row_bytes=config.row_format(record).row_bytes,
        selected=config.selected,
        index_key_bytes=with_scale - scale,
        index_scale_bytes=scale,
        parameter_bytes=parameter_bytes,
        max_tokens=config.max_tokens,
    )


def gqa_sizes(
    name: str, config: GqaConfig, *, page_tokens: int, selected: int, itemsize: int, parameter_bytes: int
) -> Sizes:
    """Sizes of a decoder over Quest pages, of which `selected` are resolved."""
    token = config.token_bytes(itemsize)
    return Sizes(
        name=name,
        group_sizes=config.group_sizes,
        record_tokens=page_tokens,
        row_bytes=page_tokens * token,
        selected=selected,
        index_key_bytes=token,  # two bounds of the keys take what one token's key and value do
        index_scale_bytes=0,
        parameter_bytes=parameter_bytes,
        max_tokens=config.max_tokens,
    )


def _glm(layers: int) -> DsaConfig:
    return DsaConfig(
        vocab=154880, hidden=6144, heads=64, query_latent=2048, latent=512, nope=192, rope=64, value=256,
        index_heads=32, index_dim=128, selected=2048, anchors=(True,) * layers,
        dense=tuple(layer < 3 for layer in range(layers)), mlp_width=12288, expert_width=2048, experts=256,
        experts_used=8, shared_experts=1, expert_groups=1, expert_groups_used=1, routed_factor=2.5, renormalise=True,
        norm_eps=1e-5, rope_theta=1e6, yarn=None, rope_pairing="pairs", index_pairing="pairs", max_tokens=202752,
    )  # fmt: skip


_GLM_51 = _glm(78)

# Shapes as published; the config files themselves are not needed to plan.
PUBLISHED_DSA: dict[str, DsaConfig] = {
    "DeepSeek-V3.2": DsaConfig(
        vocab=129280, hidden=7168, heads=128, query_latent=1536, latent=512, nope=128, rope=64, value=128,
        index_heads=64, index_dim=128, selected=2048, anchors=(True,) * 61,
        dense=tuple(layer < 3 for layer in range(61)), mlp_width=18432, expert_width=2048, experts=256,
        experts_used=8, shared_experts=1, expert_groups=8, expert_groups_used=4, routed_factor=2.5, renormalise=True,
        norm_eps=1e-6, rope_theta=1e4, yarn=Yarn(40, 4096, 32, 1, 1.0, (0.1 * 3.6888794541139363 + 1) ** 2),
        rope_pairing="pairs", index_pairing="halves", max_tokens=163840,
    ),
    "GLM-5.1": _GLM_51,
    "GLM-5.2": replace(
        _GLM_51, anchors=tuple(max(layer - 2, 0) % 4 == 0 for layer in range(78)), rope_theta=8e6, max_tokens=1048576,
    ),
}  # fmt: skip
PUBLISHED_GQA: dict[str, GqaConfig] = {
    "Qwen3-8B": GqaConfig(  # its 131,072 tokens take YaRN, which is not computed here
        vocab=151936, hidden=4096, layers=36, query_heads=32, kv_heads=8, head_dim=128, mlp_width=12288,
        rope_theta=1e6, rope_pairing="halves", norm_eps=1e-6, max_tokens=40960, qk_norm=True,
    ),
}  # fmt: skip
PUBLISHED: dict[str, Shape] = {**PUBLISHED_DSA, **PUBLISHED_GQA}


def published(name: str) -> Shape:
    """A published shape.

    Raises:
      UserError: none of this name is known.
    """
    if name not in PUBLISHED:
        raise UserError(f"model.published: {name!r} is not known; known: {', '.join(PUBLISHED)}")
    return PUBLISHED[name]
