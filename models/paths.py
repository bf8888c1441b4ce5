# SPDX-License-Identifier: Apache-2.0
"""Any checkpoint by its path: a GGUF file or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from hisparse_jax.checkpoint.gguf import GgufFile
from hisparse_jax.errors import UserError
from hisparse_jax.prefetch import Prefetch
from hisparse_jax.selection import QuestRule
from hisparse_jax.tokenizer import TOKENIZER_FILE, from_folder
from models.gguf_models import open_gguf
from models.opened import Opened
from models.registry import Records, open_folder
from pallas_kernels.common import Implementation


def open_path(
    path: Path, *, rule: QuestRule | None, dtype: DTypeLike = jnp.float32, records: Records = "plain",
    index_keys: Records | None = None, prefetch: Prefetch = "exact", fetch_programs: int | None = None,
    parts: int | None = None, implementation: Implementation = "auto",
) -> Opened:  # fmt: skip
    """The model of a checkpoint, without its parameters.

    Args:
      path: a GGUF file, or a folder with `config.json` and safetensors files; its tokenizer comes along if it has one.
      rule: how pages are selected, for the families that decode with Quest.
      dtype: type of parameters, arithmetic and plain records.
      records, index_keys, prefetch, fetch_programs, parts: of DSA families; see `models.registry.open_folder`.
      implementation: of the kernels.
    Raises:
      UserError: it is missing, not supported or not whole, or the settings don't go with its family.
    """
    if path.is_dir():
        tokenizer = from_folder(path) if (path / TOKENIZER_FILE).is_file() else None
        return open_folder(
            path, rule=rule, dtype=dtype, records=records, index_keys=index_keys, prefetch=prefetch,
            fetch_programs=fetch_programs, parts=parts, implementation=implementation, tokenizer=tokenizer,
        )  # fmt: skip
    if not path.exists():
        raise UserError(f"{path} does not exist: give a GGUF file or a Hugging Face folder")
    if rule is None:
        raise UserError(f"selection.kind: {path} decodes with quest, it has no indexer of its own")
    return open_gguf(GgufFile(path), rule, dtype, implementation)
