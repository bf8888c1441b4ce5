# SPDX-License-Identifier: Apache-2.0
"""From named tensors of a file to the parameters of a module, by a name map that the model family gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array

from hisparse_jax.errors import UserError

_SHOWN = 50  # names of one kind in an error


class Source(Protocol):
    """A checkpoint as named tensors."""

    @property
    def name(self) -> str:
        """What to call it in errors."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors, `[out, in]` for a projection. Reads no data."""
        ...

    def unreadable(self) -> Mapping[str, str]:
        """Tensors that `read` has no numbers for, and why: "expected F32, got I64". Reads no data."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised to a float type that NumPy or ml_dtypes knows."""
        ...


@dataclass(frozen=True)
class Entry:
    """One parameter of a module and the tensors it is made of.

    Attributes:
      path: the parameter, dotted: "layers.0.attention.query.kernel".
      name: the tensor; "{expert}" stands for numbers.
      transpose: the tensor is `[out, in]` and the parameter `[in, out]`.
      experts: how many numbers stand for "{expert}", stacked along the first axis; None if the name has none.
      part: gives the parameter from the tensor, where it is only some of it.
      tensor_shape: the tensor's shape, needed with `part`.
    """

    path: str
    name: str
    transpose: bool = False
    experts: int | None = None
    part: Callable[[np.ndarray], np.ndarray] | None = None
    tensor_shape: tuple[int, ...] | None = None

    def tensors(self) -> list[str]:
        """The names of the tensors, in the order in which they are stacked."""
        return [self.name] if self.experts is None else [self.name.format(expert=n) for n in range(self.experts)]


def load_parameters(
    source: Source, entries: Iterable[Entry], state: Any, *, ignore: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Array]:  # fmt: skip
    """Reads the parameters of a module, one tensor at a time.

    Host memory holds one parameter at a time besides what the device has.

    Args:
      source: where the tensors are.
      entries: the name map, one entry for each parameter.
      state: the module's abstract state (`nnx.state(nnx.eval_shape(...))`): shapes and types to fill.
      ignore: regular expressions of tensors that are no parameters of this module.
      progress: called with tensors read and tensors in all.
    Returns:
      flat parameters, in the order of the leaves of `state`.
    Raises:
      UserError: all tensors that are missing, unexpected, misshapen or of wrong type, in one message, before any is
        read.
    """
    by_path = {entry.path: entry for entry in entries}
    leaves = [(_dotted(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]]
    if set(by_path) != {path for path, _ in leaves}:
        odd = sorted(set(by_path) ^ {path for path, _ in leaves})
        raise ValueError(f"the name map and the module disagree about {', '.join(odd)}")
    _check(source, by_path, dict(leaves), ignore)

    total, done, filled = sum(len(entry.tensors()) for entry in by_path.values()), 0, []
    for path, leaf in leaves:
        entry = by_path[path]
        values = np.empty(leaf.shape, leaf.dtype)
        for number, name in enumerate(entry.tensors()):
            tensor = source.read(name)
            tensor = tensor if entry.part is None else entry.part(tensor)
            values[... if entry.experts is None else number] = tensor.T if entry.transpose else tensor
            done += 1
            progress(done, total)
        filled.append(jax.device_put(values).block_until_ready())
    return filled


def _check(source: Source, entries: Mapping[str, Entry], leaves: Mapping[str, Any], ignore: Sequence[str]) -> None:
    shapes, unreadable = dict(source.shapes()), source.unreadable()
    missing, misshapen, mistyped, wanted = [], [], [], set()
    for path, entry in entries.items():
        want = tuple(leaves[path].shape[entry.experts is not None :])
        want = entry.tensor_shape or (want[::-1] if entry.transpose else want)
        for name in entry.tensors():
            wanted.add(name)
            if name not in shapes:
                missing.append(name)
            elif tuple(shapes[name]) != want:
                misshapen.append(f"{name} (expected {list(want)}, got {list(shapes[name])})")
            if name in unreadable:
                mistyped.append(f"{name} ({unreadable[name]})")
    skipped = re.compile("|".join(f"(?:{pattern})" for pattern in ignore) or r"(?!)")
    unexpected = [name for name in shapes if name not in wanted and not skipped.fullmatch(name)]
    kinds = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen, "of wrong type": mistyped}
    problems = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise UserError(f"{source.name}: the tensors do not fit the model: {'; '.join(problems)}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _dotted(path: tuple[Any, ...]) -> str:
    """A pytree path as "a.b.c", less the leaf's own "value"."""
    keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    return ".".join(keys[:-1] if keys[-1] == "value" else keys)
