# SPDX-License-Identifier: Apache-2.0
"""Verify: a folder of reference vectors through the model, in two residencies, alone and as one ragged batch.

A folder holds a checkpoint and `case_NAME.safetensors` files: a prompt, its logits, greedy decode steps with theirs,
and the selected units. Decode steps are fed the reference's tokens, so that every step is compared on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from hisparse_jax.cache.admission import admit
from hisparse_jax.cache.backup import end_step
from hisparse_jax.cache.layout import Layout, Residency
from hisparse_jax.cache.state import Cache, begin_step, create, entering, placements
from hisparse_jax.checkpoint.safetensors import read_json
from hisparse_jax.errors import UserError
from hisparse_jax.records import read_rows, write_rows
from hisparse_jax.selection import QuestRule, Selection
from hisparse_jax.verify_cases import Case, check_case, read_case
from hisparse_jax.verify_report import Report, Result, as_sets, differing, show
from models.config import GqaConfig
from models.config_file import ConfigFile
from models.dsa_config import DsaConfig
from models.functional import Functional
from models.opened import Opened
from models.registry import Records, open_folder, read_config

__all__ = ["Report", "Result", "show", "verify"]

_FORMATS: tuple[Records, ...] = ("bfloat16", "fp8")
_CHUNK = 32  # prompt tokens of one prefill call
_RING_SLOTS, _PAGE_RECORDS = 4, 8
_DENSE_PAGE_TOKENS = 16


class _Prefilled(NamedTuple):
    logits: np.ndarray  # [T, V]
    ids: np.ndarray | None  # [tables, T, K]
    scratch: Any


class _Decoded(NamedTuple):
    logits: np.ndarray  # [steps, R, V]
    selected: Selection  # leaves [steps, tables, R, ...]
    misses: np.ndarray  # [steps, R], of all tables


def verify(
    folder: Path, tolerance: float = 2e-4, *, formats: Sequence[str] = (),
    progress: Callable[[str], None] = lambda stage: None,
) -> Report:  # fmt: skip
    """Runs every case of a reference folder.

    Args:
      folder: checkpoint, `case_*.safetensors` and, for Quest cases, their settings in `info.json`.
      tolerance: largest logit difference allowed.
      formats: further types of DSA records to run all cases with, as one batch: "bfloat16", "fp8".
      progress: called with what is being done.
    Raises:
      UserError: not such a folder, a model that is not supported, or an unknown format.
    """
    unknown = [name for name in formats if name not in _FORMATS]
    if unknown:
        raise UserError(f"record formats are {' and '.join(_FORMATS)}, got {', '.join(unknown)}")
    folder = Path(folder)
    config = read_config(folder)
    if formats and not isinstance(config, DsaConfig):
        raise UserError(f"{folder}: record formats are a choice of DSA families; this one stores keys and values")
    cases, results, params, prompt_rows = _read_cases(folder, config), [], None, []
    note = ""
    for rule, group in groupby(cases, key=lambda case: case.rule):
        same_rule, opened = list(group), open_folder(folder, rule=rule)
        if params is None:
            progress("reading the model")
            params, note = opened.load(), opened.note
        runner = _Runner(opened, params, same_rule, "plain")
        results += runner.results(("alone", "together"), progress)
        prompt_rows = runner.prompt_rows
    narrow = []
    for records in (known for known in _FORMATS if known in formats):
        opened = open_folder(folder, records=records)
        errors = {case.name: _record_error(opened, rows) for case, rows in zip(cases, prompt_rows, strict=True)}
        found = _Runner(opened, params, cases, records).results(("together",), progress)
        narrow += [replace(result, record_error=errors[result.case]) for result in found]
    return Report(folder, tolerance, tuple(results), tuple(narrow), note)


def _read_cases(folder: Path, config: GqaConfig | DsaConfig) -> list[Case]:
    """All cases, those of one Quest rule next to each other; without a rule, every page is selected."""
    files = sorted(folder.glob("case_*.safetensors"))
    if not files:
        raise UserError(f"{folder}: expected reference cases case_NAME.safetensors, there are none")
    cases = [read_case(file) for file in files]
    if isinstance(config, DsaConfig):
        for case in cases:
            check_case(case, config.vocab, len(config.group_sizes), config.heads)
        return cases
    rules, info = _quest_rules(folder), folder / "info.json"
    longest = max(case.prompt.size + case.steps for case in cases)
    dense = QuestRule("shared", -(-longest // _DENSE_PAGE_TOKENS) + 1, 1, _DENSE_PAGE_TOKENS)
    with_rule = []
    for case in cases:
        if "pages_selected" in case.tensors and case.name not in rules:
            raise UserError(f"{info}: quest.{case.name} is missing: {case.file.name} has pages_selected")
        with_rule.append(case._replace(rule=rules.get(case.name, dense)))
        check_case(with_rule[-1], config.vocab, config.layers, config.query_heads)
    return sorted(with_rule, key=lambda case: (repr(case.rule), case.name))


def _quest_rules(folder: Path) -> dict[str, QuestRule]:
    """Settings of Quest by case, from `info.json`."""
    path, rules = folder / "info.json", {}
    info = read_json(path)
    if not isinstance(info, dict):
        raise UserError(f"{path}: expected a mapping, got {info!r}")
    quest = ConfigFile(ConfigFile(info, str(path)).mapping("quest"), str(path), "quest")
    for name in quest.values:
        settings = ConfigFile(quest.mapping(name), str(path), f"quest.{name}")
        budget, recent = settings.integer("budget_pages"), settings.integer("recent_pages", 1)
        rule = settings.get("rule")
        if rule not in ("shared", "per_query_head"):
            raise settings.wrong("rule", "shared or per_query_head")
        if budget <= recent:
            raise settings.wrong("budget_pages", f"more than recent_pages, {recent}")
        rules[name] = QuestRule(rule, budget, recent, settings.integer("page_size"))
    return rules


class _Runner:
    """Cases of one model and one rule: compiled once for both residencies, alone or together."""

    def __init__(self, opened: Opened, params: Any, cases: Sequence[Case], records: Records) -> None:
        self.model, self.params, self.cases, self.records = opened.model, params, cases, records
        longest = max(len(case.prompt) + case.steps for case in cases)
        self.context = -(-longest // _CHUNK) * _CHUNK
        residencies: tuple[Residency, ...] = ("full", "hisparse")
        self.layouts = {residency: self._layout(residency) for residency in residencies}
        self._prefill = jax.jit(partial(_prefill, self.model))
        self._admit = jax.jit(partial(_admit, self.model))
        self.prompt_rows: list[Array | None] = []
        self._steps: dict[Residency, Callable[..., Any]] = {}
        for residency, layout in self.layouts.items():
            placed = placements(self._new_cache(layout))
            self._steps[residency] = jax.jit(
                partial(_forced_steps, self.model), donate_argnums=1, out_shardings=(placed, None)
            )

    def results(self, batches: Sequence[str], progress: Callable[[str], None]) -> list[Result]:
        """Every case in every batch."""
        prefilled = []
        for case in self.cases:
            progress(f"{case.name}: prefill")
            prefilled.append(self._prefill_case(case))
        self.prompt_rows = [getattr(one.scratch, "rows", None) for one in prefilled]
        results = []
        for batch in batches:
            everyone = list(range(len(self.cases)))
            for running in [everyone] if batch == "together" else [[number] for number in everyone]:
                progress(f"{', '.join(self.cases[number].name for number in running)}: decode {batch}")
                full, sparse = (self._decode(residency, prefilled, running) for residency in ("full", "hisparse"))
                results += [self._judge(number, batch, prefilled[number], full, sparse) for number in running]
        return results

    def _layout(self, residency: Residency) -> Layout:
        """A small cache, so that long cases miss: a quarter more slots than a selection."""
        records = self.model.records(self.context)
        pages = -(-self.context // (records.record_tokens * _PAGE_RECORDS))
        return Layout(
            residency=residency,
            request_slots=len(self.cases),
            context_tokens=self.context,
            hot_slots=records.selected + max(records.selected // 4, 1),
            ring_slots=_RING_SLOTS,
            page_records=_PAGE_RECORDS,
            host_pages=pages * len(self.cases),
            **records._asdict(),
        )

    def _new_cache(self, layout: Layout) -> Cache:
        cache = create(layout, self.model.new_index(layout))
        return jax.device_put(cache, placements(cache))

    def _prefill_case(self, case: Case) -> _Prefilled:
        scratch = self.model.new_scratch(self.layouts["full"], _CHUNK)
        logits, ids, length = [], [], len(case.prompt)
        prompt = np.pad(case.prompt, (0, -length % _CHUNK))
        for start in range(0, len(prompt), _CHUNK):
            chunk = jnp.asarray(prompt[start : start + _CHUNK])
            out, scratch, selected = self._prefill(self.params, chunk, jnp.int32(start), scratch)
            logits.append(np.asarray(out))
            ids.append(None if selected is None else np.asarray(selected.ids))
        traced = None if ids[0] is None else np.concatenate(ids, axis=1)[:, :length]
        return _Prefilled(np.concatenate(logits)[:length], traced, scratch)

    def _decode(self, residency: Residency, prefilled: Sequence[_Prefilled], running: Sequence[int]) -> _Decoded:
        """Some of the cases, each in its own slot; the other slots stay empty."""
        layout = self.layouts[residency]
        cache, pages = self._new_cache(layout), layout.pages_per_request
        steps = max(self.cases[number].steps for number in range(len(self.cases)))
        tokens = np.zeros((steps, len(self.cases)), np.int32)
        active = np.zeros(tokens.shape, np.bool_)
        for number in running:
            case = self.cases[number]
            # Pages in falling order, so that no row lies where its id alone would put it.
            own = np.arange((number + 1) * pages, number * pages, -1, dtype=np.int32) - 1
            table = jnp.asarray(own[: cache.page_table.shape[1]])
            cache = self._admit(cache, jnp.int32(number), table, jnp.int32(len(case.prompt)), prefilled[number].scratch)
            cache = jax.device_put(cache, placements(cache))
            tokens[: case.steps, number] = case.tensors["generated_ids"][: case.steps]
            active[: case.steps, number] = True
        _, out = self._steps[residency](self.params, cache, jnp.asarray(tokens), jnp.asarray(active))
        return jax.tree.map(np.asarray, _Decoded(*out))

    def _judge(self, number: int, batch: str, prefilled: _Prefilled, full: _Decoded, sparse: _Decoded) -> Result:
        case, tensors = self.cases[number], self.cases[number].tensors
        steps = case.steps
        logits, other = full.logits[:steps, number], sparse.logits[:steps, number]
        selected, other_selected = (_of_request(run.selected, steps, number) for run in (full, sparse))
        bitwise = _same_bits(logits, other) and all(
            np.array_equal(a, b)
            for a, b in zip(jax.tree.leaves(selected), jax.tree.leaves(other_selected), strict=True)
        )
        pairs = [(run, tensors["decode_logits"]) for run in (logits, other)]
        if "prefill_logits" in tensors:
            pairs.append((prefilled.logits, tensors["prefill_logits"]))
        difference = float(np.max([np.abs(got - want).max() for got, want in pairs]))  # NaN stays NaN
        tokens = np.argmax(np.concatenate([prefilled.logits[-1:], other]), axis=-1)
        differ, compared = _compare_selections(tensors, prefilled.ids, other_selected)
        return Result(
            case=case.name,
            batch=batch,
            records=self.records,
            logit_difference=difference,
            tokens_agree=int((tokens == tensors["generated_ids"][: steps + 1]).sum()),
            tokens=steps + 1,
            selections_differ=differ,
            selections=compared,
            misses=int(sparse.misses[:steps, number].sum()),
            bitwise=bitwise,
        )


def _prefill(
    model: Functional, params: Any, tokens: Array, start: Array, scratch: Any
) -> tuple[Array, Any, Selection | None]:
    hidden, scratch, selected = model.prefill_traced(params, tokens, start, scratch)
    return model.logits(params, hidden), scratch, selected


def _admit(model: Functional, cache: Cache, slot: Array, pages: Array, tokens: Array, scratch: Any) -> Cache:
    layout = cache.layout
    index = model.index_of(scratch, tokens, layout)
    return admit(entering(cache), slot, pages, tokens, lambda space: model.rows(scratch, space, layout), index)


def _forced_steps(
    model: Functional, params: Any, cache: Cache, tokens: Array, active: Array
) -> tuple[Cache, tuple[Array, Selection, Array]]:
    """Decode steps that are fed `tokens`, int32 `[steps, R]`, where `active`."""

    def one(cache: Cache, item: tuple[Array, Array]) -> tuple[Cache, tuple[Array, Selection, Array]]:
        token, active = item
        cache = begin_step(cache, active)
        logits, cache, selected = model.decode_traced(params, token, cache)
        return end_step(cache), (logits, selected, jnp.sum(cache.counters[..., 2], axis=0))

    return lax.scan(one, entering(cache), (tokens, active))


def _record_error(opened: Opened, rows: Array | None) -> float:
    """Relative error of float32 records when they are stored as this model does."""
    config = opened.config
    if rows is None or not isinstance(config, DsaConfig):
        return 0.0
    exact = read_rows(rows, config.row_format("float32"))[..., : config.latent]
    row = opened.model.module().options.record
    stored = write_rows(exact, jnp.zeros((*exact.shape[:-1], config.rope)), config.row_format(row))
    error = read_rows(stored, config.row_format(row))[..., : config.latent].astype(jnp.float32) - exact
    return float(jnp.sqrt(jnp.sum(error**2) / jnp.sum(exact**2)))


def _of_request(selected: Selection, steps: int, number: int) -> Selection:
    return jax.tree.map(lambda leaf: leaf[:steps, :, number], selected)


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


def _compare_selections(
    tensors: Mapping[str, np.ndarray], prefill_ids: np.ndarray | None, decoded: Selection
) -> tuple[int, int]:
    """How many sets differ by more than rounding, and how many there are."""
    ours, theirs, scores = [], [], []
    if "topk_decode" in tensors:
        units = tensors["index_scores_decode"].shape[-1]
        ours.append(as_sets(np.asarray(decoded.ids), units))
        theirs.append(as_sets(tensors["topk_decode"], units))
        scores.append(tensors["index_scores_decode"])
    if "topk_prefill" in tensors and prefill_ids is not None:
        units = tensors["index_scores_prefill"].shape[-1]
        ours.append(as_sets(prefill_ids, units))
        theirs.append(as_sets(tensors["topk_prefill"], units))
        scores.append(tensors["index_scores_prefill"])
    if "pages_selected" in tensors:
        want = tensors["pages_selected"].astype(bool)  # [steps, layers, 1 or heads, pages]
        ids = np.asarray(decoded.ids)[:, :, None]
        if decoded.head_mask is not None:
            heads = decoded.head_mask.reshape(*decoded.ids.shape[:2], want.shape[2], -1)
            ids = np.where(np.asarray(heads), ids, -1)
        ours.append(as_sets(ids, want.shape[-1]))
        theirs.append(want)
        scores.append(tensors["page_scores"])
    counts = [differing(*item) for item in zip(ours, theirs, scores, strict=True)]
    return sum(count for count, _ in counts), sum(count for _, count in counts)
