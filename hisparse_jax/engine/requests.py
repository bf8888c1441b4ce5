# SPDX-License-Identifier: Apache-2.0
"""What goes into the engine and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hisparse_jax.errors import UserError
from hisparse_jax.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
      prompt: token ids.
      max_new_tokens: tokens to generate, the first of which the prompt itself gives.
      sampling: how its tokens are chosen; the most likely ones if not given.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def check(self, vocab: int, context_tokens: int) -> None:
        """Raises UserError if a model of this vocabulary and context can't take the request."""
        if not self.prompt:
            raise UserError("the prompt is empty: give at least one token")
        wrong = [token for token in self.prompt if not 0 <= token < vocab]
        if wrong:
            raise UserError(f"the prompt has token ids out of range 0..{vocab - 1}: {wrong[:5]}")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        self.sampling.check(vocab)
        total = len(self.prompt) + self.max_new_tokens
        if total > context_tokens:
            raise UserError(
                f"the prompt has {len(self.prompt)} tokens and {self.max_new_tokens} new ones are asked for, "
                f"{total} in all; the context holds {context_tokens}: shorten the prompt (prompt.tokens) or lower "
                "decode.max_new_tokens"
            )


@dataclass
class Completion:
    """What became of a request.

    Attributes:
      request: the request.
      tokens: generated ids.
      finish: "length", "stop" (the last token is a stop token, or an event said so) or "cancelled"; None while it runs.
      logits: float32 `[V]` for each generated token, where they were asked for.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish: Literal["length", "stop", "cancelled"] | None = None
    logits: list[np.ndarray] = field(default_factory=list)


def pages_needed(request: Request, record_tokens: int, page_records: int) -> int:
    """Host pages that hold the whole history of a request. The last token is emitted, never stored."""
    records = -(-(len(request.prompt) + request.max_new_tokens - 1) // record_tokens)
    return -(-records // page_records)


def pad_to(ids: Sequence[int], multiple: int) -> np.ndarray:
    """Token ids, zero-padded to a multiple; int32."""
    padded = np.zeros(-(-len(ids) // multiple) * multiple, np.int32)
    padded[: len(ids)] = ids
    return padded
