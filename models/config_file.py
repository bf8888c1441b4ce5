# SPDX-License-Identifier: Apache-2.0
"""Values of a published `config.json`, each checked for its type when it is read. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from sys import float_info
from typing import Any

from hisparse_jax.errors import UserError


class ConfigFile:
    """A mapping of a `config.json`. A key whose value is null counts as not given.

    Args:
      values: the mapping.
      name: what to call the file in errors.
      section: the key that the mapping stands under, if it is not the whole file.
    """

    def __init__(self, values: Mapping[str, Any], name: str = "config.json", section: str = "") -> None:
        self.values, self.name = values, name
        self._prefix = f"{section}." if section else ""

    def get(self, key: str) -> Any:
        """A value of any type; None if it isn't given."""
        return self.values.get(key)

    def first(self, *keys: str) -> str:
        """The first of these keys that is given, or the last."""
        return next((key for key in keys if self.get(key) is not None), keys[-1])

    def integer(self, key: str, default: int | None = None, *, least: int | None = 1) -> int:
        """A whole number of at least `least`; `default` if it isn't given.

        Raises:
          UserError: it is of another type or too small, or it isn't given and there is no default.
        """
        value = self._given(key, default)
        expected = "a whole number" if least is None else f"a whole number of at least {least}"
        if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
            raise self.wrong(key, expected)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, as `integer`."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= float_info.max:
            raise self.wrong(key, "a finite number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A truth value; null is false."""
        value = self.values.get(key, default)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return bool(value)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names, or a text as the list of its letters."""
        value = self._given(key, None)
        if not isinstance(value, str | list | tuple) or not all(isinstance(name, str) for name in value):
            raise self.wrong(key, "a list of names")
        return tuple(value)

    def mapping(self, key: str) -> dict[str, Any]:
        """A mapping; empty if it isn't given."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, "a mapping")
        return dict(value or {})

    def rope(self) -> ConfigFile:
        """`rope_parameters`, or `rope_scaling` where that says more."""
        both = {**self.mapping("rope_scaling"), **self.mapping("rope_parameters")}
        section = "rope_scaling" if self.get("rope_parameters") is None else "rope_parameters"
        return ConfigFile(both, self.name, section)

    def wrong(self, key: str, expected: str) -> UserError:
        """The error of a value that isn't what was expected."""
        return UserError(f"{self.name}: {self._prefix}{key} must be {expected}, got {self.get(key)!r}")

    def _given(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None and default is None:
            kind = self.get("model_type")
            who = f": a {kind} config must give it" if kind else ""
            raise UserError(f"{self.name}: {self._prefix}{key} is missing{who}")
        return default if value is None else value
