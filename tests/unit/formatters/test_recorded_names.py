"""The addresses in records that a trace file gets names for: those that are shown by name, and no others."""

from __future__ import annotations

import ctypes
import os
import time

from hypothesis import given
from hypothesis import strategies as st

from dprobes.formatters.recorded_names import RecordedNames
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import Place, RecordSource
from dprobes.record.record_rows import PackedRows
from dprobes.record.record_table import RecordTable, TableBytes, TablePlaces
from dprobes.rpn.instruction_set import StackEnd, Token

TEMPLATES = {"templates.lst": b"1 a.fmt\n", "a.fmt": b'major = 1\nminor = 1\nfmt = "%a %d"\nminor = 2\nfmt = "%d"\n'}
SOURCE = RecordSource(1, "libc.so.6", "libc.so.6", 1, templates=TEMPLATES, derived={8: 'minor = 4\nfmt = "%*k"\n'})
MALLOC, SAMPLE = Place("libc.so.6", "malloc"), Place("*", "99hz", is_code=False)


def address_of(function: str) -> int:
    address = ctypes.cast(getattr(ctypes.CDLL("libc.so.6"), function), ctypes.c_void_p).value
    assert address is not None
    return address


def record(minor: int, data: bytes, ip: int | None = None) -> bytes:
    mine = LogRecord(major=1, minor=minor, pid=os.getpid(), ip=ip, time=time.monotonic_ns(), data=data, word_size=8)
    return encode_record(mine)


def words(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def stack(*numbers: int) -> bytes:
    return bytes([Token.USER_STACK]) + len(numbers).to_bytes(2, "little") + words(*numbers)


def named(data: bytes, place: Place = MALLOC) -> set[str]:
    return {each.function.name for each in RecordedNames(SOURCE).located([data], [place]) if each.function is not None}


def test_addresses_of_templates_and_stacks_are_named() -> None:
    getpid, getppid = address_of("getpid"), address_of("getppid")
    assert named(record(1, words(getpid, getppid), address_of("malloc"))) == {"getpid"}
    assert named(record(2, words(getpid))) == set()
    for minor in (3, 4):  # with a derived template, and without any
        assert named(record(minor, stack(getpid, getppid + 1, StackEnd.NO_TABLE))) == {"getpid", "getppid"}
    assert named(record(3, words(getpid))) == set()


def test_where_a_sample_was_taken_is_named_and_a_probepoint_names_itself() -> None:
    getpid = address_of("getpid")
    assert named(record(2, words(1), getpid), SAMPLE) == {"getpid"}
    assert named(record(2, words(1), getpid), Place("libc.so.6", "malloc", at_return=True)) == {"getpid"}
    assert named(record(2, words(1), getpid), Place("libc.so.6", "0x1234")) == {"getpid"}
    assert named(record(2, words(1), getpid)) == set()


def test_what_is_no_record_is_left_to_others() -> None:
    assert RecordedNames(SOURCE).located([b"", b"\xff" * 40], [SAMPLE, SAMPLE]) == []


def test_return_addresses_are_looked_for_at_the_call() -> None:
    getpid = address_of("getpid")
    assert named(record(3, stack(address_of("getppid"), getpid))) == {"getppid", "getpid"}  # nothing is before it
    assert named(record(3, stack(getpid, StackEnd.UNREADABLE))) == {"getpid"}


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(0, 3)), min_size=1, max_size=30))
def test_of_packed_records_the_same_are_named(kinds: list[tuple[int, int]]) -> None:
    getpid, getppid = address_of("getpid"), address_of("getppid")
    data = [words(getpid, 9), words(9, 10), stack(getppid), bytes([Token.MEMORY, 0, 0]) + stack(getpid + 1)]
    records = [(0, record(minor, data[number])) for minor, number in kinds]
    packed = RecordTable.of_records(records)
    assert packed is not None
    names = RecordedNames(SOURCE)
    each = names.located([record for _, record in records], [MALLOC] * len(records))
    together = names.located(TableBytes(packed), TablePlaces(packed, [MALLOC]))
    assert {found.function for found in together} == {found.function for found in each}


def test_rows_with_call_stacks_are_found_by_columns() -> None:
    data = [stack(1), stack(1)[::-1], words(1, 9), b"\x01\x08\0" + words(9), b"\x0c" * 11]
    wanted = [n for n, each in enumerate(data) if len(each) == 11]
    packed = PackedRows.of_records([(0, record(3, data[n])) for n in wanted])
    assert packed is not None
    assert [wanted[row] for row in packed.rows_with_stacks()] == [0, 1, 3]
    short = PackedRows.of_records([(0, record(3, b""))])
    assert short is not None
    assert short.rows_with_stacks() == []
