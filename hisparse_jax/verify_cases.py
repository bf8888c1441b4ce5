# SPDX-License-Identifier: Apache-2.0
"""Reference cases: read, and checked for the shapes and types that verify compares with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from hisparse_jax.checkpoint.safetensors import read_file
from hisparse_jax.errors import UserError
from hisparse_jax.selection import QuestRule

_NEEDED = ("input_ids", "decode_logits", "generated_ids")
# Selections, and the scores that say whether a difference is rounding.
_SCORES = {
    "topk_prefill": "index_scores_prefill",
    "topk_decode": "index_scores_decode",
    "pages_selected": "page_scores",
}


class Case(NamedTuple):
    """One prompt with what the reference computed; `rule` is None for DSA."""

    file: Path
    rule: QuestRule | None
    tensors: Mapping[str, np.ndarray]

    @property
    def name(self) -> str:
        return self.file.stem.removeprefix("case_")

    @property
    def prompt(self) -> np.ndarray:
        return self.tensors["input_ids"]

    @property
    def steps(self) -> int:
        return len(np.atleast_1d(self.tensors["decode_logits"]))


class _Expected(NamedTuple):
    """A tensor's shape in words and in numbers (0 for any), what it holds, and the ids below which ids must be."""

    words: str
    shape: tuple[int, ...]
    holds: Literal["ids", "floats", "flags"]
    below: int = 0


def read_case(file: Path) -> Case:
    """A reference case, not checked yet, but for the tensors that every case needs.

    Raises:
      UserError: not a safetensors file, or one without these.
    """
    tensors = read_file(file)
    lacking = [key for key in _NEEDED if key not in tensors]
    lacking += [scores for key, scores in _SCORES.items() if key in tensors and scores not in tensors]
    if lacking:
        raise UserError(f"{file}: not a reference case: {', '.join(lacking)} missing")
    return Case(file, None, tensors)


def check_case(case: Case, vocab: int, tables: int, query_heads: int) -> None:
    """Checks shapes, types and ids of everything that is compared.

    Args:
      case: with its Quest rule, if its model decodes with one.
      vocab, tables, query_heads: of the model.
    Raises:
      UserError: the first thing that isn't as expected.
    """
    for name, want in _expected(case, vocab, tables, query_heads).items():
        if name not in case.tensors:
            continue
        tensor = case.tensors[name]
        sizes = zip(tensor.shape, want.shape, strict=False)
        if tensor.ndim != len(want.shape) or any(got != size and size for got, size in sizes) or not tensor.size:
            numbers = ", ".join(str(size) if size else "any" for size in want.shape)
            raise UserError(
                f"{case.file}: {name} must have shape {want.words}, here [{numbers}], and not be empty; got "
                f"{list(tensor.shape)}"
            )
        is_float, is_whole = jnp.issubdtype(tensor.dtype, jnp.floating), tensor.dtype.kind in "iu"
        if not {"floats": is_float, "ids": is_whole, "flags": is_whole or tensor.dtype == np.bool_}[want.holds]:
            raise UserError(f"{case.file}: {name} must hold {want.holds}, got {tensor.dtype}")
        least = -1 if name.startswith("topk") else 0
        if want.holds == "ids" and not (least <= tensor.min() and tensor.max() < want.below):
            raise UserError(
                f"{case.file}: {name} must hold ids from {least} to {want.below - 1}, got {tensor.min()} to "
                f"{tensor.max()}"
            )


def _expected(case: Case, vocab: int, tables: int, query_heads: int) -> dict[str, _Expected]:
    tokens, steps = case.prompt.size, case.steps
    history = tokens + steps
    expected = {
        "input_ids": _Expected("[T]", (tokens,), "ids", vocab),
        "decode_logits": _Expected("[n, V]", (steps, vocab), "floats"),
        "generated_ids": _Expected("[n + 1]", (steps + 1,), "ids", vocab),
        "prefill_logits": _Expected("[T, V]", (tokens, vocab), "floats"),
        "topk_prefill": _Expected("[anchors, T, K]", (tables, tokens, 0), "ids", tokens),
        "index_scores_prefill": _Expected("[anchors, T, T]", (tables, tokens, tokens), "floats"),
        "topk_decode": _Expected("[n, anchors, K]", (steps, tables, 0), "ids", history),
        "index_scores_decode": _Expected("[n, anchors, T + n]", (steps, tables, history), "floats"),
    }
    if case.rule is not None:
        heads, pages = 1 if case.rule.rule == "shared" else query_heads, -(-history // case.rule.page_tokens)
        for name, holds in (("pages_selected", "flags"), ("page_scores", "floats")):
            expected[name] = _Expected("[n, layers, 1 or heads, pages]", (steps, tables, heads, pages), holds)
    return expected
