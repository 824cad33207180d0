"""Keyed tables on other kernels: maps for each CPU, in programs that may sleep and in those that may not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from guests.guest import Guest
    from integration.support import Builder

pytestmark = pytest.mark.shared_guest

SOURCE = """
name = "/tmp/tallied"
table = counts, count, str[20]
table = sums, sum, comm
table = all, stats, word
table = powers, hist
offset = event
    push r, arg1; tally counts
    push r, arg0; tally sums
    push 7; push r, arg0; tally all
    push r, arg0; tally powers
    push 7; push table, all; log 1
    exit
"""


def test_tables_hold_what_the_program_says(guest: Guest, build: Builder) -> None:
    guest.put("/tmp/tallied", build("tallied.c", "-pthread"))
    guest.put("/tmp/tables.rpn", SOURCE)
    done = guest.dprobes(
        "run", "/tmp/tables.rpn", "--engine", "ebpf", "--format", "json", "--", "/tmp/tallied", "90", "2"
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    tables = [row for row in rows if "table" in row]
    assert [row for row in tables if "lost" in row] == [], done.stderr
    truth = [line.split("|") for line in done.stderr.splitlines() if line.count("|") == 4]
    numbers = {name[:20]: [int(number) for number in found] for name, *found in truth}
    total = sum(found[1] for found in numbers.values())
    assert {row["keys"][0]: row["value"] for row in tables if row["table"] == "counts"} == {
        name: found[0] for name, found in numbers.items()
    }
    assert [row["value"] for row in tables if row["table"] == "sums"] == [total]
    (every,) = (row for row in tables if row["table"] == "all")
    assert (every["count"], every["sum"]) == (90, total)
    assert every["min"] == min(found[2] for found in numbers.values())
    assert every["max"] == max(found[3] for found in numbers.values())
    assert sum(row["count"] for row in tables if row["table"] == "powers") == 90
    assert len(rows) - len(tables) == 90
