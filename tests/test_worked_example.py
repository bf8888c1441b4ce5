# SPDX-License-Identifier: Apache-2.0
"""The page that explains the cache shows what the library does, and what the simulator says it should."""

import re

import numpy as np

from docs import worked_example as example
from tests import oracles


def test_the_page_is_what_the_code_makes():
    page = example.PAGE.read_text()
    assert page == example.with_table(page), "run `python docs/worked_example.py`"


def test_the_table_is_the_simulators():
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in example.table().splitlines()[2:]]
    assert len(rows) == 10
    table, length = oracles.admitted_table(example.ADMITTED, 4), example.ADMITTED
    misses = 0
    for number, (row, selected) in enumerate(zip(rows, example.SELECTED, strict=True), 1):
        length += 1
        done = oracles.resolve_row(np.array(selected, np.int32), length, table, hot_slots=4, ring_slots=1)
        table = done.table
        newest = oracles.newest_slot(length, 4, 1)
        assert row[:2] == [str(number), str(length)]
        assert row[2] == f"{length - 1} to {'ring' if newest == 4 else f'slot {newest}'}"
        assert row[3] == " ".join(map(str, selected))
        places = re.findall(r"(\d+): (?:\*\*miss\*\*, )?(slot \d|ring)", row[4])
        want = [(str(i), "ring" if slot == 4 else f"slot {slot}") for i, slot in zip(selected, done.slots, strict=True)]
        assert places == want
        moved = [f"{i} to slot {s}" for i, s in zip(done.missed, done.missed_slots, strict=True) if i >= 0]
        assert row[5] == (", ".join(moved) or "none") and row[4].count("miss") == done.misses
        assert row[6] == " ".join(map(str, table.ids)) and row[7] == " ".join(map(str, table.recency))
        misses += done.misses
    assert misses == 7


def test_the_example_shows_what_the_text_says():
    """The remarks under the table name steps; these are the facts they rest on."""
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in example.table().splitlines()[2:]]
    order = [[int(slot) for slot in row[7].split()] for row in rows]
    assert rows[0][5] == "none" and order[0] == [0, 1, 2, 3]
    assert rows[1][2] == "4 to ring" and order[1] == [1, 2, 0, 3]
    assert rows[2][5] == "4 to slot 2" and order[2] == [0, 3, 2, 1]
    assert rows[3][5] == "none" and order[3] == [0, 3, 2, 1]
    assert rows[4][5] == "5 to slot 3" and rows[3][6].split()[3] == "3"
    assert rows[6][5] == "2 to slot 1, 6 to slot 0" and order[5][:2] == [1, 0]
    assert rows[5][6].split()[1] == "1" and rows[8][5].startswith("1 to slot 3")
