# SPDX-License-Identifier: Apache-2.0
"""From an experiment's config to its plan: sizes of published shapes, of checkpoint folders and of GGUF files."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from hisparse_jax import planner
from hisparse_jax.assembly import model_file, quest_rule
from hisparse_jax.checkpoint.gguf import GgufFile
from hisparse_jax.config import Config, ModelConfig
from hisparse_jax.errors import UserError
from hisparse_jax.planner import Machine, Plan, Settings, Sizes, memory_bytes
from models import gguf_models, registry
from models.config import GqaConfig
from models.dsa_config import DsaConfig
from models.sizes import dsa_sizes, gqa_sizes, parameters, published

_CACHE_SHARE = 0.25  # of the usable memory, left for caches when the number of devices is chosen here
_MOST_DEVICES = 1024  # that are chosen here


def plan_config(
    config: Config, machine: str | Machine = "H200", *, context_tokens: int | None = None, devices: int | None = None,
    device_bytes: float | None = None, host_bytes: float | None = None,
) -> Plan:  # fmt: skip
    """The plan of an experiment. Reads headers at most; allocates nothing.

    Args:
      config: model, selection and cache; the rest plays no part.
      machine: one of `planner.MACHINES`, in any case, or a machine.
      context_tokens: instead of the config's; the longest the model was made for if neither is given.
      devices: the parameters are split over this many; the fewest, doubling, that leave a quarter of the memory for
        scratch and caches if not given, up to 1024.
      device_bytes: instead of the machine's device memory.
      host_bytes: instead of the machine's host memory.
    Raises:
      UserError: an unknown machine or model, memory that is not more than 0, or sizes that do not go together.
    """
    if isinstance(machine, str):
        known = {name.lower(): one for name, one in planner.MACHINES.items()}
        if machine.lower() not in known:
            raise UserError(f"no machine is called {machine!r}; there are {', '.join(planner.MACHINES)}")
        machine = known[machine.lower()]
    machine = replace(
        machine,
        device_bytes=memory_bytes("--device-gib", machine.device_bytes if device_bytes is None else device_bytes),
        host_bytes=memory_bytes("--host-gib", machine.host_bytes if host_bytes is None else host_bytes),
    )
    context = config.cache.context_tokens if context_tokens is None else context_tokens
    if context is not None and context < 1:
        raise UserError(f"--context-tokens must be at least 1, got {context}")
    sizes = model_sizes(config, context)
    settings = Settings(
        context_tokens=sizes.max_tokens if context is None else context,
        hot_slots=config.cache.hot_slots,
        ring_slots=config.cache.ring_slots,
        page_records=config.cache.page_records,
        prefill_chunk=config.decode.prefill_chunk,
        prefetch=config.decode.prefetch,
    )
    machine = replace(machine, devices=_fewest_devices(sizes, machine) if devices is None else devices)
    return planner.plan(sizes, settings, machine)


def model_sizes(config: Config, context_tokens: int | None = None) -> Sizes:
    """What the model of a config stores.

    Args:
      config: as in `plan_config`.
      context_tokens: the planned context, which bounds a selection; the longest the model was made for if not given.
    Raises:
      UserError: the model isn't there or isn't supported.
    """
    model = config.model
    if model.published is not None:
        shape = published(model.published)
        parameter_bytes = parameters(shape) * jnp.dtype(model.dtype).itemsize
        if isinstance(shape, GqaConfig):
            return _gqa(model.published, shape, config, context_tokens, parameter_bytes)
        return _dsa(model.published, shape, model, parameter_bytes)
    path = model_file(config)
    if path.is_dir():
        shape = registry.read_config(path)
        if isinstance(shape, DsaConfig):
            opened = registry.open_folder(path, dtype=model.dtype, records=model.records)
            return _dsa(path.name, shape, model, opened.parameter_bytes)
        opened = registry.open_folder(path, rule=quest_rule(config), dtype=model.dtype)
    else:
        opened = gguf_models.open_gguf(GgufFile(path), quest_rule(config), model.dtype)
    shape = opened.config
    if not isinstance(shape, GqaConfig):
        raise UserError(f"{path.name}: a model of this kind can't be planned yet")
    return _gqa(path.name, shape, config, context_tokens, opened.parameter_bytes)


def _dsa(name: str, shape: DsaConfig, model: ModelConfig, parameter_bytes: int) -> Sizes:
    stored = [model.dtype if kind == "plain" else kind for kind in (model.records, model.index_keys or model.records)]
    return dsa_sizes(name, shape, record=stored[0], index_keys=stored[1], parameter_bytes=parameter_bytes)


def _gqa(name: str, shape: GqaConfig, config: Config, context_tokens: int | None, parameter_bytes: int) -> Sizes:
    rule = quest_rule(config)
    pages = -(-(shape.max_tokens if context_tokens is None else context_tokens) // rule.page_tokens)
    sizes = gqa_sizes(
        name, shape, page_tokens=rule.page_tokens, selected=rule.width(shape.query_heads, pages),
        itemsize=jnp.dtype(config.model.dtype).itemsize, parameter_bytes=parameter_bytes,
    )  # fmt: skip
    return replace(sizes, prompt_index=False)


def _fewest_devices(sizes: Sizes, machine: Machine) -> int:
    usable, devices = machine.device_bytes * (1 - machine.reserved), 1
    while devices < _MOST_DEVICES and sizes.parameter_bytes / devices > usable * (1 - _CACHE_SHARE):
        devices *= 2
    return devices
