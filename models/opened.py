# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that has been opened: everything is known, no parameter is read yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flax import nnx
from jax import Array

from hisparse_jax.cache.memory import tree_bytes
from hisparse_jax.checkpoint.load import Entry, Source, load_parameters
from hisparse_jax.tokenizer import Tokenizer
from models.functional import Functional


class ModelShape(Protocol):
    """What every family's config tells."""

    @property
    def vocab(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...


@dataclass(frozen=True)
class Opened:
    """A model whose parameters can be loaded.

    Attributes:
      config: the family's config.
      model: its functions of flat parameters.
      abstract: its state without data.
      source: the checkpoint.
      entries: the name map.
      ignore: regular expressions of tensors of the checkpoint that are no parameters.
      reason: what these tensors are.
      tokenizer: its tokenizer, or None if the checkpoint has none.
    """

    config: ModelShape
    model: Functional
    abstract: Any
    source: Source
    entries: Sequence[Entry]
    ignore: Sequence[str] = field(default=())
    reason: str = "that are no parameters"
    tokenizer: Tokenizer | None = None

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters in the type they run in."""
        return tree_bytes(self.abstract)

    @property
    def note(self) -> str:
        """What of the checkpoint is not read, to be shown; empty if all is."""
        pattern = re.compile("|".join(f"(?:{one})" for one in self.ignore) or r"(?!)")
        skipped = sum(pattern.fullmatch(name) is not None for name in self.source.shapes())
        return f"{skipped} tensors {self.reason} are skipped" if skipped else ""

    def load(self, progress: Callable[[int, int], None] = lambda done, total: None) -> list[Array]:
        """Flat parameters.

        Raises:
          UserError: tensors that do not fit.
        """
        return load_parameters(self.source, self.entries, self.abstract, ignore=self.ignore, progress=progress)


def opened(
    config: ModelShape, build: Callable[[nnx.Rngs], nnx.Module], source: Source, entries: Sequence[Entry],
    ignore: Sequence[str] = (), tokenizer: Tokenizer | None = None, *, reason: str = "that are no parameters",
) -> Opened:  # fmt: skip
    """Opens a model of a family: `build` makes its module, here without any data."""
    module = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    return Opened(config, Functional(module), nnx.state(module), source, entries, ignore, reason, tokenizer)
