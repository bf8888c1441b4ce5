# SPDX-License-Identifier: Apache-2.0
"""Shapes of the decoder families. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopePairing = Literal["pairs", "halves"]


@dataclass(frozen=True)
class GqaConfig:
    """A decoder of Llama, Qwen2, Qwen3 or Qwen3-MoE shape.

    Attributes:
      vocab: rows of the embedding.
      hidden: width of the residual stream.
      layers: decoder layers.
      query_heads: query heads; head j reads KV head `j // (query_heads / kv_heads)`.
      kv_heads: key and value heads, G.
      head_dim: channels of a head, C.
      mlp_width: inner width of the MLP, of each expert where there are experts.
      rope_theta: base of the rotary frequencies.
      rope_pairing: which channels rotate together: neighbours ("pairs") or `j` and `j + C/2` ("halves").
      norm_eps: epsilon of the RMS norms.
      max_tokens: longest context the model was made for.
      tied_head: the head is the embedding.
      qkv_bias: query, key and value projections have a bias (Qwen2).
      qk_norm: queries and keys are normed per head (Qwen3).
      experts: routed experts of each layer, 0 for a dense MLP.
      experts_used: experts of each token.
      renormalise: weights of the chosen experts are scaled to a sum of one.
    """

    vocab: int
    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float
    rope_pairing: RopePairing
    norm_eps: float
    max_tokens: int
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_used: int = 0
    renormalise: bool = True

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """How many layers share each selection: every layer selects for itself."""
        return (1,) * self.layers

    def token_bytes(self, itemsize: int) -> int:
        """Bytes of the keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * itemsize
