"""Entries of a table in memory."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from dprobes.keyed.table_entries import TableReader, TableStore, cells_of
from dprobes.rpn.keyed_tables import Key, KeyKind, Table, TableKind

TABLE = Table("t", TableKind.SUM, (Key(KeyKind.WORD),), room=3)


def word(number: int) -> bytes:
    return struct.pack("=Q", number)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(-100, 100))))
def test_a_reader_sees_what_a_dictionary_would_hold(steps: list[tuple[bool, int, int]]) -> None:
    """Another object reads the same memory; the truth is a dictionary of three entries."""
    memory = memoryview(bytearray(8 * cells_of(TABLE))).cast("Q")
    store, reader = TableStore(TABLE, memory), TableReader(TABLE, memory)
    truth: dict[bytes, int] = {}
    lost = 0
    for deletes, number, value in steps:
        key = word(number)
        if deletes:
            store.delete(key)
            truth.pop(key, None)
        elif key in truth or len(truth) < 3:
            store.tally(key, value)
            truth[key] = truth.get(key, 0) + value
        else:
            store.tally(key, value)
            lost += 1
        assert store.value(key) == truth.get(key, 0)
    contents = reader.contents()
    assert {row.key: row.cells for row in contents.rows} == {k: (v & (1 << 64) - 1,) for k, v in truth.items()}
    assert contents.lost == lost


def test_a_table_without_keys_has_one_entry() -> None:
    table = Table("t", TableKind.COUNT)
    assert cells_of(table) == 4
    store = TableStore(table)
    store.tally(b"")
    store.tally(b"")
    assert [row.cells for row in store.contents().rows] == [(2,)]


def test_what_was_cleared_is_empty() -> None:
    store = TableStore(TABLE)
    for number in range(5):
        store.tally(word(number), 1)
    store.clear()
    assert store.contents().rows == ()
    assert store.contents().lost == 0
    store.tally(word(7), 2)
    assert [row.cells for row in store.contents().rows] == [(2,)]


def test_what_is_kept_takes_the_place_of_what_was() -> None:
    store = TableStore(Table("t", TableKind.LAST, (Key(KeyKind.WORD),), room=1, value=Key(KeyKind.STRING, 15)))
    first, second = (number.to_bytes(8, "little") for number in (1, 2))
    store.keep(first, b"abcdefghij".ljust(16, b"\0"))
    store.keep(first, b"xy".ljust(16, b"\0"))
    store.keep(second, b"z".ljust(16, b"\0"))
    assert (store.kept(first), store.kept(second), store.contents().lost) == (b"xy".ljust(16, b"\0"), bytes(16), 1)
