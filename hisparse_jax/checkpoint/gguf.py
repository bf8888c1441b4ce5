# SPDX-License-Identifier: Apache-2.0
"""GGUF files as named tensors and typed metadata, read and dequantised by the `gguf` package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hisparse_jax.errors import UserError

MAGIC = b"GGUF"


class GgufFile:
    """A GGUF file, memory-mapped. Implements `Source`.

    Args:
      path: the file.
    Raises:
      UserError: it is missing, is no GGUF file, or is truncated.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise UserError("reading GGUF files needs the gguf package: pip install 'hisparse-jax[models]'") from error
        self.path = path
        try:
            with path.open("rb") as file:
                magic = file.read(len(MAGIC))
        except OSError as error:
            raise UserError(f"{path}: the model file can't be read: {error.strerror}") from error
        if magic != MAGIC:
            raise UserError(f"{path}: not a GGUF file: it starts with {magic!r}, expected {MAGIC!r}")
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, OverflowError) as error:
            raise UserError(
                f"{path}: the GGUF file is truncated or damaged ({path.stat().st_size} bytes: {error}); fetch it again"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._dequantize = gguf.quants.dequantize

    @property
    def name(self) -> str:
        return str(self.path)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        # GGUF lists the fastest axis first.
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        return self._dequantize(tensor.data, tensor.tensor_type)

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value; `default` if the file doesn't have it.

        Raises:
          UserError: it is missing and no default was given.
        """
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise UserError(f"{self.path}: the GGUF file has no field {key!r}")
        return default

    def has(self, key: str) -> bool:
        return self._reader.get_field(key) is not None
