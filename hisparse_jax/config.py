# SPDX-License-Identifier: Apache-2.0
"""What an experiment is: frozen dataclasses, and a strict reader of YAML files and overrides. Imports no JAX.

One file of over 400 lines, as a new setting touches all of it: its dataclass, its words, and what it can't go with.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from hisparse_jax.cache.layout import MAX_HOT_SLOTS, Residency
from hisparse_jax.errors import UserError
from hisparse_jax.prefetch import Prefetch

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and in which type it runs.

    Attributes:
      path: a GGUF file or a Hugging Face folder; a relative path is taken from the working folder.
      package: instead of a path: an installed package that carries the file. It is never imported.
      file: the file inside the package.
      sha256: checksum that the file must have, if given.
      dtype: type of parameters, arithmetic and stored records.
      published: instead of a path: the name of a published shape, which can be planned, and timed with a `synthetic`
        section.
      records: how DSA stores a record: plain in `dtype`, or quantised to 8 bits where the family has such a format.
      index_keys: how DSA stores index keys; like records if not given.
    """

    path: str | None = None
    package: str | None = None
    file: str | None = None
    sha256: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    published: str | None = None
    records: Literal["plain", "fp8"] = "plain"
    index_keys: Literal["plain", "fp8"] | None = None


@dataclass(frozen=True)
class QuestSelection:
    """Quest: pages of tokens by bounds of their keys.

    Attributes:
      rule: one list of pages for all heads ("shared") or one for each query head ("per_query_head").
      page_tokens: tokens of a page.
      budget_pages: pages attended to, the recent ones included.
      recent_pages: newest pages, always attended to.
    """

    kind: Literal["quest"] = "quest"
    rule: Literal["shared", "per_query_head"] = "shared"
    page_tokens: Positive = 16
    budget_pages: Positive = 128
    recent_pages: Positive = 2


@dataclass(frozen=True)
class DsaSelection:
    """DeepSeek Sparse Attention: the model's own indexer chooses tokens; everything comes from the model's config."""

    kind: Literal["dsa"] = "dsa"


@dataclass(frozen=True)
class CacheConfig:
    """The cache. Counts are of records: tokens for DSA, pages for Quest.

    Attributes:
      request_slots: requests decoded together.
      context_tokens: longest history of a request; what the prompts need if not given.
      hot_slots: replaceable slots of a request on the device.
      ring_slots: slots for the newest records.
      page_records: records of one page of the host pool.
      host_pages: pages of the host pool; enough for all request slots if not given.
    """

    request_slots: Positive = 1
    context_tokens: Positive | None = None
    hot_slots: Positive = 4096
    ring_slots: Positive = 64
    page_records: Positive = 64
    host_pages: Positive | None = None


@dataclass(frozen=True)
class PromptConfig:
    """What the model is asked.

    Attributes:
      source: "text", "file", "pydoc_topics" (the text behind Python's `help('topics')`), or "random" (token ids drawn
        evenly, for checkpoints that have no tokenizer).
      text: the prompt when the source is "text".
      file: a text file when the source is "file".
      tokens: the source text is cut so that the whole prompt has at most this many tokens; not cut if not given. The
        number of tokens when the source is "random".
      seed: of "random".
      question: appended after the text.
      chat: put the prompt into the model's chat format.
    """

    source: Literal["text", "file", "pydoc_topics", "random"] = "text"
    text: str = ""
    file: str | None = None
    tokens: Positive | None = None
    seed: Count = 0
    question: str = ""
    chat: bool = True


@dataclass(frozen=True)
class DecodeConfig:
    """How it is run.

    Attributes:
      residencies: run one after the other on the same prompts; the first is what the others are compared with.
      max_new_tokens: tokens to generate for each request.
      stop: end a request when it emits a stop token.
      steps: decode steps of one jitted call.
      prefill_chunk: prompt tokens of one jitted call.
      implementation: of the kernels.
      prefetch: when followers' rows are fetched: as soon as their anchor has resolved ("exact"), or just before they
        are read ("off").
      fetch_programs: grid of a follower's fetch; a small one leaves the device to what runs beside it. The measured
        one if not given.
      parts: in how many parts a DSA model's requests are selected and resolved, each beside the fetch of the one
        before. The measured number if not given.
    """

    residencies: tuple[Residency, ...] = ("full", "hisparse")
    max_new_tokens: Positive = 64
    stop: bool = True
    steps: Positive = 8
    prefill_chunk: Positive = 512
    implementation: Literal["auto", "xla", "mosaic_gpu"] = "auto"
    prefetch: Prefetch = "exact"
    fetch_programs: Positive | None = None
    parts: Positive | None = None


Mode = Literal["full", "sync", "prefetch", "no_io"]


@dataclass(frozen=True)
class SyntheticConfig:
    """Decoding of a published shape, timed with random weights and synthetic selections: docs/throughput.md.

    Settings of other sections that play no part then must not be given: of a prompt, the number of requests, their
    length and residencies.

    Attributes:
      first_layer: the first layer that is simulated; it must select for itself.
      layers: how many are.
      ranks: devices that share the model; one rank's share is simulated.
      contexts: lengths of all requests, in tokens.
      concurrency: requests that this rank decodes together.
      modes: "full"; hisparse with each fetch just before its attention ("sync") or as soon as it is known ("prefetch");
        "no_io", which moves no bytes.
      warmup_steps: steps before anything is timed.
      steps: steps that are timed, as often as `repeats` says.
      repeats: how many times are taken.
      cold_concurrency: where the first step after admission, in which nearly everything misses, is timed too.
      device_share: of the device's memory, may be used.
      weight_bytes: of a parameter, in the rule that fixes the memory for caches.
    """

    first_layer: Count = 0
    layers: Positive = 8
    ranks: Positive = 8
    contexts: Annotated[tuple[Positive, ...], Field(min_length=1)] = (32768,)
    concurrency: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1, 8)
    modes: Annotated[tuple[Mode, ...], Field(min_length=1)] = ("full", "sync", "prefetch", "no_io")
    warmup_steps: Positive = 24
    steps: Positive = 16
    repeats: Positive = 3
    cold_concurrency: tuple[Positive, ...] = ()
    device_share: Annotated[float, Field(gt=0, le=1)] = 0.85
    weight_bytes: Annotated[float, Field(gt=0)] = 1.0


@dataclass(frozen=True)
class ExpectConfig:
    """What makes a run fail.

    Attributes:
      bitwise: the logits of every step are the same bits in every residency that has valid output.
      misses: every table missed at least once and bytes came from the host pool.
    """

    bitwise: bool = True
    misses: bool = False


@dataclass(frozen=True)
class Config:
    """One experiment.

    Attributes:
      name: of the run folder.
      model: which model.
      selection: how records are selected.
      cache: sizes of the cache.
      prompt: what is asked.
      decode: how it is run.
      expect: what makes a run fail.
      synthetic: instead of a prompt: time a published shape.
      runs: folder for run folders.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    model: ModelConfig
    selection: Annotated[QuestSelection | DsaSelection, Field(discriminator="kind")] = field(
        default_factory=QuestSelection
    )
    cache: CacheConfig = CacheConfig()
    prompt: PromptConfig = PromptConfig()
    decode: DecodeConfig = DecodeConfig()
    expect: ExpectConfig = ExpectConfig()
    synthetic: SyntheticConfig | None = None
    runs: str = "runs"


_STRICT = ConfigDict(extra="forbid", strict=True)
for _section in (
    ModelConfig, QuestSelection, DsaSelection, CacheConfig, PromptConfig, DecodeConfig, SyntheticConfig, ExpectConfig,
    Config,
):  # fmt: skip
    _section.__pydantic_config__ = _STRICT


def preset_names() -> list[str]:
    """Names of the configs that come with the package."""
    return sorted(Path(item.name).stem for item in _presets().iterdir() if item.name.endswith(".yaml"))


def load(name_or_path: str, overrides: Sequence[str] = ()) -> Config:
    """Reads a config.

    Args:
      name_or_path: a preset's name or a YAML file.
      overrides: "dotted.key=value", the value in YAML.
    Raises:
      UserError: everything wrong with it, each with its dotted path.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        origin = str(path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: the config can't be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: the config can't be read: it is not UTF-8 text") from error
    else:
        if name_or_path not in preset_names():
            close = _did_you_mean(name_or_path, preset_names())
            raise UserError(f"no preset is called {name_or_path!r}{close}; presets: {', '.join(preset_names())}")
        origin = f"preset {name_or_path}"
        text = (_presets() / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    return parse(text, origin, overrides)


def parse(text: str, origin: str, overrides: Sequence[str] = ()) -> Config:
    """Reads a config from YAML text; `origin` names it in errors."""
    try:
        # YAML 1.2: `off` is a word, 1e-5 a number, and a key given twice an error.
        raw = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{origin}{line}: not valid YAML: {problem}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{origin}: expected a mapping of sections, got {type(raw).__name__}")
    for override in overrides:
        _override(raw, override)
    # A section left empty has its defaults, but for the one that need not be there.
    raw = {key: {} if value is None and key != "synthetic" else value for key, value in raw.items()}
    try:
        # Through JSON, whose strict mode takes mappings for dataclasses and lists for tuples, and nothing else.
        config = TypeAdapter(Config).validate_json(json.dumps(raw, default=str))
    except ValidationError as error:
        raise UserError(f"{origin}: {'; '.join(_problems(error))}") from None
    problems = [*_impossible(config), *(_idle(raw) if config.synthetic is not None else ())]
    if problems:
        raise UserError(f"{origin}: {'; '.join(problems)}")
    return config


def _presets() -> Path:
    """The folder of presets: package data when installed, `configs/` beside the packages in a checkout."""
    here = Path(__file__).parent
    return here / "configs" if (here / "configs").is_dir() else here.parent / "configs"


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"--set takes dotted.key=value, got {override!r}")
    *sections, last = key.split(".")
    for section in sections:
        if raw.get(section) is None:
            raw[section] = {}
        raw = raw[section]
        if not isinstance(raw, dict):
            raise UserError(f"--set {key}: {section} is not a section")
    try:
        raw[last] = YAML(typ="safe", pure=True).load(value)
    except YAMLError as error:
        raise UserError(f"--set {key}: {value!r} is not valid YAML") from error


def _problems(error: ValidationError) -> Iterable[str]:
    for item in error.errors():
        # A tagged union puts the tag, "quest" or "dsa", into the location.
        where = tuple(str(part) for part in item["loc"])
        if len(where) > 2 and where[0] == "selection":
            where = (where[0], *where[2:])
        path, value = ".".join(where), item["input"]
        match item["type"]:
            case "unexpected_keyword_argument":
                known = _keys(Config, where[:-1], item["loc"])
                yield f"{path}: unknown key{_did_you_mean(where[-1], known)}; known: {', '.join(known)}"
            case "missing" | "missing_argument":
                yield f"{path}: missing"
            case "union_tag_invalid" | "union_tag_not_found":
                yield f"{path}.kind: expected quest or dsa, got {_kind(value)!r}"
            case _:
                yield f"{path}: {item['msg'][0].lower()}{item['msg'][1:]}, got {value!r}"


def _kind(value: Any) -> Any:
    return value.get("kind") if isinstance(value, Mapping) else value


def _keys(section: Any, path: Sequence[str], location: Sequence[Any]) -> list[str]:
    """Keys of the section at a path."""
    for name in path:
        choices = _sections(typing.get_type_hints(section)[name])
        tagged = [choice for choice in choices if getattr(choice, "kind", None) in location]
        section = (tagged or choices)[0]
    return [item.name for item in dataclasses.fields(section)]


def _sections(hint: Any) -> list[Any]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return [choice for part in typing.get_args(hint) for choice in _sections(part)]
    return [hint]


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _impossible(config: Config) -> Iterable[str]:
    """Combinations that can be seen to fail without the model."""
    model, selection, cache, prompt = config.model, config.selection, config.cache, config.prompt
    if sum(given is not None for given in (model.path, model.package, model.published)) != 1:
        yield "model: give either path or package, or published to plan, or to time with a synthetic section"
    if model.package is not None and model.file is None:
        yield "model.file: missing; it names the file inside model.package"
    if isinstance(selection, QuestSelection):
        if selection.budget_pages <= selection.recent_pages:
            yield (
                f"selection.budget_pages: must be more than selection.recent_pages ({selection.recent_pages}), "
                f"got {selection.budget_pages}"
            )
        if selection.recent_pages > cache.ring_slots:
            yield (
                f"cache.ring_slots: must be at least selection.recent_pages ({selection.recent_pages}), "
                f"got {cache.ring_slots}"
            )
        if selection.rule == "shared" and cache.hot_slots < selection.budget_pages:
            yield (
                f"cache.hot_slots: must be at least selection.budget_pages ({selection.budget_pages}), "
                f"got {cache.hot_slots}"
            )
    if cache.hot_slots > MAX_HOT_SLOTS:
        yield f"cache.hot_slots: must be at most {MAX_HOT_SLOTS} (recency is int16), got {cache.hot_slots}"
    if not config.decode.residencies:
        yield "decode.residencies: name at least one of full, hisparse, no_io"
    if prompt.source == "file" and prompt.file is None:
        yield "prompt.file: missing; prompt.source is file"
    if prompt.source == "random" and prompt.tokens is None:
        yield "prompt.tokens: missing; prompt.source is random"
    if config.synthetic is not None:
        if model.published is None:
            yield "model.published: missing; synthetic times a published shape"
        if model.records != "plain" or model.dtype != "bfloat16":
            yield "model: synthetic rows are bfloat16; give dtype: bfloat16 and records: plain"
        odd = sorted(set(config.synthetic.cold_concurrency) - set(config.synthetic.concurrency))
        if odd:
            yield f"synthetic.cold_concurrency: {odd} are not among synthetic.concurrency"
        return
    if prompt.source == "text" and not prompt.text.strip():
        yield "prompt.text: empty; give a text, or another prompt.source"


# Settings that play no part in timing a published shape, and what to do. `hisparse plan` reads decode.prefill_chunk.
_TAKE_OUT = "take it out"
_IDLE = {
    "model.file": _TAKE_OUT,
    "model.sha256": _TAKE_OUT,
    "cache.request_slots": "give synthetic.concurrency",
    "cache.context_tokens": "give synthetic.contexts, or --context-tokens to plan",
    "cache.host_pages": f"{_TAKE_OUT}, the host pool holds the largest synthetic.concurrency",
    **{f"prompt.{item.name}": f"{_TAKE_OUT}, nothing is asked" for item in dataclasses.fields(PromptConfig)},
    "decode.residencies": "give synthetic.modes",
    "decode.max_new_tokens": "give synthetic.steps",
    "decode.stop": f"{_TAKE_OUT}, no request stops",
    "decode.prefetch": "give synthetic.modes",
    "expect.misses": f"{_TAKE_OUT}, misses are recorded",
}


def _idle(raw: Mapping[str, Any]) -> Iterable[str]:
    """Settings that are given and play no part beside a `synthetic` section; null is as good as not given."""
    for path, remedy in _IDLE.items():
        section, key = path.split(".")
        value = raw.get(section, {}).get(key)
        if value is not None:
            yield f"{path}: expected none beside a synthetic section, got {value!r}; {remedy}"
