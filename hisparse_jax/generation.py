# SPDX-License-Identifier: Apache-2.0
"""Text generation from prompts: checkpoints by path or hub id, streamed text, stop strings."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from hisparse_jax.assembly import make_budget, make_layout, open_model
from hisparse_jax.config import Config, QuestSelection, parse
from hisparse_jax.engine.engine import Engine, Events
from hisparse_jax.engine.requests import Request
from hisparse_jax.errors import UserError
from hisparse_jax.sampling import SamplingParams
from hisparse_jax.tokenizer import Tokenizer
from models.dsa_config import DsaConfig
from models.opened import Opened
from models.registry import read_config

_INCOMPLETE = "\ufffd"  # what a byte-level decoder gives for the first bytes of a character


def checkpoint_path(model: str) -> Path:
    """A local path as it is; a hub id, "owner/name", is downloaded if huggingface-hub is installed.

    Raises:
      UserError: neither, or the hub can't be reached.
    """
    path = Path(model).expanduser()
    if path.exists() or model.count("/") != 1 or model.startswith((".", "/", "~")) or path.suffix == ".gguf":
        return path
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UserError(
            f"{model} is no local path; to read it as a hub id, install huggingface-hub (pip install huggingface-hub)"
        )
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except Exception as error:  # the library raises errors of many libraries
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{model} is no local path, and the hub gave nothing: {reason}") from error


@dataclass
class TextStream:
    """Tokens to text as they come, whole characters only, ending before a stop string.

    Attributes:
      tokenizer: decodes.
      stop: the text ends before the first of these.
      text: what is settled. Text that may be the start of a stop string is held back.
    """

    tokenizer: Tokenizer
    stop: Sequence[str] = ()
    text: str = ""
    _tokens: list[int] = field(default_factory=list)

    def feed(self, token: int) -> tuple[str, bool]:
        """Takes a token; gives the text it settles, and whether a stop string has come."""
        self._tokens.append(token)
        whole = self.tokenizer.decode(self._tokens)
        found = [at for at in (whole.find(text) for text in self.stop) if at >= 0]
        if found:
            return self._settle(whole[: min(found)]), True
        if whole.endswith(_INCOMPLETE):
            return "", False
        return self._settle(whole[: len(whole) - self._held_back(whole)]), False

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        return self._settle(self.tokenizer.decode(self._tokens))

    def _settle(self, whole: str) -> str:
        new = whole[len(self.text) :]
        self.text += new
        return new

    def _held_back(self, whole: str) -> int:
        """Length of the longest end of the text that starts a stop string."""
        sizes = (size for text in self.stop for size in range(min(len(text) - 1, len(whole)), 0, -1))
        return max((size for size in sizes if any(text.startswith(whole[-size:]) for text in self.stop)), default=0)


@dataclass(frozen=True)
class Generated:
    """One prompt's result.

    Attributes:
      text: generated, without stop string and control tokens.
      tokens: generated ids.
      finish: "length" or "stop".
      prompt_tokens: length of the prompt.
      valid_output: false for "no_io", which moves no bytes.
    """

    text: str
    tokens: list[int]
    finish: str
    prompt_tokens: int
    valid_output: bool


def generate(
    opened: Opened, requests: Sequence[Request], config: Config, *, stop: Sequence[str] = (),
    on_text: Callable[[int, str], None] = lambda number, text: None,
) -> tuple[list[Generated], Engine]:  # fmt: skip
    """Runs prompts through a model.

    Args:
      opened: the model.
      requests: prompts with their settings.
      config: its cache and decode sections are used, with its first residency.
      stop: strings that end a text.
      on_text: called with a prompt's number and new text, as it comes.
    Raises:
      UserError: a request that can't be served, or too little memory.
    """
    if opened.tokenizer is None:
        raise UserError("the model has no tokenizer, so it can't generate text")
    decode, residency = config.decode, config.decode.residencies[0]
    for request in requests:
        request.check(opened.config.vocab, opened.config.max_tokens)
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    context = config.cache.context_tokens or longest
    layout = make_layout(config.cache, opened.model.records(context), residency, context)
    try:
        make_budget(opened, layout, decode.prefill_chunk).check()
    except MemoryError as error:
        raise UserError(str(error)) from error
    streams = [TextStream(opened.tokenizer, stop) for _ in requests]

    def decoded(number: int, token: int) -> bool:
        if token in stop_tokens:
            return False
        text, stops = streams[number].feed(token)
        if text:
            on_text(number, text)
        return stops

    stop_tokens = opened.tokenizer.stop_tokens if decode.stop else ()
    engine = Engine(
        opened.model, opened.load(), layout, vocab=opened.config.vocab, steps=decode.steps,
        prefill_chunk=decode.prefill_chunk, stop_tokens=stop_tokens, implementation=decode.implementation,
        events=Events(decode=decoded),
    )  # fmt: skip
    for request in requests:
        engine.submit(request)
    results = []
    for number, done in enumerate(engine.run()):
        stopped_by_string = done.finish == "stop" and done.tokens[-1] not in stop_tokens
        if not stopped_by_string and (rest := streams[number].finish()):
            on_text(number, rest)
        results.append(
            Generated(
                streams[number].text, done.tokens, str(done.finish), len(done.request.prompt), residency != "no_io"
            )
        )  # fmt: skip
    return results, engine


@dataclass(frozen=True)
class Options:
    """What `hisparse generate` was asked for; the names are its options."""

    model: str
    prompts: tuple[str, ...] = ()
    prompt_files: tuple[str, ...] = ()
    max_new_tokens: int = 128
    residency: str = "hisparse"
    chat: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    repetition_penalty: float = 1.0
    banned: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    as_json: bool = False


def run(options: Options, console: Console) -> None:
    """Generates and prints: text as it comes for one prompt, a block each for several, or JSON lines.

    Raises:
      UserError: no prompt, or anything that can't be read or served.
    """
    prompts = [*options.prompts, *map(_read, options.prompt_files)]
    if not prompts:
        raise UserError("no prompt: give --prompt or --prompt-file")
    if any(not prompt.strip() for prompt in prompts):
        raise UserError("a prompt is empty: give at least one word")
    if "" in options.stop:
        raise UserError("--stop is empty: give a string that ends the text, or leave it out")
    config = _config(options, len(prompts))
    opened = open_model(config)
    if opened.tokenizer is None:
        raise UserError(f"{options.model} has no tokenizer, so it can't read text")
    chat = options.chat and opened.tokenizer.chat_template is not None
    requests = []
    for number, prompt in enumerate(prompts):
        text = opened.tokenizer.chat([{"role": "user", "content": prompt}]) if chat else prompt
        sampling = SamplingParams(
            temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed + number,
            repetition_penalty=options.repetition_penalty, banned=options.banned,
        )  # fmt: skip
        requests.append(Request(tuple(opened.tokenizer.encode(text)), config.decode.max_new_tokens, sampling))

    with _display(console, 0 if options.as_json else len(prompts)) as show:
        results, engine = generate(opened, requests, config, stop=options.stop, on_text=show)
    if options.as_json:
        for number, result in enumerate(results):
            console.out(json.dumps({"prompt": number, **dataclasses.asdict(result)}, ensure_ascii=False))
    else:
        metrics = engine.metrics
        note = "" if results[0].valid_output else "; nothing was fetched: the text is invalid"
        rate = metrics.hit_rate()
        hits = "" if np.isnan(rate) else f", hit rate {100 * rate:.1f}%"
        Console(stderr=True).print(
            f"{metrics.decode_tokens + len(results)} tokens, {metrics.tokens_per_s:.1f} tokens/s{hits}{note}",
            style="dim",
        )


@contextlib.contextmanager
def _display(console: Console, prompts: int) -> Generator[Callable[[int, str], None]]:
    """Shows texts as they come: one as it is, several below each other on a terminal, one after the other in a file."""
    texts = [""] * prompts
    if prompts == 1:
        yield lambda number, text: console.out(text, end="", highlight=False)
        console.out("")
    elif prompts and console.is_terminal:
        with Live(console=console, vertical_overflow="visible") as live:

            def show(number: int, text: str) -> None:
                texts[number] += text
                live.update(Group(*(part for at, one in enumerate(texts) for part in (_rule(at), Text(one)))))

            yield show
    else:
        yield lambda number, text: texts.__setitem__(number, texts[number] + text) if prompts else None
        for number, text in enumerate(texts):
            console.print(_rule(number))
            console.out(text, highlight=False)


def _rule(number: int) -> Rule:
    return Rule(f"prompt {number + 1}")


def _config(options: Options, prompts: int) -> Config:
    """A config of the options: Quest with the defaults of `hisparse_jax.config`, or the model's own indexer."""
    path = checkpoint_path(options.model)
    cache = {"request_slots": min(prompts, 8)}
    if _has_indexer(path):
        selection = {"kind": "dsa"}
    else:  # pages: a default made for tokens would be sixteen times too many
        selection, cache["hot_slots"] = {"kind": "quest"}, 2 * QuestSelection().budget_pages
    raw = {
        "name": "generate",
        "model": {"path": str(path)},
        "selection": selection,
        "cache": cache,
        "prompt": {"source": "random", "tokens": 1},
        "decode": {"residencies": [options.residency], "max_new_tokens": options.max_new_tokens},
    }
    return parse(json.dumps(raw), "generate", options.overrides)


def _has_indexer(path: Path) -> bool:
    return path.is_dir() and isinstance(read_config(path), DsaConfig)


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: the prompt can't be read: {error}") from error
