# SPDX-License-Identifier: Apache-2.0
"""Prompts of experiments: where the text comes from, and how it is cut to a number of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hisparse_jax.config import PromptConfig
from hisparse_jax.errors import UserError
from hisparse_jax.tokenizer import Tokenizer


def prompt_tokens(config: PromptConfig, tokenizer: Tokenizer | None, vocab: int) -> list[int]:
    """Token ids of the prompt that a config describes.

    The source text is cut at its end, so that chat format and question stay whole.

    Raises:
      UserError: a text for a model without tokenizer, a file that can't be read, an empty prompt, or a question that
        alone is longer than allowed.
    """
    if config.source == "random":
        return np.random.default_rng(config.seed).integers(0, vocab, config.tokens).tolist()
    if tokenizer is None:
        raise UserError("the model has no tokenizer, so it can't read text: use prompt.source random")
    text = _text(config)
    ids = tokenizer.encode(_whole(config, tokenizer, text))
    if config.tokens is not None and len(ids) > config.tokens:
        frame = len(tokenizer.encode(_whole(config, tokenizer, "")))
        room = config.tokens - frame
        if room < 1:
            raise UserError(
                f"prompt.tokens: {config.tokens} tokens do not hold the question and chat format, which take {frame}"
            )
        body = tokenizer.encode(text)
        # Tokens may merge where the text meets its frame, so the last few are given up until it fits.
        while room > 0 and len(ids) > config.tokens:
            ids = tokenizer.encode(_whole(config, tokenizer, tokenizer.decode(body[:room], keep_control=True)))
            room -= max(len(ids) - config.tokens, 0)
    if not ids:
        raise UserError("the prompt is empty: give at least one token")
    return ids


def _whole(config: PromptConfig, tokenizer: Tokenizer, text: str) -> str:
    content = f"{text}\n\n{config.question}" if config.question else text
    return tokenizer.chat([{"role": "user", "content": content}]) if config.chat else content


def _text(config: PromptConfig) -> str:
    if config.source == "text":
        return config.text
    if config.source == "pydoc_topics":
        from pydoc_data import topics

        return "\n".join(topics.topics[name] for name in sorted(topics.topics))
    try:
        return Path(str(config.file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt.file: {config.file} can't be read: {error}") from error
