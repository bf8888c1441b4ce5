# SPDX-License-Identifier: Apache-2.0
"""Hugging Face safetensors checkpoints as named tensors: memory-mapped, sharded or not, FP8 tiles dequantised.

The format (8 bytes of header length, a JSON header, the data) is read here and not by the safetensors library, whose
NumPy front end knows no FP8: `ml_dtypes` views over the memory map do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from hisparse_jax.errors import UserError

_FLOATS = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}
_OTHERS = {
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_TYPES = {**_FLOATS, **_OTHERS}
_TILE = 128  # rows and columns of an FP8 weight that share one scale
_SCALE = "_scale_inv"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_HEADER = 100_000_000  # bytes, as the format says


class _Place(NamedTuple):
    """Where a tensor lies in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFolder:
    """The tensors of a checkpoint folder. Implements `hisparse_jax.checkpoint.load.Source`.

    An e4m3 weight with `<name>_scale_inv` beside it is read as `weight * scale` of each 128 x 128 tile, in float32.

    Args:
      folder: with `model.safetensors`, or `model.safetensors.index.json` and the files it names.
    Raises:
      UserError: no checkpoint, a file that the index names and isn't there, a truncated file, a header that
        contradicts itself, an FP8 weight without its scales.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._maps: dict[Path, np.memmap] = {}
        self._places: dict[str, _Place] = {}
        named = _named_files(self.folder)
        for file in dict.fromkeys(named.values()) if named else [self.folder / _SINGLE]:
            for name, place in _read_header(file).items():
                if name in self._places:
                    raise UserError(f"{file}: tensor {name} is in {self._places[name].file.name} too")
                self._places[name] = place
        for name, file in named.items():
            if name not in self._places or self._places[name].file != file:
                raise UserError(f"{self.folder / _INDEX}: it says that {name} is in {file.name}, which is not so")
        self._scales = {name for name in self._places if name.endswith(_SCALE)}
        self._check_scales()

    @property
    def name(self) -> str:
        return str(self.folder)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors but the FP8 scales, which go with their weights."""
        return {name: place.shape for name, place in self._places.items() if name not in self._scales}

    def unreadable(self) -> Mapping[str, str]:
        """Tensors that hold no float numbers, or whose FP8 scales don't."""
        expected = f"expected {', '.join(_FLOATS)}"
        odd = {name: place.dtype for name, place in self._places.items() if place.dtype not in _FLOATS}
        return {
            name.removesuffix(_SCALE): f"{expected}, got {dtype}{' scales' if name in self._scales else ''}"
            for name, dtype in odd.items()
        }

    def read(self, name: str) -> np.ndarray:
        """One tensor that isn't `unreadable`: a view of the file, or dequantised float32."""
        values = self._view(name)
        if name + _SCALE not in self._scales:
            return values
        scale = self._view(name + _SCALE).astype(np.float32)
        out = values.astype(np.float32)
        for row in range(scale.shape[0]):  # a row of tiles at a time
            some = out[row * _TILE : (row + 1) * _TILE]
            some *= np.repeat(scale[row], _TILE)[: out.shape[1]]
        return out

    def _view(self, name: str) -> np.ndarray:
        place = self._places[name]
        if place.file not in self._maps:
            self._maps[place.file] = np.memmap(place.file, np.uint8, "r")
        return _values(self._maps[place.file], place)

    def _check_scales(self) -> None:
        for name, place in self._places.items():
            if place.dtype != "F8_E4M3":
                continue
            scale = self._places.get(name + _SCALE)
            if scale is None or len(place.shape) != 2:
                raise UserError(f"{place.file}: FP8 tensor {name} has no {name}{_SCALE} beside it: its values are lost")
            want = tuple(-(-size // _TILE) for size in place.shape)
            if scale.shape != want:
                raise UserError(
                    f"{scale.file}: {name}{_SCALE} must have shape {list(want)}, one scale per {_TILE} x {_TILE} tile "
                    f"of {list(place.shape)}; got {list(scale.shape)}"
                )


def read_file(path: Path) -> dict[str, np.ndarray]:
    """All tensors of one file, of any type, as they are stored.

    Raises:
      UserError: it isn't there, is truncated, contradicts itself, or holds an unknown type.
    """
    places = _read_header(path)
    unknown = [f"{name} ({place.dtype})" for name, place in places.items() if place.dtype not in _TYPES]
    if unknown:
        raise UserError(f"{path}: tensors of unknown types: {', '.join(unknown)}")
    data = np.memmap(path, np.uint8, "r")
    return {name: _values(data, place) for name, place in places.items()}


def _values(data: np.ndarray, place: _Place) -> np.ndarray:
    return data[place.start : place.end].view(_TYPES[place.dtype]).reshape(place.shape)


def read_json(path: Path) -> Any:
    """A JSON file of a checkpoint folder.

    Raises:
      UserError: it isn't there or isn't JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: expected a Hugging Face checkpoint folder with a {path.name}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from None


def _named_files(folder: Path) -> dict[str, Path]:
    """Tensor names and files from the index of a sharded checkpoint; empty if it is one file."""
    index = folder / _INDEX
    if not index.exists():
        if not (folder / _SINGLE).exists():
            raise UserError(f"{folder}: no checkpoint: expected {_SINGLE} or {_INDEX}")
        return {}
    names = read_json(index)
    names = names.get("weight_map") if isinstance(names, dict) else None
    if not isinstance(names, dict) or not names:
        raise UserError(f"{index}: expected a weight_map from tensor names to files")
    missing = sorted({str(file) for file in names.values() if not (folder / str(file)).is_file()})
    if missing:
        raise UserError(f"{index}: it names files that are not there: {', '.join(missing)}: fetch them")
    return {name: folder / str(file) for name, file in names.items()}


def _read_header(path: Path) -> dict[str, _Place]:
    """Tensors of one file, checked against each other and against the file's size."""
    try:
        size, opened = path.stat().st_size, path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: the file can't be read: {error.strerror}") from None
    with opened as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > _MAX_HEADER or 8 + length > size:
            raise UserError(f"{path}: truncated, or not a safetensors file: {size} bytes: fetch it again")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise UserError(f"{path}: the header is not JSON ({error}): fetch the file again") from None
    if not isinstance(header, dict):
        raise UserError(f"{path}: the header is not a mapping of tensors: fetch the file again")
    header.pop("__metadata__", None)
    places = {name: _place(path, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, place in sorted(places.items(), key=lambda item: item[1].start):
        if place.start != end:
            raise UserError(f"{path}: the header is inconsistent: {name} does not start where the one before it ends")
        end = place.end
    if end != size:
        problem = "truncated" if end > size else "longer than its header says"
        raise UserError(f"{path}: {problem}: the header describes {end} bytes, the file has {size}: fetch it again")
    return places


def _place(path: Path, name: str, entry: Any, data: int) -> _Place:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        start, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path}: the header is inconsistent: {name} must have dtype, shape and data_offsets, got {entry}"
        ) from None
    item = np.dtype(_TYPES[dtype]).itemsize if dtype in _TYPES else None
    want = None if item is None else item * int(np.prod(shape, dtype=np.int64))
    if min(shape, default=0) < 0 or end < start or (want is not None and end - start != want):
        raise UserError(
            f"{path}: the header is inconsistent: {name} of type {dtype} and shape {list(shape)} has {want} bytes, "
            f"its data_offsets span {end - start}"
        )
    return _Place(path, dtype, shape, data + start, data + end)
