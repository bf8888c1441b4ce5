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
        self._dequantize, self._block_bytes = gguf.quants.dequantize, gguf.GGML_QUANT_SIZES

    @property
    def name(self) -> str:
        return str(self.path)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        # GGUF lists the fastest axis first.
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def unreadable(self) -> Mapping[str, str]:
        """Tensors of integers, and of quantised types that the gguf package can't dequantise."""
        types = {tensor.tensor_type for tensor in self._tensors.values()}
        odd = {kind for kind in types if not self._is_readable(kind)}
        return {
            name: f"expected a float or quantised type, got {tensor.tensor_type.name}"
            for name, tensor in self._tensors.items()
            if tensor.tensor_type in odd
        }

    def _is_readable(self, kind: Any) -> bool:
        """Whether one block of zeros of this type can be dequantised."""
        try:
            self._dequantize(np.zeros((1, self._block_bytes[kind][1]), np.uint8), kind)
        except NotImplementedError:
            return False
        return True

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
