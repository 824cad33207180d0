"""The binary record: layout byte by byte, and round trips for every shape."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import FormatError
from dprobes.record.log_record import FIXED_ITEMS, Item, LogRecord, decode_record, encode_record, time_of
from support.record_strategies import records

if TYPE_CHECKING:
    from dprobes.record.log_record import ByteOrder


def test_items_follow_the_flag_word_in_the_papers_order() -> None:
    record = LogRecord(
        major=1, minor=2, cpu=3, pid=4, uid=5, cs=6, ip=7, ss=8, sp=9, time=10, process_name="ls", tid=11,
        data=b"\xaa", word_size=4, byte_order="big",
    )  # fmt: skip
    expected = bytes.fromhex(
        "000027ff 00000001 00000002 00000003 00000004 00000005 00000006 00000007 00000008 00000009"
        "000000000000000a 6c7300 0000000b aa"
    )
    assert expected == encode_record(record)


def test_words_of_8_bytes_widen_ip_and_sp_only() -> None:
    record = LogRecord(major=1, minor=2, cs=0x33, ip=0x1122334455667788, sp=1)
    expected = bytes.fromhex("63090000 01000000 02000000 33000000 8877665544332211 0100000000000000")
    assert expected == encode_record(record)
    assert int.from_bytes(expected[:4], "little") == Item.MAJOR | Item.MINOR | Item.CS | Item.IP | Item.SP | Item.WIDE


@given(records())
def test_decoding_gives_back_what_was_encoded(record: LogRecord) -> None:
    assert record == decode_record(encode_record(record))


def test_every_flag_word_has_its_shape_in_both_byte_orders() -> None:
    # What each item of a record holds: its place in the paper's table.
    values = {Item(1 << n): n + 1 for n in range(10)} | {Item.PROCESS_NAME: "comm", Item.TID: 14}
    fields = dict(zip(values, (*(name for _, name in FIXED_ITEMS), "process_name", "tid"), strict=True))
    orders: tuple[ByteOrder, ...] = ("little", "big")
    for flags in range(1 << 14):
        chosen: dict[str, Any] = {fields[item]: value for item, value in values.items() if flags & item}
        for order in orders:
            record = LogRecord(
                **chosen,
                data=b"data",
                word_size=8 if flags & Item.WIDE else 4,
                byte_order=order if flags else "little",  # a flag word that is zero tells no order
                is_stack_trace=bool(flags & Item.STACK_TRACE),
            )
            encoded = encode_record(record)
            assert int.from_bytes(encoded[:4], record.byte_order) == flags
            assert decode_record(encoded) == record
            assert time_of(encoded) == record.time


def test_a_process_name_ends_where_it_has_to() -> None:
    assert decode_record(encode_record(LogRecord(process_name="sixteen-letters-", data=b"x"))).process_name == (
        "sixteen-letters"
    )
    assert decode_record(encode_record(LogRecord(process_name="a\0b", data=b"x"))) == LogRecord(
        process_name="a", data=b"x"
    )
    undecodable = b"\xff\xfe".decode("utf-8", "surrogateescape")
    assert decode_record(encode_record(LogRecord(process_name=undecodable))).process_name == undecodable


@given(st.binary(max_size=80))
def test_the_time_of_arbitrary_bytes_is_that_of_the_record_if_they_are_one(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        assert decode_record(data).time == time_of(data)


@given(st.binary(max_size=80))
def test_arbitrary_bytes_decode_or_are_refused(data: bytes) -> None:
    try:
        record = decode_record(data)
    except FormatError:
        return
    assert data == encode_record(record)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\1\0", "a record of 2 bytes has no flag word (at byte 0)"),
        (b"\0\x80\0\0", "unknown flags 0x8000 in a record (at byte 0)"),
        (b"\3\0\0\0\1\0\0\0", "a record needs 12 bytes, found 8 (at byte 8)"),
        (b"\0\4\0\0abc", "the process name of a record has no end (at byte 4)"),
        (b"\0\x20\0\0abc", "a record ends in its thread id (at byte 4)"),
    ],
)
def test_each_defect_has_its_message_and_place(data: bytes, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        decode_record(data)
    assert message == str(caught.value)
