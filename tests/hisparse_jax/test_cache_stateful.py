# SPDX-License-Identifier: Apache-2.0
"""The whole cache through random lives of requests, against the NumPy simulator.

Hypothesis draws what a scheduler might do: admit a prefilled request to a slot, decode with any subset of the requests
and any selections, let requests finish or be cancelled, reuse slots and host pages. After every step the cache has to
be the simulator's to the last bit, and the invariants of the contract are checked on the cache's own arrays.
"""

from __future__ import annotations

import functools
from collections import Counter

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from hisparse_jax.cache.admission import admit, release
from hisparse_jax.cache.append import append
from hisparse_jax.cache.backup import end_step
from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.pages import HostPages
from hisparse_jax.cache.state import begin_step, create, entering, placements
from hisparse_jax.resolve import fetch, resolve
from tests.helpers import int32, layout, padded, pinned, same_bits, simulator

POISON = np.uint32(0xDEADBEEF)  # rows of the histories stay below 2^31, so that none of their words is this one

LAYOUTS = {
    "one token a record, the smallest ring": layout(
        record_tokens=1, context_tokens=24, group_sizes=(1, 1), ring_slots=1, page_records=3, host_pages=22
    ),
    "open records and a follower": layout(host_pages=16),
    "K is H, a ring wider than H, two followers": layout(
        record_tokens=4, context_tokens=64, group_sizes=(3, 1), hot_slots=3, ring_slots=5, page_records=1, host_pages=30
    ),
}


class Compiled:
    """The state-level functions of one layout, jitted as a decode loop would: placed, and with the cache donated."""

    def __init__(self, layout: Layout):
        self.layout = layout
        compile_ = functools.partial(jax.jit, donate_argnums=0)
        where = placements(create(layout))
        self.admit = compile_(self._admit, out_shardings=where)
        self.release = compile_(lambda cache, slot: release(entering(cache), slot), out_shardings=where)
        self.step = compile_(self._step, out_shardings=(where, None))

    @staticmethod
    def _admit(cache, slot, pages, tokens, rows):
        return admit(entering(cache), slot, pages, tokens, lambda space: rows[space], (), "xla")

    @staticmethod
    def _step(cache, active, token, selected):
        """A step of every layer: append, then resolve with fetch for an anchor and fetch alone for a follower."""
        cache = begin_step(entering(cache), active)
        found = {}
        for address in cache.layout.addresses():
            cache = append(cache, address, token[address.space])
            if address.position == 0:
                found[address.table], cache = resolve(cache, address, selected[address.table], "xla")
            else:
                cache, _ = fetch(cache, address, found[address.table].plan, "xla")
        counters = cache.counters
        return end_step(cache, "xla"), (list(found.values()), counters)


compiled = functools.cache(Compiled)


class Lives(RuleBasedStateMachine):
    """The cache and the simulator side by side."""

    def __init__(self, layout: Layout, events: Counter):
        super().__init__()
        self.layout, self.events, self.run = layout, events, compiled(layout)
        self.cache = create(layout)
        self.simulator = simulator(layout)
        self.pages = HostPages(layout.host_pages)
        self.room = [0] * layout.request_slots  # tokens that the pages of each request can hold
        self.used_pages: set[int] = set()
        self.rng = np.random.default_rng(0)
        self.part = layout.words // layout.record_tokens

    # what a scheduler may do --------------------------------------------------------------------------------------

    def free(self) -> list[int]:
        return [slot for slot, room in enumerate(self.room) if not room]

    def taken(self) -> list[int]:
        return [slot for slot, room in enumerate(self.room) if room]

    @precondition(lambda self: self.free())
    @rule(which=st.integers(0, 9), tokens=st.integers(1, 40), more=st.integers(1, 30), seed=st.integers(0, 2**16))
    def admit(self, which, tokens, more, seed):
        layout, self.rng = self.layout, np.random.default_rng(seed)
        slot = self.free()[which % len(self.free())]
        tokens = min(tokens, layout.context_tokens - 1)
        room = min(tokens + more, layout.context_tokens)
        records = -(-room // layout.record_tokens)
        count = -(-records // layout.page_records)
        if count > self.pages.free:
            with pytest.raises(MemoryError):
                self.pages.take(count)
            self.events["no pages"] += 1
            return
        pages = self.pages.take(count)
        self.events["page reused"] += bool(self.used_pages & set(pages))
        self.used_pages |= set(pages)
        self.room[slot] = room

        # Prefill leaves rows of the whole context; what lies behind the last token may be anything.
        rows = self.rng.integers(0, 2**31, (layout.spaces, layout.records, layout.words), dtype=np.uint32)
        by_token = rows.reshape(layout.spaces, -1, self.part)
        by_token[:, tokens:] = POISON
        self.cache = self.run.admit(
            self.cache,
            jnp.int32(slot),
            int32(pages + [-1] * (layout.pages_per_request - count)),
            jnp.int32(tokens),
            jnp.asarray(rows),
        )
        self.simulator.admit(slot, pages, dict(enumerate(rows)), tokens)
        self.events["admitted long" if self.simulator.length(slot) > layout.hot_slots else "admitted short"] += 1
        self.check_state()

    @precondition(lambda self: self.taken())
    @rule(data=st.data())
    def decode(self, data):
        for _ in range(data.draw(st.integers(1, 6), label="steps")):
            self.decode_step(data)

    def decode_step(self, data):
        layout, requests = self.layout, self.layout.request_slots
        wants = data.draw(st.lists(st.booleans() | st.just(True), min_size=requests, max_size=requests), label="active")
        active = [
            want and self.room[slot] > 0 and self.simulator.tokens[slot] < self.room[slot]
            for slot, want in enumerate(wants)
        ]
        ids = st.lists(st.integers(0, 31), max_size=layout.selected)
        drawn = data.draw(
            st.lists(ids, min_size=layout.tables * requests, max_size=layout.tables * requests), label="selected"
        )
        selected = np.full((layout.tables, requests, layout.selected), -1, np.int32)
        for number, chosen in enumerate(drawn):
            table, slot = divmod(number, requests)
            if active[slot]:
                length = -(-(self.simulator.tokens[slot] + 1) // layout.record_tokens)
                # The first numbers are the oldest records, the others the newest.
                chosen = [i % length if i < 16 else length - 1 - (i - 16) % length for i in chosen]
                selected[table, slot] = padded(chosen, layout.selected)
        token = self.rng.integers(0, 2**31, (layout.spaces, requests, self.part), dtype=np.uint32)

        before = np.array(self.cache.slot_ids)
        self.cache, (resolutions, counters) = self.run.step(
            self.cache, jnp.asarray(active), jnp.asarray(token), jnp.asarray(selected)
        )
        done = [self.simulate(slot, active[slot], token[:, slot], selected[:, slot]) for slot in range(requests)]
        for slot in range(requests):
            if active[slot]:
                self.simulator.backup(slot)
        self.check_outputs(active, selected, resolutions, np.asarray(counters), done)
        self.check_state()
        for table, slot in np.ndindex(layout.tables, requests):
            self.check_selected(table, slot, active[slot], selected[table, slot], resolutions[table], before)

    @precondition(lambda self: any(self.room[s] and self.simulator.tokens[s] == self.room[s] for s in self.taken()))
    @rule()
    def finish(self):
        slot = next(s for s in self.taken() if self.simulator.tokens[s] == self.room[s])
        self.events["finished"] += 1
        self.end(slot)

    @precondition(lambda self: len(self.taken()) == self.layout.request_slots)
    @rule(which=st.integers(0, 9))
    def cancel(self, which):
        self.events["cancelled"] += 1
        self.end(self.taken()[which % len(self.taken())])

    def end(self, slot: int) -> None:
        """Frees a slot and its pages, and poisons every row that the request could have left behind."""
        layout = self.layout
        self.cache = self.run.release(self.cache, jnp.int32(slot))
        pages = self.simulator.release(slot)
        self.pages.give_back(pages)
        with pytest.raises(ValueError, match="double free"):
            self.pages.give_back(pages[:1])
        self.room[slot] = 0
        start = slot * layout.slots_per_request
        hot_rows = tuple(
            rows.at[:, start : start + layout.slots_per_request].set(POISON) for rows in self.cache.hot_rows
        )
        pool = np.array(self.cache.pool).reshape(layout.spaces, layout.host_pages, layout.page_records, layout.words)
        pool[:, pages] = POISON
        pool = pinned(pool.reshape(-1, layout.words))
        self.cache = self.cache.replace(hot_rows=hot_rows, pool=pool)
        self.check_state()

    # what has to hold -----------------------------------------------------------------------------------------------

    def simulate(self, slot: int, active: bool, token: np.ndarray, selected: np.ndarray) -> list:
        """The same step in the simulator: one result of resolve for each table."""
        if active:
            self.simulator.append(slot, dict(enumerate(token)))
        done = []
        for group in self.simulator.groups:
            one = self.simulator.resolve(slot, group, selected[group.table], active=active)
            for space in group.spaces:
                self.simulator.fetch(slot, space, one)
            done.append(one)
        return done

    def check_outputs(self, active, selected, resolutions, counters, done) -> None:
        """Places, plans and counters are the simulator's."""
        layout = self.layout
        for table, resolution in enumerate(resolutions):
            per_table = [done[slot][table] for slot in range(layout.request_slots)]
            base = np.arange(layout.request_slots)[:, None] * layout.slots_per_request
            slots = np.stack([one.slots for one in per_table])
            same_bits(resolution.place, np.where(slots >= 0, base + slots, -1).astype(np.int32))
            same_bits(resolution.plan.slot, np.stack([one.missed_slots for one in per_table]))
            same_bits(resolution.plan.count, np.array([one.misses for one in per_table], np.int32))
            rows = [[self.host_row(slot, int(record)) for record in one.missed] for slot, one in enumerate(per_table)]
            same_bits(resolution.plan.host_row, np.array(rows, np.int32))
            want = np.array([[one.hits, one.ring_hits, one.misses] for one in per_table], np.int32)
            same_bits(counters[table], want)
            np.testing.assert_array_equal(want[:, 0] + want[:, 2], (selected[table] >= 0).sum(1))
            self.events.update({"hit": int(want[:, 0].sum()), "miss": int(want[:, 2].sum())})
            self.events["ring hit"] += int(want[:, 1].sum())
        self.events["step"] += any(active)
        self.events["occupied but inactive"] += any(bool(self.room[s]) and not on for s, on in enumerate(active))

    def host_row(self, slot: int, record: int) -> int:
        if record < 0:
            return -1
        page, offset = self.simulator.place(slot, record)
        return page * self.layout.page_records + offset

    def check_state(self) -> None:
        """Tables, pool and every row that the tables, the ring or the place claim to hold."""
        layout, sim = self.layout, self.simulator
        slot_ids, recency = np.asarray(self.cache.slot_ids), np.asarray(self.cache.recency)
        same_bits(self.cache.tokens, np.array(sim.tokens, np.int32))
        for table in range(layout.tables):
            same_bits(slot_ids[table], np.stack([one.ids for one in sim.tables[table]]))
            same_bits(recency[table], np.stack([one.recency for one in sim.tables[table]]))
        every_slot = np.arange(layout.hot_slots)
        assert (np.sort(recency, axis=-1) == every_slot).all(), "recency is a permutation"

        owned = [page for pages in sim.pages for page in pages]
        assert len(owned) == len(set(owned)) == layout.host_pages - self.pages.free, "a page has one owner"
        assert self.cache.pool.sharding.memory_kind == "pinned_host"
        pool = np.asarray(self.cache.pool).reshape(layout.spaces, layout.rows_per_space, layout.words)
        hot_rows = [np.asarray(rows) for rows in self.cache.hot_rows]
        for slot in self.taken():
            length, closed = sim.length(slot), sim.closed(slot)
            row_of = np.array([self.host_row(slot, record) for record in range(closed)], np.int32)
            for address in layout.addresses():
                history = sim.history[slot][address.space]
                full = np.array([history[record] for record in range(closed)], np.uint32).reshape(-1, layout.words)
                same_bits(pool[address.space, row_of], full)
                rows = hot_rows[address.position][address.group].reshape(layout.request_slots, -1, layout.words)[slot]
                held = self.held(slot, slot_ids[address.table, slot])
                assert len(set(held)) == len(held), "a record is in one slot"
                there = [place for place, record in held.items() if record < closed]
                if there:
                    same_bits(rows[there], pool[address.space, row_of[[held[place] for place in there]]])
                if closed < length:  # the newest record is open: only its tokens so far are defined
                    so_far = sim.tokens[slot] % layout.record_tokens * self.part
                    place = next(place for place, record in held.items() if record == length - 1)
                    same_bits(rows[place, :so_far], history[length - 1][:so_far])
                    self.events["open record"] += 1
            self.events["ring wrapped"] += length > layout.hot_slots + layout.ring_slots

    def held(self, slot: int, ids: np.ndarray) -> dict[int, int]:
        """What each slot of a request claims to hold, by its own tables and length."""
        layout, length = self.layout, self.simulator.length(slot)
        if length <= layout.hot_slots:
            return {record: record for record in range(length)}
        ring = range(max(layout.hot_slots, length - layout.ring_slots), length)
        table = {place: int(record) for place, record in enumerate(ids) if record >= 0}
        assert not set(table.values()) & set(ring), "an id is never in the ring and in the table at once"
        assert all(record < length for record in table.values())
        assert len(set(table.values())) == len(table), "a record is in one slot of the table"
        return table | {layout.hot_slots + record % layout.ring_slots: record for record in ring}

    def check_selected(self, table, slot, active, selected, resolution, before) -> None:
        """Every selected record is in exactly the slot that resolve named, and nothing hit was evicted."""
        if not active:
            return
        layout, sim = self.layout, self.simulator
        ids = np.asarray(self.cache.slot_ids)[table, slot]
        held = self.held(slot, ids)
        places = np.asarray(resolution.place)[slot] - slot * layout.slots_per_request
        chosen = [int(i) for i in selected if i >= 0]
        for record, place in zip(chosen, places, strict=False):
            assert [where for where, what in held.items() if what == record] == [place]
            tokens = min(sim.tokens[slot] - record * layout.record_tokens, layout.record_tokens) * self.part
            for space in sim.groups[table].spaces:
                address = layout.addresses()[space]
                got = np.asarray(self.cache.hot_rows[address.position])[
                    address.group, slot * layout.slots_per_request + place, :tokens
                ]
                assert POISON not in got, "nothing of an earlier request is visible"
                same_bits(got, sim.history[slot][space][record][:tokens])
        if sim.length(slot) > layout.hot_slots:
            for place, record in enumerate(before[table, slot]):
                if record >= 0 and record in chosen:
                    assert ids[place] == record, "no hit is evicted in its step"


EVENTS = (
    "step", "hit", "ring hit", "miss", "admitted long", "admitted short", "page reused", "no pages", "finished",
    "cancelled", "occupied but inactive", "ring wrapped",
)  # fmt: skip


def live(layout: Layout, examples: int, **settings) -> Counter:
    events: Counter = Counter()
    run_state_machine_as_test(
        lambda: Lives(layout, events),
        settings=hypothesis.settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            **settings,
        ),
    )
    expected = set(EVENTS) | ({"open record"} if layout.record_tokens > 1 else set())
    assert not expected - set(+events), f"never happened: {expected - set(+events)}"
    return events


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_random_lives(layout):
    assert live(layout, examples=45, derandomize=True)["step"] > 700


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_many_random_lives(layout):
    """10^5 steps in all, other ones every night."""
    assert live(layout, examples=1800, print_blob=True)["step"] > 25_000
