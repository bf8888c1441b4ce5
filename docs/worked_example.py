# SPDX-License-Identifier: Apache-2.0
"""Ten steps of the cache at K = 3, H = 4, W = 1, run by the library and written into `cache.md` as a table.

`python docs/worked_example.py` writes the page anew; the tests check that it is what this file makes.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hisparse_jax import Address, Cache, Layout, admit, append, begin_step, create, end_step, entering, resolve

PAGE = Path(__file__).with_name("cache.md")
BEGIN, END = "<!-- worked example: begin -->\n", "<!-- worked example: end -->\n"

ADMITTED = 3
SELECTED = (
    (0, 1, 3), (0, 3, 4), (1, 4, 5), (1, 4, 6), (0, 5, 7), (4, 5, 8), (2, 6, 9), (6, 9, 10), (1, 4, 11), (1, 4, 12),
)  # fmt: skip
LAYOUT = Layout(
    residency="hisparse", request_slots=1, context_tokens=16, record_tokens=1, row_bytes=8, group_sizes=(1,),
    selected=3, hot_slots=4, ring_slots=1, page_records=4, host_pages=4,
)  # fmt: skip
LAYER = Address(space=0, table=0, position=0, group=0)


def row(record: jax.Array) -> jax.Array:
    """The bytes of a record: its number, twice."""
    return jnp.stack([record, record], axis=-1).astype(jnp.uint32)


@jax.jit
def admitted(cache: Cache) -> Cache:
    """A request of three records takes slot 0."""
    records = jnp.arange(LAYOUT.records, dtype=jnp.int32)
    pages = jnp.arange(LAYOUT.pages_per_request, dtype=jnp.int32)
    return admit(entering(cache), jnp.int32(0), pages, jnp.int32(ADMITTED), lambda space: row(records), (), "xla")


@jax.jit
def step(cache: Cache, selected: jax.Array) -> tuple[Cache, dict[str, jax.Array]]:
    """One step of the only layer, and what there is to see of it."""
    cache = begin_step(entering(cache), jnp.ones(1, jnp.bool_))
    cache = append(cache, LAYER, row(cache.length - 1))
    resolution, cache = resolve(cache, LAYER, selected, "xla")
    read = cache.hot_rows[0][0, resolution.place[0], 0]
    seen = {
        "newest": cache.newest[0], "place": resolution.place[0], "read": read, "fetched": resolution.plan.slot[0],
        "slot_ids": cache.slot_ids[0, 0], "recency": cache.recency[0, 0],
    }  # fmt: skip
    return end_step(cache, "xla"), seen


def table() -> str:
    """The ten steps as a Markdown table."""
    lines = [
        "| step | length | append | selected | found | fetched | slots 0 1 2 3 hold | to replace, first to last |",
        "|---|---|---|---|---|---|---|---|",
    ]
    hot_slots = LAYOUT.hot_slots
    cache = admitted(create(LAYOUT))
    for number, selected in enumerate(SELECTED, 1):
        cache, seen = step(cache, jnp.asarray([selected], jnp.int32))
        seen = {name: np.asarray(value).tolist() for name, value in seen.items()}
        assert seen["read"] == list(selected), "attention reads the records that were selected"
        length = int(cache.tokens[0])
        fetched = [slot for slot in seen["fetched"] if slot >= 0]

        def found(place: int, short: bool = length <= hot_slots, fetched: list[int] = fetched) -> str:
            if short:
                return f"slot {place}, in place"
            if place >= hot_slots:
                return "ring"
            return f"**miss**, slot {place}" if place in fetched else f"slot {place}"

        places = dict(zip(selected, seen["place"], strict=True))
        append_to = "ring" if seen["newest"] >= hot_slots else f"slot {seen['newest']}"
        moved = [
            f"{record} to slot {place}" for record, place in places.items() if length > hot_slots and place in fetched
        ]
        columns = (
            number,
            length,
            f"{length - 1} to {append_to}",
            " ".join(map(str, selected)),
            "; ".join(f"{record}: {found(place)}" for record, place in places.items()),
            ", ".join(moved) or "none",
            " ".join(map(str, seen["slot_ids"])),
            " ".join(map(str, seen["recency"])),
        )
        lines.append("| " + " | ".join(map(str, columns)) + " |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with a new table between its markers."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
