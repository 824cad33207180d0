"""Rows of tables as single lines, with their data."""

from __future__ import annotations

from dprobes.keyed.table_entries import TableStore
from dprobes.keyed.table_text import ShownRow, shown_rows
from dprobes.rpn.keyed_tables import UNNAMED, Key, KeyKind, Table, TableKind


def word(number: int) -> bytes:
    return number.to_bytes(8, "little")


def test_a_row_is_a_line() -> None:
    store = TableStore(Table("hits", TableKind.COUNT, (Key(KeyKind.WORD), Key(KeyKind.WORD))))
    for _ in range(2):
        store.tally(word(3) + word(4))
    store.tally(word(5) + word(4))
    rows = list(shown_rows(store.contents()))
    assert [row.line for row in rows] == ["@hits[5, 4]: 1", "@hits[3, 4]: 2"]
    assert rows[1] == ShownRow("@hits[3, 4]", "2", ("3", "4"), {"value": 2})
    assert list(shown_rows(store.contents(), limit=1)) == rows[1:]


def test_a_histogram_is_a_line_too() -> None:
    store = TableStore(Table(UNNAMED, TableKind.HIST))
    for value in (1, 2, 3, 3):
        store.tally(b"", value)
    (row,) = shown_rows(store.contents())
    assert row.line == "@: [1] 1, [2, 4) 3; 4 in all; about p50 2.67, p90 3, p99 3"
    assert (row.value["count"], row.value["buckets"]) == (4, [[1, 2, 1], [2, 4, 3]])


def test_frames_are_in_the_line() -> None:
    store = TableStore(Table("s", TableKind.SUM, (Key(KeyKind.USER_STACK, 3),)))
    store.tally(word(7) + word(0x1000) + word(0x2000) + word(0), 5)
    (row,) = shown_rows(store.contents())
    assert row.line == "@s[0x1000; 0x2000]: 5"


def test_what_is_kept_is_in_the_line() -> None:
    names = TableStore(Table("n", TableKind.LAST, (Key(KeyKind.WORD),), value=Key(KeyKind.STRING, 7)))
    names.keep(word(5), b"a b".ljust(8, b"\0"))
    stacks = TableStore(Table("s", TableKind.LAST, value=Key(KeyKind.KERNEL_STACK, 3)))
    stacks.keep(b"", word(0x1000) + word(0x2000) + word(0))
    rows = [row for store in (names, stacks) for row in shown_rows(store.contents())]
    assert [row.line for row in rows] == ["@n[5]: a b", "@s: 0x1000; 0x2000"]
    assert [row.value for row in rows] == [{"value": "a b"}, {"value": ["0x1000", "0x2000"]}]


def test_what_found_no_room_is_the_last_line() -> None:
    store = TableStore(Table("n", TableKind.COUNT, (Key(KeyKind.WORD),), room=1))
    for number in (1, 2, 2):
        store.tally(word(number))
    *_, last = shown_rows(store.contents())
    assert last.line.startswith("@n: 2 values did not fit: the table has room for ")
    assert (last.keys, last.value) == ((), {"lost": 2})
