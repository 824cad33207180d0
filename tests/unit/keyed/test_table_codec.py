"""Tables as bytes: what is written is read, and hostile bytes are refused."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import FormatError
from dprobes.keyed.table_codec import decode_tables, encode_tables, parse_statement
from dprobes.keyed.table_entries import TableStore
from dprobes.keyed.table_layout import TableContents, TableRow
from dprobes.rpn.keyed_tables import Key, KeyKind, Range, Table, TableKind, Unit

TABLES = (
    Table("a", TableKind.COUNT, (Key(KeyKind.WORD), Key(KeyKind.STRING, 5), Key(KeyKind.COMM)), room=3),
    Table("b_2", TableKind.LHIST, (), Range(-10, 25, 10), unit=Unit.NANOSECONDS),
    Table("c", TableKind.STATS, (Key(KeyKind.USER_STACK, 2), Key(KeyKind.KERNEL_STACK, 127)), unit=Unit.BYTES),
    Table("d", TableKind.HIST, (Key(KeyKind.ADDRESS),)),
    Table("e", TableKind.SUM, (Key(KeyKind.LONG), Key(KeyKind.TEXT, 9)), value=Key(KeyKind.LONG)),
    Table("f", TableKind.LAST, (Key(KeyKind.FRAMES, 3),), room=5, unit=Unit.BYTES, value=Key(KeyKind.STRING, 12)),
    Table("g", TableKind.LAST, value=Key(KeyKind.KERNEL_STACK, 2)),
)


def filled() -> tuple[TableContents, ...]:
    found = []
    for table in TABLES:
        store = TableStore(table)
        for number in range(5):
            if table.keeps_bytes:
                store.keep(bytes([number + 1]) * table.key_size, bytes([number + 65]) * 2 + bytes(table.kept_bytes - 2))
                continue
            store.tally(bytes([number + 1]) * table.key_size, number - 2)
        found.append(store.contents())
    return tuple(found)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_statement_is_what_was_printed(table: Table) -> None:
    assert parse_statement(str(table)) == table


def test_what_was_written_is_read() -> None:
    assert decode_tables(encode_tables(filled())) == filled()
    assert decode_tables(encode_tables(())) == ()


def test_the_bytes_are_those_of_the_documentation() -> None:
    table = Table("a", TableKind.SUM, (Key(KeyKind.WORD),))
    data = encode_tables([TableContents(table, (TableRow((7).to_bytes(8, "little"), (9,)),), 2)])
    text = b"a, sum, word"
    assert data == struct.pack("<II12sQIQQ", 1, len(text), text, 2, 1, 7, 9)


@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused_or_are_tables(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        decode_tables(data)


@given(cut=st.integers(0, 2000), changed=st.integers(0, 2000), value=st.integers(0, 255))
def test_damaged_bytes_are_refused_or_are_tables(cut: int, changed: int, value: int) -> None:
    data = bytearray(encode_tables(filled()))
    data[changed % len(data)] = value
    for damaged in (bytes(data), bytes(data[: cut % len(data)])):
        with contextlib.suppress(FormatError):
            decode_tables(damaged)


def test_an_error_says_what_is_wrong() -> None:
    with pytest.raises(FormatError) as caught:
        decode_tables(encode_tables(()) + b"x")
    assert caught.value.message == "the bytes are not keyed tables: 1 bytes are left"


@pytest.mark.parametrize(
    "text",
    ["", "a", "A, count", "a, counts", "a, count, str[513]", "a, count(1, 2, 3)", "a, sum, word[5]"],
)
def test_other_statements_are_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse_statement(text)
