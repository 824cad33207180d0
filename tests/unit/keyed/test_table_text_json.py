"""Tables as JSON."""

from __future__ import annotations

import json

from dprobes.keyed.table_entries import TableStore
from dprobes.keyed.table_text import table_json_lines
from dprobes.rpn.keyed_tables import Key, KeyKind, Range, Table, TableKind, Unit


def lines(table: Table, *tallies: tuple[bytes, int]) -> list[object]:
    store = TableStore(table)
    for key, value in tallies:
        store.tally(key, value)
    return [json.loads(line) for line in table_json_lines(store.contents())]


def test_an_object_for_each_row() -> None:
    table = Table("hits", TableKind.COUNT, (Key(KeyKind.STRING, 8), Key(KeyKind.WORD)), room=2)
    keys = [text.ljust(16, b"\0") + (3).to_bytes(8, "little") for text in (b"a", b'\xff"', b"c")]
    assert lines(table, (keys[0], 0), (keys[0], 0), (keys[1], 0), (keys[2], 0)) == [
        {"table": "hits", "kind": "count", "keys": ['\\xff"', 3], "value": 1},
        {"table": "hits", "kind": "count", "keys": ["a", 3], "value": 2},
        {"table": "hits", "kind": "count", "lost": 1},
    ]


def test_strings_and_stacks_that_are_kept() -> None:
    store = TableStore(Table("name", TableKind.LAST, (Key(KeyKind.LONG),), value=Key(KeyKind.STRING, 5)))
    store.keep((3).to_bytes(8, "little"), b"caf\xc3\xa9\0\0\0")
    stacks = TableStore(Table("stack", TableKind.LAST, value=Key(KeyKind.FRAMES, 3)))
    stacks.keep(b"", (0x1000).to_bytes(8, "little") + bytes(16))
    assert [json.loads(line) for each in (store, stacks) for line in table_json_lines(each.contents())] == [
        {"table": "name", "kind": "last", "keys": [3], "value": "café"},
        {"table": "stack", "kind": "last", "keys": [], "value": ["0x1000"]},
    ]


def test_statistics_and_histograms() -> None:
    assert lines(Table("s", TableKind.STATS, unit=Unit.BYTES), (b"", 1), (b"", 4)) == [
        {"table": "s", "kind": "stats", "unit": "bytes", "keys": [], "count": 2, "sum": 5, "min": 1, "max": 4,
         "average": 2.5}
    ]  # fmt: skip
    assert lines(Table("h", TableKind.LHIST, range=Range(0, 10, 5)), (b"", -1), (b"", 4), (b"", 4)) == [
        {"table": "h", "kind": "lhist", "keys": [], "count": 3, "buckets": [[None, 0, 1], [0, 5, 2]],
         "estimates": {"p50": 1.25, "p90": 4, "p99": 4}}
    ]  # fmt: skip
