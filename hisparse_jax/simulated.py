# SPDX-License-Identifier: Apache-2.0
"""What a throughput experiment simulates: one rank's share of some layers, its cache, and the memory it may take.

A composition root, as it builds models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from hisparse_jax.assembly import make_layout, quest_rule
from hisparse_jax.cache.layout import Layout, Residency, gib
from hisparse_jax.cache.memory import device_bytes, host_limit, tree_bytes
from hisparse_jax.cache.state import Cache
from hisparse_jax.config import Config, DsaSelection, Mode, SyntheticConfig
from hisparse_jax.errors import UserError
from hisparse_jax.prefetch import Prefetch
from hisparse_jax.synthetic import compile_admission
from hisparse_jax.workload import FITTED, Locality
from models.config import GqaConfig
from models.decoder import QuestDecoder
from models.dsa import DsaDecoder, DsaOptions
from models.functional import Functional
from models.share import rank_parameters, rank_share, tables_before
from models.sizes import Shape, published

MODES: dict[Mode, tuple[Residency, Prefetch]] = {
    "full": ("full", "off"),
    "sync": ("hisparse", "off"),
    "prefetch": ("hisparse", "exact"),
    "no_io": ("no_io", "off"),
}


@dataclass(frozen=True)
class Point:
    """One program to time.

    Attributes:
      context: tokens of every request.
      requests: R.
      mode: see `hisparse_jax.config.SyntheticConfig`.
    """

    context: int
    requests: int
    mode: Mode


def points(setting: SyntheticConfig, context: int) -> list[Point]:
    """The points of one context, the largest concurrency first: what doesn't fit is known early."""
    return [Point(context, n, mode) for n in sorted(setting.concurrency, reverse=True) for mode in setting.modes]


def decoder(config: Config, shape: Shape, mode: Mode, workload: Locality) -> DsaDecoder | QuestDecoder:
    """The module of a shape as a mode runs it, with initial parameters.

    Raises:
      UserError: a setting that is another family's.
    """
    model, decode, dtype, rngs = config.model, config.decode, jnp.bfloat16, nnx.Rngs(0)
    keys = model.index_keys or "plain"
    if isinstance(shape, GqaConfig):
        rule = quest_rule(config)
        if rule.rule != "shared":
            raise UserError(f"selection.rule: synthetic pages are the same for all heads; give shared, not {rule.rule}")
        if keys != "plain":
            raise UserError(f"model.index_keys: {keys} is a format of DSA families; {model.published} has page bounds")
        return QuestDecoder(
            shape, rule, dtype=dtype, rngs=rngs, implementation=decode.implementation, workload=workload
        )
    if not isinstance(config.selection, DsaSelection):
        raise UserError(f"selection.kind: {model.published} has an indexer of its own; expected dsa, got quest")
    _, prefetch = MODES[mode]
    options = DsaOptions(
        record="bfloat16", index_keys="bfloat16" if keys == "plain" else keys, prefetch=prefetch,
        fetch_programs=decode.fetch_programs, parts=decode.parts, workload=workload,
        implementation=decode.implementation,
    )  # fmt: skip
    return DsaDecoder(shape, options, dtype=dtype, rngs=rngs)


class Share:
    """The simulated share of a model: shape, parameters, functions.

    Args:
      config: an experiment with a synthetic section.
    Raises:
      UserError: no such shape, or a share that can't be had.
    """

    def __init__(self, config: Config) -> None:
        assert config.synthetic is not None
        self.config, self.setting = config, config.synthetic
        self.whole = published(str(config.model.published))
        setting = config.synthetic
        try:
            self.shape: Shape = rank_share(self.whole, setting.ranks, setting.first_layer, setting.layers)
        except ValueError as error:
            raise UserError(f"synthetic: {error}") from error
        self.workload = replace(FITTED, first_table=tables_before(self.whole, setting.first_layer))
        self.models = {mode: Functional(nnx.eval_shape(partial(self._decoder, mode))) for mode in setting.modes}
        self._admissions: dict[Layout, Any] = {}
        self._compiling: dict[Layout, Lock] = {}

    def parameters(self) -> list[Array]:
        """Random ones, as initialised; modes share them."""
        return Functional.parameters(self._decoder(self.setting.modes[0]))

    def _decoder(self, mode: Mode) -> DsaDecoder | QuestDecoder:
        return decoder(self.config, self.shape, mode, self.workload)

    @property
    def steps(self) -> int:
        """The most steps that a request decodes: the first, those of all chunks, and two chunks for a profile."""
        return 1 + (self.warmup_calls + self.calls * self.setting.repeats + 2) * self.config.decode.steps

    @property
    def warmup_calls(self) -> int:
        """Calls of a chunk before anything is timed."""
        return -(-self.setting.warmup_steps // self.config.decode.steps)

    @property
    def calls(self) -> int:
        """Calls of a chunk that are timed together."""
        return -(-self.setting.steps // self.config.decode.steps)

    def layout(self, point: Point) -> Layout:
        """The cache of a point. The host pool holds the largest concurrency, so that points can share it.

        Raises:
          UserError: sizes that do not go together.
        """
        if point.context <= self.steps:
            raise UserError(
                f"synthetic.contexts: {point.context} tokens are no more than the {self.steps} of all steps"
            )
        cache = replace(self.config.cache, request_slots=point.requests)
        residency, _ = MODES[point.mode]
        return make_layout(
            cache, self.models[point.mode].records(point.context), residency, point.context,
            pool_requests=max(self.setting.concurrency),
        )  # fmt: skip

    def check(self, point: Point) -> None:
        """Before anything is allocated.

        Raises:
          UserError: sizes that do not go together, or a host pool that can't be had.
        """
        needed, limit = self.layout(point).host_bytes(), host_limit()
        if needed > limit:
            raise UserError(
                f"the host pool of {max(self.setting.concurrency)} requests of {point.context} tokens takes "
                f"{gib(needed)} and {gib(limit)} can be had: lower synthetic.concurrency, or raise "
                "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB before the start"
            )

    def admission(self, cache: Cache) -> Any:
        """The compiled admission of one request; modes of one residency share it."""
        with self._compiling.setdefault(cache.layout, Lock()):
            if cache.layout not in self._admissions:
                self._admissions[cache.layout] = compile_admission(cache)
            return self._admissions[cache.layout]

    def cache_budget(self) -> dict[str, Any]:
        """The memory for caches by rule: what one rank has beside its weights of the whole model, for these layers."""
        setting = self.setting
        limit = device_bytes()
        weights = int(rank_parameters(self.whole, setting.ranks) * setting.weight_bytes)
        left = setting.device_share * limit - weights
        if left <= 0:
            raise UserError(
                f"synthetic.ranks: with {setting.ranks} no memory is left for caches: a rank's weights take "
                f"{gib(weights)} of the {gib(int(setting.device_share * limit))} that may be used; give more ranks"
            )
        return {
            "device_bytes": limit,
            "device_share": setting.device_share,
            "rank_weight_bytes_of_the_whole_model": weights,
            "simulated_layers": self.shape.layers,
            "all_layers": self.whole.layers,
            "cache_bytes": int(left * self.shape.layers / self.whole.layers),
        }

    def request_bytes(self, point: Point) -> int:
        """Device memory that one request's cache takes."""
        layout = self.layout(point)
        index = jax.eval_shape(lambda: self.models[point.mode].new_index(layout))
        return (sum(layout.device_bytes().values()) + tree_bytes(index)) // point.requests
