# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, run by the `tokenizers` library: from the vocabulary inside a GGUF file, or a Hugging Face folder."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparse_jax.checkpoint.gguf import GgufFile
from hisparse_jax.errors import UserError

TOKENIZER_FILE = "tokenizer.json"
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF that are matched whole

# What splits text before the merges apply, by the name that GGUF files use.
PRE_TOKENIZERS = ("gpt-2", "default", "smollm", "qwen2")
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back.

    Attributes:
      backend: a `tokenizers.Tokenizer`.
      stop_tokens: ids that end a reply.
      chat_template: Jinja source of the chat format, or None.
    """

    backend: Any
    stop_tokens: tuple[int, ...]
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""

    def encode(self, text: str) -> list[int]:
        """Ids of a text; names of control tokens in it are taken as these tokens. None is added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, keep_control: bool = False) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=not keep_control)

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The text of a conversation that the model is to continue.

        Args:
          messages: dicts of "role" and "content".
        Raises:
          UserError: the model has no chat template.
        """
        if self.chat_template is None:
            raise UserError("the model file has no chat template; give a plain prompt (prompt.chat: false)")
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise UserError("chat templates need jinja2: pip install 'hisparse-jax[models]'") from error
        # What published templates use beyond plain Jinja.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        names: dict[str, Any] = {"raise_exception": _refused, "strftime_now": datetime.datetime.now().strftime}
        environment.filters["tojson"] = _to_json
        try:
            return environment.from_string(self.chat_template, globals=names).render(
                messages=list(messages), add_generation_prompt=True, bos_token=self.bos_token, eos_token=self.eos_token
            )
        except (TemplateError, TypeError) as error:
            raise UserError(f"the model's chat template can't be applied: {error}; give a plain prompt") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **how: Any) -> str:
    """JSON as templates expect it: characters as they are, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)


def _refused(message: str) -> None:
    """What a template calls for messages it doesn't take."""
    raise UserError(f"the model's chat template refuses the messages: {message}")


def from_gguf(file: GgufFile) -> Tokenizer:
    """The tokenizer that a GGUF file carries.

    Raises:
      UserError: a kind of tokenizer that is not byte-level BPE, or an unknown pre-tokenizer.
    """
    try:
        from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise UserError("tokenizers are needed: pip install 'hisparse-jax[models]'") from error
    kind, split = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise UserError(f"{file.path}: tokenizer model {kind!r} is not supported; supported: gpt2 (byte-level BPE)")
    if split not in PRE_TOKENIZERS:
        raise UserError(
            f"{file.path}: pre-tokenizer {split!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    tokens, types = file.field("tokenizer.ggml.tokens"), file.field("tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ", 1)) for pair in file.field("tokenizer.ggml.merges")]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
        pieces = [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
        pieces = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    backend.decoder = decoders.ByteLevel()
    whole = [token for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in whole])

    stops = {file.field(f"tokenizer.ggml.{name}_token_id", -1) for name in ("eos", "eot", "eom")}
    bos, eos = (file.field(f"tokenizer.ggml.{name}_token_id", -1) for name in ("bos", "eos"))
    return Tokenizer(
        backend=backend,
        stop_tokens=tuple(sorted(stops - {-1})),
        chat_template=file.field("tokenizer.chat_template", "") or None,
        bos_token=tokens[bos] if bos >= 0 else "",
        eos_token=tokens[eos] if eos >= 0 else "",
    )


def from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: `tokenizer.json`, with chat template and stop tokens beside it.

    Raises:
      UserError: no such file, or one that can't be read.
    """
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise UserError("tokenizers are needed: pip install 'hisparse-jax[models]'") from error
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise UserError(f"{path} is missing: the folder has no tokenizer, so it can't read text")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{path}: the tokenizer can't be read: {error}") from error
    settings = _json(folder / "tokenizer_config.json")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((one["template"] for one in template if one.get("name") == "default"), None)
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    stops: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        found = _json(folder / name).get("eos_token_id")
        stops |= set(found if isinstance(found, list) else [] if found is None else [found])
    eos = _name(settings.get("eos_token"))
    if eos and (number := backend.token_to_id(eos)) is not None:
        stops.add(number)
    return Tokenizer(
        backend=backend,
        stop_tokens=tuple(sorted(stops)),
        chat_template=template if isinstance(template, str) else None,
        bos_token=_name(settings.get("bos_token")),
        eos_token=eos,
    )


def _json(path: Path) -> dict[str, Any]:
    """A JSON file beside the tokenizer; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error


def _name(token: Any) -> str:
    """Special tokens are given as text, or as a dict with the text in it."""
    return token.get("content", "") if isinstance(token, dict) else token or ""
