# SPDX-License-Identifier: Apache-2.0
"""One rank's share of a model that is too large for one device. Imports no JAX.

Attention is data-parallel: every rank has all of it, for requests of its own. Experts, embedding and head are divided
over the ranks. A rank's experts get as many tokens as its own requests send out, so the share routes each token to as
many experts as the whole model does, all of them its own. What ranks say to each other is not in it.

A decoder over Quest pages is not divided: one rank has all of it, and a share is some of its layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import overload

from models.config import GqaConfig
from models.dsa_config import DsaConfig
from models.sizes import Shape, parameters


@overload
def rank_share(config: DsaConfig, ranks: int, first_layer: int = 0, layers: int | None = None) -> DsaConfig: ...
@overload
def rank_share(config: GqaConfig, ranks: int, first_layer: int = 0, layers: int | None = None) -> GqaConfig: ...
def rank_share(config: Shape, ranks: int, first_layer: int = 0, layers: int | None = None) -> Shape:
    """The shape of one rank's share, of all layers or of some.

    Args:
      config: the whole model.
      ranks: how many devices share it.
      first_layer: the first layer of the share, an anchor.
      layers: how many; all from `first_layer` on if not given.
    Raises:
      ValueError: layers or experts that can't be had or divided.
    """
    end = config.layers if layers is None else first_layer + layers
    if not 0 <= first_layer < end <= config.layers:
        raise ValueError(f"layers {first_layer}..{end - 1} are not all among the model's {config.layers}")
    if isinstance(config, GqaConfig):
        if ranks != 1:
            raise ValueError(f"a decoder over Quest pages is not divided; expected 1 rank, got {ranks}")
        return replace(config, layers=end - first_layer)
    if not config.anchors[first_layer]:
        raise ValueError(f"layer {first_layer} takes the selection of a layer before it; begin with an anchor")
    experts, left = divmod(config.experts, ranks)
    if left or experts < config.experts_used:
        raise ValueError(
            f"{config.experts} experts, of which a token uses {config.experts_used}, do not go into {ranks} ranks"
        )
    return replace(
        config, vocab=-(-config.vocab // ranks), experts=experts, expert_groups=1, expert_groups_used=1,
        anchors=config.anchors[first_layer:end], dense=config.dense[first_layer:end],
    )  # fmt: skip


def tables_before(config: Shape, layer: int) -> int:
    """How many layers before this one select for themselves."""
    return layer if isinstance(config, GqaConfig) else sum(config.anchors[:layer])


def rank_parameters(config: Shape, ranks: int) -> int:
    """How many parameters of the whole model one rank has."""
    return parameters(rank_share(config, ranks))
