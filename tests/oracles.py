# SPDX-License-Identifier: Apache-2.0
"""The cache in plain NumPy: what every implementation has to agree with, to the last bit.

Nothing of the project is imported, and nothing is clever: loops over requests, places and slots, in the order in which
the contract states them. Part one is the bookkeeping of one request (`resolve_row`), part two the whole cache with its
bytes (`Cache`), part three the mathematics around it in float64 (Quest bounds, exact top-k, attention over pages).

Words: a *record* is a row of fixed bytes with an id; `length` counts records with the newest one, so an active request
has length >= 1. A request owns H replaceable *slots* 0..H-1 and W *ring* slots H..H+W-1. A *table* says which record
each replaceable slot holds and in which order slots may be given up. -1 means nothing, everywhere.
"""

from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

EMPTY = -1


# --- the bookkeeping of one request ---------------------------------------------------------------------------------


@dataclass
class Table:
    """Which record each replaceable slot holds, and the slots in the order in which they may be given up."""

    ids: np.ndarray  # int32 [H], -1 empty
    recency: np.ndarray  # int16 [H], a permutation of 0..H-1, first to go first

    def copy(self) -> "Table":
        return Table(self.ids.copy(), self.recency.copy())


@dataclass
class Resolved:
    """What a resolve of one request says: a place for every selected record, the rows to fetch, the new table."""

    slots: np.ndarray  # int32 [K], in the order of the selection
    missed: np.ndarray  # int32 [K], ids to fetch, ascending, -1 padded
    missed_slots: np.ndarray  # int32 [K], where each of them goes, -1 padded
    hits: int  # found in place, in the table or in the ring; hits + misses = number selected
    ring_hits: int  # those of the hits that were found in the ring
    misses: int
    table: Table


def admitted_table(length: int, hot_slots: int) -> Table:
    """The table right after admission: rows in place while the request is short, cold otherwise."""
    in_place = length <= hot_slots
    ids = np.arange(hot_slots, dtype=np.int32) if in_place else np.full(hot_slots, EMPTY, np.int32)
    return Table(ids, np.arange(hot_slots, dtype=np.int16))


def ring_range(length: int, hot_slots: int, ring_slots: int) -> range:
    """Ids in the ring of a request; a short request has none."""
    return range(max(hot_slots, length - ring_slots), length)


def slot_without_table(record: int, length: int, hot_slots: int, ring_slots: int) -> int:
    """The slot that follows from id and length alone: in place when short, the ring when recent; -1 otherwise."""
    if length <= hot_slots:
        return record
    if record in ring_range(length, hot_slots, ring_slots):
        return hot_slots + record % ring_slots
    return EMPTY


def newest_slot(length: int, hot_slots: int, ring_slots: int) -> int:
    """Where append puts the newest record (id `length - 1`)."""
    return slot_without_table(length - 1, length, hot_slots, ring_slots)


def hit_first_lru(old_order: list[int], hit: set[int], loaded: list[int]) -> list[int]:
    """Hits outrank what was just loaded: [kept] [loaded, in miss order] [hit, in the old order]."""
    kept = [slot for slot in old_order if slot not in hit and slot not in loaded]
    return kept + loaded + [slot for slot in old_order if slot in hit]


def plain_lru(old_order: list[int], hit: set[int], loaded: list[int]) -> list[int]:
    """What the step used is equally recent, hit or loaded: [kept] [used, in the old order]."""
    used = hit | set(loaded)
    return [slot for slot in old_order if slot not in used] + [slot for slot in old_order if slot in used]


def fifo(old_order: list[int], hit: set[int], loaded: list[int]) -> list[int]:
    """Only loading moves a slot: the one filled first is the first to go (unless it is hit in this very step)."""
    return [slot for slot in old_order if slot not in loaded] + loaded


RULES = {"hit_first_lru": hit_first_lru, "plain_lru": plain_lru, "fifo": fifo}


def resolve_row(
    selected: np.ndarray, length: int, table: Table, *, hot_slots: int, ring_slots: int, rule=hit_first_lru
) -> Resolved:
    """Give every selected record of one request a slot. `length` 0 means that the row is not active."""
    width = len(selected)
    slots = np.full(width, EMPTY, np.int32)
    missed = np.full(width, EMPTY, np.int32)
    missed_slots = np.full(width, EMPTY, np.int32)
    if length == 0:
        return Resolved(slots, missed, missed_slots, 0, 0, 0, table.copy())

    held = {int(record): slot for slot, record in enumerate(table.ids) if record != EMPTY}
    chosen = [int(record) for record in selected if record != EMPTY]
    assert chosen == sorted(set(chosen)), "a selection is ascending and without duplicates"
    assert all(0 <= record < length for record in chosen), "a selection names records that exist"

    hit, ring_hits, waiting = set(), 0, []  # slots of the table that were hit; places that miss
    for place, record in enumerate(chosen):
        slot = slot_without_table(record, length, hot_slots, ring_slots)
        if slot != EMPTY:
            slots[place] = slot
            ring_hits += slot >= hot_slots
        elif record in held:
            slots[place] = held[record]
            hit.add(held[record])
        else:
            waiting.append(place)
    if length <= hot_slots:
        return Resolved(slots, missed, missed_slots, len(chosen), 0, 0, table.copy())

    old_order = [int(slot) for slot in table.recency]
    victims = [slot for slot in old_order if slot not in hit]
    new = table.copy()
    loaded = []
    for m, place in enumerate(waiting):
        slot = victims[m]
        slots[place] = slot
        missed[m], missed_slots[m] = chosen[place], slot
        new.ids[slot] = chosen[place]
        loaded.append(slot)
    new.recency = np.array(rule(old_order, hit, loaded), np.int16)
    return Resolved(slots, missed, missed_slots, len(chosen) - len(waiting), ring_hits, len(waiting), new)


def count_misses(trace, lengths, table: Table, *, hot_slots: int, ring_slots: int, rule) -> list[int]:
    """Misses of every step of a recorded trace of one request, from a given table."""
    counts = []
    for selected, length in zip(trace, lengths, strict=True):
        done = resolve_row(selected, length, table, hot_slots=hot_slots, ring_slots=ring_slots, rule=rule)
        table = done.table
        counts.append(done.misses)
    return counts


def fewest_misses(trace, lengths, table: Table, *, hot_slots: int, ring_slots: int) -> int:
    """The least number of misses any rule of replacement could have, by trying all of them: for tiny traces only.

    Whatever the rule, a step ends with all its records in their slots, and loads nothing that it does not use.
    """
    states = {frozenset(int(record) for record in table.ids if record != EMPTY): 0}
    for selected, length in zip(trace, lengths, strict=True):
        if length <= hot_slots:
            continue
        ring = ring_range(length, hot_slots, ring_slots)
        needed = frozenset(int(record) for record in selected if record != EMPTY and int(record) not in ring)
        following: dict[frozenset, int] = {}
        for held, cost in states.items():
            for kept in _subsets(held - needed, hot_slots - len(needed)):
                after, total = needed | kept, cost + len(needed - held)
                following[after] = min(total, following.get(after, total))
        states = following
    return min(states.values())


def _subsets(records: frozenset, room: int) -> list[frozenset]:
    """The largest subsets that fit; smaller ones are never better."""
    size = min(room, len(records))
    return [frozenset(choice) for choice in combinations(sorted(records), size)]


# --- the whole cache, with its bytes --------------------------------------------------------------------------------


@dataclass
class Group:
    """Layers that share one selection: row spaces of the anchor and its followers, and the index of their table."""

    table: int
    spaces: list[int]  # the anchor's first


@dataclass
class Cache:
    """The state of R request slots, every row a vector of 32-bit words.

    `pool` holds the rows that were written, by (space, host page, offset in the page); `hot[space]` is
    `[R, H + W, words]`; `tables[table][request]` is a `Table`; `history` is what a cache that never moved a row
    would hold, by request, space and record. A follower's space has hot rows and host rows of its own and no table.
    """

    requests: int
    hot_slots: int
    ring_slots: int
    row_words: int
    groups: list[Group]
    page_records: int
    record_tokens: int = 1
    rule: object = hit_first_lru
    pool: dict = field(default_factory=dict)
    hot: dict = field(default_factory=dict)
    tables: dict = field(default_factory=dict)
    pages: list = field(default_factory=list)
    tokens: list = field(default_factory=list)
    history: list = field(default_factory=list)

    def __post_init__(self):
        self.spaces = sorted(space for group in self.groups for space in group.spaces)
        empty = np.zeros((self.requests, self.hot_slots + self.ring_slots, self.row_words), np.uint32)
        self.hot = {space: empty.copy() for space in self.spaces}
        self.tables = {
            group.table: [admitted_table(self.hot_slots + 1, self.hot_slots) for _ in range(self.requests)]
            for group in self.groups
        }
        self.pages = [[] for _ in range(self.requests)]
        self.tokens = [0] * self.requests
        self.history = [{space: {} for space in self.spaces} for _ in range(self.requests)]

    # lengths

    def length(self, request: int) -> int:
        """Records with the newest one, which may be open: tokens rounded up to whole records."""
        return -(-self.tokens[request] // self.record_tokens)

    def closed(self, request: int) -> int:
        """Records that are full: the only ones that have to be in the host pool."""
        return self.tokens[request] // self.record_tokens

    # host pool

    def place(self, request: int, record: int) -> tuple[int, int]:
        """Host page and offset in it of a record; the same for every space."""
        return self.pages[request][record // self.page_records], record % self.page_records

    def host_row(self, space: int, request: int, record: int) -> np.ndarray:
        page, offset = self.place(request, record)
        return self.pool[(space, page, offset)]

    # what happens to a request

    def admit(self, request: int, pages: list[int], rows: dict[int, np.ndarray], tokens: int) -> None:
        """Take a prefilled request in: `rows[space]` is uint32 `[records, words]`, the last one perhaps open."""
        assert not self.pages[request], "the slot is taken"
        assert tokens >= 1
        assert len(set(pages)) == len(pages) and not set(pages) & {p for held in self.pages for p in held}
        self.pages[request], self.tokens[request] = list(pages), tokens
        length, hot, ring = self.length(request), self.hot_slots, self.ring_slots
        for space in self.spaces:
            self.history[request][space] = {record: rows[space][record].copy() for record in range(length)}
            for record in range(self.closed(request)):
                page, offset = self.place(request, record)
                self.pool[(space, page, offset)] = rows[space][record].copy()
            for record in range(length):
                slot = slot_without_table(record, length, hot, ring)
                if slot != EMPTY:
                    self.hot[space][request, slot] = rows[space][record]
        for table in self.tables.values():
            table[request] = admitted_table(length, hot)

    def append(self, request: int, words: dict[int, np.ndarray]) -> None:
        """One more token: `words[space]` is its part of the newest record, `row_words / record_tokens` words."""
        part = self.row_words // self.record_tokens
        start = self.tokens[request] % self.record_tokens * part
        self.tokens[request] += 1
        newest = self.length(request) - 1
        slot = newest_slot(self.length(request), self.hot_slots, self.ring_slots)
        for space in self.spaces:
            row = self.history[request][space].setdefault(newest, np.zeros(self.row_words, np.uint32))
            row[start : start + part] = words[space]
            self.hot[space][request, slot, start : start + part] = words[space]

    def resolve(self, request: int, group: Group, selected: np.ndarray, *, active: bool = True) -> Resolved:
        """Places for one request's selection in one group; the table changes, no row moves."""
        tables = self.tables[group.table]
        length = self.length(request) if active else 0
        done = resolve_row(
            selected,
            length,
            tables[request],
            hot_slots=self.hot_slots,
            ring_slots=self.ring_slots,
            rule=self.rule,
        )
        tables[request] = done.table
        return done

    def fetch(self, request: int, space: int, done: Resolved) -> None:
        """Bring the missed rows of one space in; a follower replays its anchor's plan on its own rows."""
        for record, slot in zip(done.missed, done.missed_slots, strict=True):
            if record != EMPTY:
                self.hot[space][request, slot] = self.host_row(space, request, int(record))

    def backup(self, request: int) -> None:
        """At the end of a step, write the newest record to the pool if this step's token has closed it."""
        if self.tokens[request] % self.record_tokens:
            return
        newest = self.length(request) - 1
        slot = newest_slot(self.length(request), self.hot_slots, self.ring_slots)
        page, offset = self.place(request, newest)
        for space in self.spaces:
            self.pool[(space, page, offset)] = self.hot[space][request, slot].copy()

    def release(self, request: int) -> list[int]:
        """Forget a request, finished or cancelled; its pages go back to the allocator."""
        pages, self.pages[request] = self.pages[request], []
        self.tokens[request] = 0
        self.history[request] = {space: {} for space in self.spaces}
        for table in self.tables.values():
            table[request].ids[:] = EMPTY
        return pages


# --- the mathematics around the cache, in float64 -------------------------------------------------------------------


def top_k(scores: np.ndarray, visible: int, k: int, newest: int = 0) -> np.ndarray:
    """The k largest of `scores[:visible]`, equal scores to the lower position, ascending, -1 padded.

    The last `newest` of the visible ones are among them whatever their scores.
    """
    others = max(visible - newest, 0)
    order = sorted(range(others), key=lambda position: (-float(scores[position]), position))
    chosen = sorted(order[: k - newest]) + list(range(others, visible))
    return np.array(chosen + [EMPTY] * (k - len(chosen)), np.int32)


def quest_bound(query: np.ndarray, kmin: np.ndarray, kmax: np.ndarray) -> np.ndarray:
    """The most a page can score: `[width]` against `[pages, width]` minima and maxima of its keys."""
    query, kmin, kmax = (np.asarray(x, np.float64) for x in (query, kmin, kmax))
    return np.maximum(query * kmin, query * kmax).sum(-1)


def quest_rule_a_scores(query: np.ndarray, kmin: np.ndarray, kmax: np.ndarray) -> np.ndarray:
    """One score a page for all heads: query `[heads, width]`, bounds `[pages, kv_heads, width]`."""
    kv_heads = kmin.shape[1]
    means = np.asarray(query, np.float64).reshape(kv_heads, -1, query.shape[-1]).mean(1)
    return sum(quest_bound(means[kv], kmin[:, kv], kmax[:, kv]) for kv in range(kv_heads))


def quest_pages(scores: np.ndarray, pages: int, budget: int, recent: int) -> list[int]:
    """The last `recent` pages always, and the best `max(budget - recent, 1)` of the others; all when they fit."""
    if pages <= budget:
        return list(range(pages))
    others = pages - recent
    best = top_k(scores, others, max(budget - recent, 1))
    return [int(page) for page in best if page != EMPTY] + list(range(others, pages))


def quest_rule_b(query: np.ndarray, kmin: np.ndarray, kmax: np.ndarray, pages: int, budget: int) -> list[list[int]]:
    """Pages of each query head: the last page always and the best `budget - 1` of the others, head by head."""
    heads, kv_heads = query.shape[0], kmin.shape[1]
    chosen = []
    for head in range(heads):
        kv = head // (heads // kv_heads)
        chosen.append(quest_pages(quest_bound(query[head], kmin[:, kv], kmax[:, kv]), pages, budget, 1))
    return chosen


def attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    """Softmax attention of one query `[heads, width]` over keys and values `[tokens, kv_heads, width]`."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    heads, kv_heads = query.shape[0], keys.shape[1]
    out = np.zeros((heads, values.shape[-1]))
    for head in range(heads):
        kv = head // (heads // kv_heads)
        logits = scale * keys[:, kv] @ query[head]
        weights = np.exp(logits - logits.max())
        out[head] = weights / weights.sum() @ values[:, kv]
    return out


def page_attention(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    pages: list[int],
    page_tokens: int,
    tokens: int,
    scale: float,
) -> np.ndarray:
    """Attention over the tokens of the chosen pages, cut at `tokens`: keys and values of the whole history."""
    positions = [p * page_tokens + t for p in pages for t in range(page_tokens) if p * page_tokens + t < tokens]
    return attention(query, keys[positions], values[positions], scale)
