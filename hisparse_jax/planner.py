# SPDX-License-Identifier: Apache-2.0
"""Plan: bytes, concurrency, prefetches and hot slots of a model on a machine. Imports no JAX, allocates nothing.

The formulas are those of docs/planner.md. Bytes are exact; times are bounds from link and memory bandwidth alone.
One file of some 400 lines, half of them what a plan consists of and how it is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite

from rich.console import Console, Group
from rich.table import Table

from hisparse_jax.cache.layout import MAX_HOT_SLOTS, Layout, Residency, gib
from hisparse_jax.config import CacheConfig
from hisparse_jax.errors import UserError
from hisparse_jax.prefetch import Fetch, Prefetch, schedule

GIB = 2**30

# Share of selected records that miss, 0.30 (H / K)^-1.13: within a point of the 30, 13.4 and 6.7 % measured on a
# GLM-5.1 trace at K = 2048 and H = K, 2K, 4K (LRU).
_MISS_AT_K, _MISS_EXPONENT = 0.30, -1.13
_SCRATCH = "prefill scratch, one request"
_HOT_PER_SELECTED = (1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Sizes:
    """What one model stores, from its config.

    Attributes:
      name: of the model.
      group_sizes: for each table, how many layers share it.
      record_tokens: tokens of one record.
      row_bytes: bytes of one record in one layer.
      selected: K, records that a query attends to.
      index_key_bytes: bytes of one record's index key (or bounds) at a layer that selects.
      index_scale_bytes: bytes of its scale, 0 if it has none.
      parameter_bytes: bytes of all parameters.
      max_tokens: longest context the model was made for.
      prompt_index: prefill keeps index keys and scales of the whole prompt beside its rows; otherwise they are made
        when the request is admitted (Quest's bounds).
    """

    name: str
    group_sizes: tuple[int, ...]
    record_tokens: int
    row_bytes: int
    selected: int
    index_key_bytes: int
    index_scale_bytes: int
    parameter_bytes: int
    max_tokens: int
    prompt_index: bool = True

    @property
    def layers(self) -> int:
        return sum(self.group_sizes)

    @property
    def tables(self) -> int:
        """Layers that select: anchors."""
        return len(self.group_sizes)

    def scratch_bytes(self, context_tokens: int, chunk: int) -> int:
        """Bytes that prefill of one request takes, whatever the residency: rows of all layers, and index state."""
        tokens = -(-context_tokens // chunk) * chunk
        index = self.tables * (self.index_key_bytes + self.index_scale_bytes) if self.prompt_index else 0
        return tokens * (self.layers * self.row_bytes + index) // self.record_tokens


@dataclass(frozen=True)
class Settings:
    """Sizes of the cache; counts are of records.

    Attributes:
      context_tokens: length of every request.
      hot_slots: replaceable slots of a request on the device.
      ring_slots: slots for the newest records.
      page_records: records of one host page.
      prefill_chunk: prompt tokens of one prefill call; prefill scratch is a multiple of it.
      prefetch: when followers' rows are fetched, see `hisparse_jax.prefetch.schedule`.
    """

    context_tokens: int
    hot_slots: int
    ring_slots: int = 64
    page_records: int = 64
    prefill_chunk: int = 512
    prefetch: Prefetch = "exact"


@dataclass(frozen=True)
class Machine:
    """One device with the host memory and the share of the parameters that go with it.

    Attributes:
      name: what to call it.
      device_bytes: memory of the device.
      host_bytes: host memory that may be pinned for it.
      link_gb_s: rows of a kilobyte gathered from host memory, GB/s.
      memory_gb_s: reads of the device's own memory, GB/s.
      devices: the parameters are split over this many; every device serves its own requests.
      reserved: share of the device's memory kept for activations and the runtime.
      source: where the two speeds come from.
    """

    name: str
    device_bytes: int
    host_bytes: int
    link_gb_s: float
    memory_gb_s: float
    devices: int = 1
    reserved: float = 0.1
    source: str = "given"


MACHINES: Mapping[str, Machine] = {
    "H200": Machine("H200", 139 * GIB, 256 * GIB, 50.6, 4300, source="measured, PCIe Gen5 x16"),
    "B200": Machine("B200", 180 * 10**9, 256 * GIB, 50.6, 7700, source="link as measured on H200 (PCIe Gen5 x16)"),
    "GH200": Machine("GH200", 96 * 10**9, 480 * 10**9, 450, 4000, source="data sheet, NVLink-C2C one way"),
}


@dataclass(frozen=True)
class Need:
    """What one request needs in one residency, and how many fit.

    Attributes:
      device: bytes on the device by use.
      host: bytes of the host pool.
      most_requests: how many requests fit into both budgets.
      limited_by: "device" or "host".
      step_s: bound of one decode step of that many requests, in seconds; 0 if none fits.
    """

    device: Mapping[str, int]
    host: int
    most_requests: int
    limited_by: str
    step_s: float

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def tokens_per_s(self) -> float:
        """Bound of the throughput of all requests that fit."""
        return self.most_requests / self.step_s if self.step_s else 0.0


@dataclass(frozen=True)
class Plan:
    """What there is to know before anything is allocated.

    Attributes:
      sizes, settings, machine: what was planned.
      scratch_bytes: memory of the device for prefill of one request at a time, in either residency.
      cache_bytes: memory of the device that is left for the caches of requests; less than 0 if the scratch is too
        large.
      full, hisparse: needs in both residencies.
      choices: hot slots to choose from, with their needs.
      recommended_hot_slots: the choice with the largest bound of throughput, the smallest of equals; None if not
        even one request fits.
    """

    sizes: Sizes
    settings: Settings
    machine: Machine
    scratch_bytes: int
    cache_bytes: int
    full: Need
    hisparse: Need
    choices: Mapping[int, Need]
    recommended_hot_slots: int | None

    @property
    def fetches(self) -> tuple[Fetch, ...]:
        """The fetches of a decode step in the order they are issued."""
        return schedule(self.sizes.group_sizes, prefetch=self.settings.prefetch)


def miss_rate(hot_slots: int, selected: int) -> float:
    """Expected share of selected records that miss."""
    return _MISS_AT_K * (hot_slots / selected) ** _MISS_EXPONENT


def memory_bytes(option: str, count: float) -> int:
    """A size of memory that something can be planned for.

    Raises:
      UserError: it is not more than 0, or not a number; `option` is what gives it.
    """
    if not (count > 0 and isfinite(count)):
        raise UserError(f"{option} must be more than 0 and finite, got {count / GIB:g}")
    return int(count)


def plan(sizes: Sizes, settings: Settings, machine: Machine) -> Plan:
    """Plans a model's cache on a machine.

    Raises:
      UserError: sizes that do not go together, or parameters that do not fit.
    """
    memory_bytes("--device-gib", machine.device_bytes)
    memory_bytes("--host-gib", machine.host_bytes)
    if machine.devices < 1:
        raise UserError(f"--devices must be at least 1, got {machine.devices}")
    if settings.context_tokens > sizes.max_tokens:
        raise UserError(
            f"the context of {settings.context_tokens} tokens is longer than the {sizes.max_tokens} of {sizes.name}"
        )
    usable = int(machine.device_bytes * (1 - machine.reserved))
    left = usable - sizes.parameter_bytes // machine.devices
    if left <= 0:
        at_least = -(-sizes.parameter_bytes // max(usable, 1))
        raise UserError(
            f"the parameters of {sizes.name} take {gib(sizes.parameter_bytes // machine.devices)} of each of "
            f"{machine.devices} x {machine.name}, and {gib(usable)} can be used: split them over {at_least} or more"
        )
    scratch = sizes.scratch_bytes(settings.context_tokens, settings.prefill_chunk)
    left -= scratch
    try:
        full = _need(sizes, settings, machine, "full", left, settings.hot_slots)
        sparse = _need(sizes, settings, machine, "hisparse", left, settings.hot_slots)
    except ValueError as error:
        setting = str(error).split()[0] in {field.name for field in fields(CacheConfig)}
        raise UserError(f"cache.{error}" if setting else f"the cache can't be planned: {error}") from error
    records = -(-settings.context_tokens // sizes.record_tokens)
    most = min(MAX_HOT_SLOTS, max(records, sizes.selected))
    slots = [int(sizes.selected * ratio) for ratio in _HOT_PER_SELECTED]
    choices = {
        hot: _need(sizes, settings, machine, "hisparse", left, hot)
        for hot in slots
        if sizes.selected <= hot <= most
    }  # fmt: skip
    fitting = [hot for hot, need in choices.items() if need.most_requests]
    best = max(fitting, key=lambda hot: (choices[hot].tokens_per_s, -hot), default=None)
    return Plan(sizes, settings, machine, scratch, left, full, sparse, choices, best)


def _need(
    sizes: Sizes, settings: Settings, machine: Machine, residency: Residency, cache_bytes: int, hot_slots: int
) -> Need:
    records = -(-settings.context_tokens // sizes.record_tokens)
    layout = Layout(
        residency=residency,
        request_slots=1,
        context_tokens=settings.context_tokens,
        record_tokens=sizes.record_tokens,
        row_bytes=sizes.row_bytes,
        group_sizes=sizes.group_sizes,
        selected=sizes.selected,
        hot_slots=hot_slots,
        ring_slots=settings.ring_slots,
        page_records=settings.page_records,
        host_pages=-(-records // settings.page_records),
    )
    if layout.is_full:
        device = {"rows": layout.device_bytes()["rows"]}
    else:
        per_slot = sizes.layers * sizes.row_bytes
        device = {"hot rows": per_slot * hot_slots, "ring rows": per_slot * settings.ring_slots}
    device["index keys"] = records * sizes.tables * sizes.index_key_bytes
    if sizes.index_scale_bytes:
        device["index scales"] = records * sizes.tables * sizes.index_scale_bytes
    device["tables"] = layout.device_bytes()["metadata"]
    host = layout.host_bytes()
    fits = {"device": max(cache_bytes, 0) // sum(device.values())}
    if host:
        fits["host"] = machine.host_bytes // host
    limited_by = min(fits, key=lambda name: fits[name])
    requests = fits[limited_by]
    return Need(device, host, requests, limited_by, _step_s(sizes, machine, requests, records, residency, hot_slots))


def _step_s(sizes: Sizes, machine: Machine, requests: int, records: int, residency: Residency, hot_slots: int) -> float:
    """Bound of a step: all memory read once; an anchor's misses exposed, its followers' hidden behind that."""
    if not requests:
        return 0.0
    attended = min(sizes.selected, records)
    per_request = (
        sizes.layers * attended * sizes.row_bytes
        + sizes.tables * records * (sizes.index_key_bytes + sizes.index_scale_bytes)
    )  # fmt: skip
    read_s = (sizes.parameter_bytes / machine.devices + requests * per_request) / (machine.memory_gb_s * 1e9)
    if residency == "full" or records <= hot_slots:
        return read_s
    missed = attended * miss_rate(hot_slots, sizes.selected) * sizes.row_bytes * requests
    link = machine.link_gb_s * 1e9
    anchors_s, followers_s = sizes.tables * missed / link, (sizes.layers - sizes.tables) * missed / link
    return anchors_s + max(read_s, followers_s)


def show(plan: Plan, console: Console) -> None:
    """Prints a plan as tables."""
    console.print(Group(_sizes_table(plan), _need_table(plan), _fetch_table(plan), _choice_table(plan)))
    full, sparse = plan.full, plan.hisparse
    alone = full.device["rows"] + full.device["index keys"]
    resident = sum(size for name, size in sparse.device.items() if name.startswith("index"))
    grows_not = sparse.device_bytes - resident
    console.print(
        f"One request of {plan.settings.context_tokens:,} tokens takes {_gb(full.device_bytes)} on the device in full "
        f"residency ({_gb(alone)} without scales and tables). With hisparse it takes {_gb(sparse.device_bytes)}: "
        f"{_gb(grows_not)} of rows and tables that don't grow with the context, and {_gb(resident)} of index state "
        f"that does and stays there; its rows take {_gb(sparse.host)} of host memory."
    )
    if plan.recommended_hot_slots is None:
        console.print(_nothing_fits(plan))
        return
    console.print(
        f"Recommended hot slots: [bold]{plan.recommended_hot_slots}[/bold] (K = {plan.sizes.selected}). Times are "
        "bounds from bandwidths, not forecasts."
    )


def _nothing_fits(plan: Plan) -> str:
    """Why not even one request fits with the fewest hot slots, by the largest thing that it needs."""
    hot, need = min(plan.choices.items())
    if need.limited_by == "host":
        where, have, parts = "in host memory", plan.machine.host_bytes, {"host pool": need.host}
        remedy = "give --host-gib or a shorter --context-tokens"
    else:
        where, have = "on the device beside the parameters", plan.cache_bytes + plan.scratch_bytes
        parts = {_SCRATCH: plan.scratch_bytes, **need.device}
        remedy = "give more --devices or --device-gib, or a shorter --context-tokens"
    largest = max(parts, key=lambda name: parts[name])
    instead = f" In full residency {plan.full.most_requests:,} fit." if plan.full.most_requests else ""
    return (
        f"[bold red]nothing fits:[/bold red] one request of {plan.settings.context_tokens:,} tokens with {hot} hot "
        f"slots needs {_gb(sum(parts.values()))} {where}, and there is {_gb(have)}; the largest need is "
        f"{largest.split(',')[0]} with "
        f"{_gb(parts[largest])}: {remedy}.{instead}"
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.3f} GB" if count < 2e9 else f"{count / 1e9:.2f} GB"


def _sizes_table(plan: Plan) -> Table:
    sizes, machine = plan.sizes, plan.machine
    per = f"{sizes.record_tokens} tokens" if sizes.record_tokens > 1 else "token"
    table = Table("what", "size", title=f"{sizes.name} on {machine.devices} x {machine.name}", title_justify="left")
    left, reserved = _gb(max(plan.cache_bytes, 0)), f"{machine.reserved:.0%} reserved"
    rows = {
        f"row, per {per} and layer": f"{sizes.row_bytes:,} B",
        f"index key, per {per} and anchor": f"{sizes.index_key_bytes:,} B + {sizes.index_scale_bytes} B of scale",
        f"rows, per {per}": f"{sizes.layers} layers, {sizes.layers * sizes.row_bytes:,} B",
        f"index keys, per {per}": f"{sizes.tables} anchors, {sizes.tables * sizes.index_key_bytes:,} B",
        "parameters": f"{_gb(sizes.parameter_bytes)}, {_gb(sizes.parameter_bytes // machine.devices)} on each device",
        "left for caches": f"{left} of {_gb(machine.device_bytes)} ({reserved})",
        "host memory": _gb(machine.host_bytes),
        "link": f"{machine.link_gb_s:g} GB/s ({machine.source})",
    }
    for what, size in rows.items():
        table.add_row(what, size)
    return table


def _need_table(plan: Plan) -> Table:
    needs = {"full": plan.full, f"hisparse, {plan.settings.hot_slots} hot slots": plan.hisparse}
    title = f"one request of {plan.settings.context_tokens:,} tokens"
    table = Table("", *needs, title=title, title_justify="left")
    for name in dict.fromkeys(name for need in needs.values() for name in need.device):
        table.add_row(name, *(_gb(need.device[name]) if name in need.device else "" for need in needs.values()))
    table.add_row("[bold]on the device[/bold]", *(f"[bold]{_gb(need.device_bytes)}[/bold]" for need in needs.values()))
    table.add_row(_SCRATCH, *(_gb(plan.scratch_bytes) for _ in needs))
    table.add_row("in host memory", *(_gb(need.host) for need in needs.values()))
    table.add_row("most requests", *(f"{n.most_requests:,} ({n.limited_by} is full)" for n in needs.values()))
    table.add_row("step, at least", *(f"{n.step_s * 1e3:.2f} ms" if n.most_requests else "" for n in needs.values()))
    table.add_row("tokens/s, at most", *(f"{n.tokens_per_s:,.0f}" if n.most_requests else "" for n in needs.values()))
    return table


def _fetch_table(plan: Plan) -> Table:
    """Groups of one size together; the full schedule is `plan.fetches`."""
    table = Table("layers of a group", "groups", "anchors", "fetches issued, layers ahead",
                  title=f"prefetch schedule: {plan.settings.prefetch}", title_justify="left")  # fmt: skip
    anchors: dict[int, list[int]] = {}
    sizes = Counter(fetch.anchor for fetch in plan.fetches)
    for anchor, size in sizes.items():
        anchors.setdefault(size, []).append(anchor)
    for size, layers in anchors.items():
        ahead = [fetch.layers_ahead for fetch in plan.fetches if fetch.anchor == layers[0]]
        some = ", ".join(map(str, layers[:4])) + (f", ... {layers[-1]}" if len(layers) > 4 else "")
        table.add_row(str(size), str(len(layers)), some, ", ".join(map(str, ahead)))
    return table


def _choice_table(plan: Plan) -> Table:
    table = Table("hot slots", "expected misses", "a request on the device", "most requests", "tokens/s, at most",
                  title="choice of hot slots", title_justify="left")  # fmt: skip
    for hot, need in plan.choices.items():
        mark = "[bold]" if hot == plan.recommended_hot_slots else ""
        row = (f"{hot}", f"{miss_rate(hot, plan.sizes.selected):.1%}", _gb(need.device_bytes),
               f"{need.most_requests} ({need.limited_by})", f"{need.tokens_per_s:,.0f}")  # fmt: skip
        table.add_row(*(mark + cell for cell in row))
    return table
