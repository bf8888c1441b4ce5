# SPDX-License-Identifier: Apache-2.0
"""Shapes and exact bytes of a cache, known before anything is allocated. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from jax import Array

Residency = Literal["full", "hisparse", "no_io"]

MAX_HOT_SLOTS = 32767  # recency is int16


class Address(NamedTuple):
    """Where one layer (or one KV group of it) keeps its things.

    Attributes:
      space: its rows in the host pool.
      table: the table it shares with its selection group.
      position: its place in that group: 0 for the anchor, 1.. for its followers; picks the hot buffer. Always static.
      group: its index in that hot buffer.
    """

    space: int | Array
    table: int | Array
    position: int
    group: int | Array


class Records(NamedTuple):
    """What a model stores and selects.

    Attributes:
      record_tokens: tokens of one record.
      row_bytes: bytes of one record in one space.
      group_sizes: for each table, how many spaces share it.
      selected: K, the width of a selection.
    """

    record_tokens: int
    row_bytes: int
    group_sizes: tuple[int, ...]
    selected: int


@dataclass(frozen=True)
class Layout:
    """Everything static about a cache. Ids, lengths, K, H and W count records.

    Attributes:
      residency: "full" (every row on the device), "hisparse", or "no_io" (hisparse that moves no bytes: a timing
        bound whose output is invalid).
      request_slots: R, requests decoded together.
      context_tokens: longest history of a request, in tokens.
      record_tokens: tokens of one record (1 for MLA, the page size for Quest).
      row_bytes: bytes of one record in one space, a multiple of 8.
      group_sizes: for each table, how many spaces share it; spaces are numbered in this order.
      selected: K, the width of a selection.
      hot_slots: H, replaceable slots of a request.
      ring_slots: W, slots for the newest records.
      page_records: records of one page of the host pool.
      host_pages: pages of the host pool, shared by all requests; every page holds its records for all spaces.
    """

    residency: Residency
    request_slots: int
    context_tokens: int
    record_tokens: int
    row_bytes: int
    group_sizes: tuple[int, ...]
    selected: int
    hot_slots: int
    ring_slots: int
    page_records: int
    host_pages: int

    def __post_init__(self) -> None:
        sizes = ("request_slots", "context_tokens", "record_tokens", "selected", "ring_slots", "page_records")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.group_sizes or min(self.group_sizes) < 1:
            raise ValueError(f"group_sizes must name at least one group of at least one space, got {self.group_sizes}")
        if self.row_bytes < 8 or self.row_bytes % 8:
            raise ValueError(f"row_bytes must be a positive multiple of 8, got {self.row_bytes}")
        if self.residency == "full":
            return
        if self.hot_slots < self.selected:
            raise ValueError(f"hot_slots must be at least the {self.selected} selected records, got {self.hot_slots}")
        if self.hot_slots > MAX_HOT_SLOTS:
            raise ValueError(f"hot_slots must be at most {MAX_HOT_SLOTS} (recency is int16), got {self.hot_slots}")
        if self.host_pages < self.pages_per_request:
            raise ValueError(
                f"host_pages must hold at least one request of {self.context_tokens} tokens, "
                f"{self.pages_per_request} pages of {self.page_records} records; got {self.host_pages}"
            )
        if self.pool_rows >= 2**31:
            raise ValueError(
                f"the host pool would have {self.pool_rows} rows, more than int32 can number; lower host_pages"
            )

    @property
    def records(self) -> int:
        """S: the most records of a request."""
        return -(-self.context_tokens // self.record_tokens)

    @property
    def words(self) -> int:
        """Words of 4 bytes in a row."""
        return self.row_bytes // 4

    @property
    def tables(self) -> int:
        return len(self.group_sizes)

    @property
    def spaces(self) -> int:
        return sum(self.group_sizes)

    @property
    def is_full(self) -> bool:
        return self.residency == "full"

    @property
    def slots_per_request(self) -> int:
        return self.records if self.is_full else self.hot_slots + self.ring_slots

    @property
    def table_slots(self) -> int:
        """Hot slots of a request that a table tells of: H, none in full residency."""
        return 0 if self.is_full else self.hot_slots

    @property
    def pages_per_request(self) -> int:
        """Pages of the host pool that a request needs at most, none in full residency."""
        return 0 if self.is_full else -(-self.records // self.page_records)

    @property
    def rows_per_space(self) -> int:
        """Rows of the host pool that belong to one space."""
        return 0 if self.is_full else self.host_pages * self.page_records

    @property
    def pool_rows(self) -> int:
        """Rows of the host pool, each of `words` words: those of all spaces, none in full residency."""
        return self.spaces * self.rows_per_space

    def addresses(self) -> tuple[Address, ...]:
        """The address of every space, in order."""
        found, filled = [], [0] * max(self.group_sizes)
        for table, size in enumerate(self.group_sizes):
            for position in range(size):
                found.append(Address(len(found), table, position, filled[position]))
                filled[position] += 1
        return tuple(found)

    def spaces_at(self, position: int) -> tuple[int, ...]:
        """The spaces whose rows are in the hot buffer of this position, in the order of its groups."""
        return tuple(space for space, address in enumerate(self.addresses()) if address.position == position)

    def groups_at(self, position: int) -> int:
        """How many groups have a space at this position: the length of that hot buffer."""
        return sum(size > position for size in self.group_sizes)

    def device_bytes(self) -> dict[str, int]:
        """Bytes on the device by use, without the index state (its owner knows it) and prefill scratch."""
        slots = self.request_slots * self.slots_per_request
        tables = self.tables * self.request_slots * self.table_slots * (4 + 2)
        pages = self.request_slots * self.pages_per_request * 4
        counters = self.tables * self.request_slots * 3 * 4
        return {
            "rows": self.spaces * slots * self.row_bytes,
            "metadata": tables + pages + counters + self.request_slots * (4 + 1),
        }

    def host_bytes(self) -> int:
        """Bytes of the host pool."""
        return self.pool_rows * self.row_bytes


@dataclass(frozen=True)
class Budget:
    """What a run needs and what there is, in bytes.

    Attributes:
      device: needs on the device by name.
      host: needs in pinned host memory by name.
      device_limit: bytes there are on the device, or None if unknown.
      host_limit: bytes of host memory there are, or None if unknown.
      shared: whether device and host are one memory, as on a CPU.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    device_limit: int | None = None
    host_limit: int | None = None
    shared: bool = False

    def check(self) -> None:
        """Raises MemoryError, with need, have and the settings to change, if something does not fit."""
        both = {**self.device, **self.host}
        kinds = [("host", both, self.host_limit)]
        if not self.shared:
            kinds = [("device", self.device, self.device_limit), ("host", self.host, self.host_limit)]
        for where, parts, have in kinds:
            need = sum(parts.values())
            if have is not None and need > have:
                largest = max(parts, key=lambda name: parts[name])
                raise MemoryError(
                    f"the run needs {gib(need)} of {where} memory and there is {gib(have)}; the largest part is "
                    f"{largest} with {gib(parts[largest])}: {_REMEDIES.get(largest, 'lower cache.request_slots')}"
                )


_REMEDIES = {
    "parameters": "take a smaller model or model.dtype bfloat16",
    "rows": "lower cache.request_slots, cache.context_tokens or cache.hot_slots",
    "index": "lower cache.request_slots or cache.context_tokens",
    "prefill scratch": "lower cache.context_tokens",
    "host pool": "lower cache.host_pages, cache.request_slots or cache.context_tokens",
}


def gib(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
