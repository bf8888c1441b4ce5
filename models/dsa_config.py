# SPDX-License-Identifier: Apache-2.0
"""Shapes of DeepSeek-V3.2 and GLM-5 decoders, and how their published configs spell them. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hisparse_jax.errors import UserError
from models.config import RopePairing
from models.config_file import ConfigFile
from pallas_kernels.row_format import RecordType, RowFormat

MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")


@dataclass(frozen=True)
class Yarn:
    """Rotary frequencies stretched beyond the length the model was trained at (YaRN, arXiv:2309.00071).

    Attributes:
      factor: how many times longer.
      original_tokens: the length the model was trained at.
      beta_fast, beta_slow: turns over that length above which a channel stays as it is, and below which it is slowed.
      rotation_factor: multiplies sine and cosine.
      logit_factor: multiplies the softmax scale.
    """

    factor: float
    original_tokens: int
    beta_fast: float
    beta_slow: float
    rotation_factor: float
    logit_factor: float


class Sharing(NamedTuple):
    """One selection group: an anchor and the followers that take its selection.

    Attributes:
      first_layer: the anchor; the followers are the layers behind it.
      table: its table, the number of the group.
      dense: for each of its layers, whether the MLP is dense; the first is the anchor.
      hot_groups: for each of its layers, its index in the hot buffer of that position.
    """

    first_layer: int
    table: int
    dense: tuple[bool, ...]
    hot_groups: tuple[int, ...]


@dataclass(frozen=True)
class DsaConfig:
    """A decoder of DeepSeek-V3.2 or GLM-5 shape.

    Attributes:
      vocab: rows of the embedding.
      hidden: width of the residual stream.
      heads: query heads, N.
      query_latent: width of the query latent.
      latent: width of the key and value latent, C.
      nope: channels of a head's query that are not rotated.
      rope: channels that are, and of the one rotated key.
      value: channels of a head's value.
      index_heads: query heads of the indexer.
      index_dim: channels of the indexer, D; the first `rope` of them are rotated.
      selected: tokens that a query attends to, K.
      anchors: for each layer, whether it runs an indexer; the others take the selection of the anchor before them.
      dense: for each layer, whether its MLP is dense.
      mlp_width: inner width of a dense MLP.
      expert_width: inner width of an expert.
      experts: routed experts of a layer.
      experts_used: routed experts of a token.
      shared_experts: experts that every token uses.
      expert_groups: contiguous groups of experts, of which a token may use `expert_groups_used`.
      expert_groups_used: see there.
      routed_factor: multiplies the routed experts' sum.
      renormalise: weights of the chosen experts are scaled to a sum of one.
      norm_eps: epsilon of the RMS norms.
      latent_norm_eps: epsilon of the norms of the two latents and of the index key. Serving engines use `norm_eps` for
        the latents; the Hugging Face code uses 1e-6.
      rope_theta: base of the rotary frequencies.
      yarn: their scaling, or None.
      rope_pairing: which channels of query and key rotate together.
      index_pairing: the same for the indexer.
      max_tokens: longest context the model was made for.
      tied_head: the head is the embedding.
    """

    vocab: int
    hidden: int
    heads: int
    query_latent: int
    latent: int
    nope: int
    rope: int
    value: int
    index_heads: int
    index_dim: int
    selected: int
    anchors: tuple[bool, ...]
    dense: tuple[bool, ...]
    mlp_width: int
    expert_width: int
    experts: int
    experts_used: int
    shared_experts: int
    expert_groups: int
    expert_groups_used: int
    routed_factor: float
    renormalise: bool
    norm_eps: float
    rope_theta: float
    yarn: Yarn | None
    rope_pairing: RopePairing
    index_pairing: RopePairing
    max_tokens: int
    tied_head: bool = False
    latent_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if not self.anchors or not self.anchors[0] or len(self.anchors) != len(self.dense):
            raise ValueError(
                f"anchors and dense must name the same layers and the first must be an anchor, got {self.anchors} and "
                f"{self.dense}"
            )
        if self.index_dim < self.rope or self.rope % 2:
            raise ValueError(
                f"the indexer rotates as many channels as the attention, an even number: of its {self.index_dim} "
                f"it can't rotate {self.rope}"
            )
        groups, used = self.expert_groups, self.expert_groups_used
        if self.experts % groups or not 1 <= used <= groups or self.experts_used > self.experts // groups * used:
            raise ValueError(
                f"a token can't use {self.experts_used} of {self.experts} experts in {used} of {groups} groups"
            )

    @property
    def layers(self) -> int:
        return len(self.anchors)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Layers of each selection group: an anchor and its followers."""
        starts = [layer for layer, anchor in enumerate(self.anchors) if anchor]
        return tuple(end - start for start, end in zip(starts, [*starts[1:], self.layers], strict=True))

    @property
    def softmax_scale(self) -> float:
        return (self.nope + self.rope) ** -0.5 * (self.yarn.logit_factor if self.yarn else 1.0)

    def row_format(self, record: RecordType) -> RowFormat:
        """How a token's record is stored."""
        return RowFormat(self.latent, self.rope, record)

    def sharing(self) -> tuple[Sharing, ...]:
        """The selection groups in order."""
        filled, groups, layer = [0] * max(self.group_sizes), [], 0
        for table, size in enumerate(self.group_sizes):
            groups.append(Sharing(layer, table, self.dense[layer : layer + size], tuple(filled[:size])))
            filled[:size] = [count + 1 for count in filled[:size]]
            layer += size
        return tuple(groups)


def read_config(config: Mapping[str, Any], name: str = "config.json") -> DsaConfig:
    """A published `config.json`, in DeepSeek's or in GLM's spelling; `name` names it in errors.

    Raises:
      UserError: a key that is missing or of wrong type, values that contradict each other, or one that this code does
        not compute.
    """
    try:
        return _read(ConfigFile(config, name))
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error


def _read(file: ConfigFile) -> DsaConfig:
    layers = file.integer("num_hidden_layers")
    for key, wanted in (("hidden_act", "silu"), ("scoring_func", "sigmoid"), ("attention_bias", False),
                        ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):  # fmt: skip
        if file.values.get(key, wanted) != wanted:
            raise UserError(f"{file.wrong(key, repr(wanted))}: this is not supported yet")
    theta, yarn = _read_rope(file)
    is_glm = file.get("model_type") == "glm_moe_dsa"
    return DsaConfig(
        vocab=file.integer("vocab_size"),
        hidden=file.integer("hidden_size"),
        heads=file.integer("num_attention_heads"),
        query_latent=file.integer("q_lora_rank"),
        latent=file.integer("kv_lora_rank"),
        nope=file.integer("qk_nope_head_dim"),
        rope=file.integer("qk_rope_head_dim"),
        value=file.integer("v_head_dim"),
        index_heads=file.integer("index_n_heads"),
        index_dim=file.integer("index_head_dim"),
        selected=file.integer("index_topk"),
        anchors=_read_anchors(file, layers),
        dense=_read_dense(file, layers),
        mlp_width=file.integer("intermediate_size"),
        expert_width=file.integer("moe_intermediate_size"),
        experts=file.integer("n_routed_experts"),
        experts_used=file.integer("num_experts_per_tok"),
        shared_experts=file.integer("n_shared_experts", 0, least=0),
        expert_groups=file.integer("n_group", 1, least=0) or 1,
        expert_groups_used=file.integer("topk_group", 1, least=0) or 1,
        routed_factor=file.number("routed_scaling_factor", 1.0),
        renormalise=file.flag("norm_topk_prob", True),
        norm_eps=file.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        yarn=yarn,
        rope_pairing=_pairing(file.flag("rope_interleave", True)),
        index_pairing=_pairing(file.flag("indexer_rope_interleave", is_glm)),
        max_tokens=file.integer("max_position_embeddings"),
        tied_head=file.flag("tie_word_embeddings", False),
    )


def _pairing(interleaved: bool) -> RopePairing:
    return "pairs" if interleaved else "halves"


def _kinds(file: ConfigFile, key: str, layers: int, known: tuple[str, str]) -> tuple[bool, ...]:
    """For each layer whether its kind is the first of two; what is said of multi-token prediction is left out."""
    kinds = file.names(key)
    if len(kinds) < layers:
        raise UserError(f"{file.name}: {key} must name all {layers} layers, it names {len(kinds)}")
    odd = sorted(set(kinds[:layers]) - set(known))
    if odd:
        raise UserError(f"{file.name}: {key} may hold {' and '.join(known)}, it holds {', '.join(odd)}")
    return tuple(kind == known[0] for kind in kinds[:layers])


def _read_anchors(file: ConfigFile, layers: int) -> tuple[bool, ...]:
    """Which layers run the indexer: from `indexer_types`, `index_topk_pattern`, or a frequency with an offset."""
    key = file.first("indexer_types", "index_topk_pattern", "index_topk_freq")
    if key == "indexer_types":
        anchors = _kinds(file, key, layers, ("full", "shared"))
    elif key == "index_topk_pattern":
        anchors = _kinds(file, key, layers, ("F", "S"))
    else:
        every, offset = file.integer(key, 1, least=0) or 1, file.integer("index_skip_topk_offset", 2, least=None)
        anchors = tuple(max(layer - offset + 1, 0) % every == 0 for layer in range(layers))
    if not anchors[0]:
        raise UserError(f"{file.name}: {key} makes layer 0 take the selection of a layer before it; it must be full")
    return anchors


def _read_dense(file: ConfigFile, layers: int) -> tuple[bool, ...]:
    if file.get("mlp_layer_types") is not None:
        return _kinds(file, "mlp_layer_types", layers, ("dense", "sparse"))
    first = file.integer("first_k_dense_replace", least=0)
    return tuple(layer < first for layer in range(layers))


def _read_rope(file: ConfigFile) -> tuple[float, Yarn | None]:
    """Base and scaling: from `rope_parameters`, or from `rope_theta` with `rope_scaling`."""
    rope = file.rope()
    where = file if rope.get("rope_theta") is None else rope
    if where.get("rope_theta") is None:
        raise UserError(f"{file.name}: rope_theta is missing, both at the top and in rope_parameters")
    theta, kind = float(where.number("rope_theta")), rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise UserError(f"{file.name}: rope type must be default or yarn, got {kind!r}: this is not supported yet")
    factor = rope.number("factor")

    def stretch(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    wide, all_dim = rope.number("mscale", 0), rope.number("mscale_all_dim", 0)
    rotation = stretch(wide) / stretch(all_dim) if wide and all_dim else stretch(1)
    original = "original_max_position_embeddings"
    return theta, Yarn(
        factor=factor,
        original_tokens=rope.integer(original, 0, least=0) or file.integer("max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32) or 32,
        beta_slow=rope.number("beta_slow", 1) or 1,
        rotation_factor=rotation,
        logit_factor=stretch(all_dim) ** 2 if all_dim else 1.0,
    )
