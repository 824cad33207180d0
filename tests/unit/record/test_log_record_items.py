"""Log buffers that describe themselves."""

from __future__ import annotations

import pytest

from dprobes.record.log_record import LogItem, split_items


def test_every_token_becomes_an_item() -> None:
    data = bytes.fromhex(
        "00 0300 414243"  # memory
        "01 0200 6869"  # string
        "ff 0400 00100000"  # fault at 0x1000
        "fe 0400 2b000000"  # selector fault
        "07 0200 01000000 02000000"  # log
        "05 0100 07000000"  # log lv
        "06 0100 08000000"  # log gv
        "08 0000"  # log cv, no entries
        "0b 0100 09000000"  # log tv
    )
    expected = [
        LogItem("memory", b"ABC"),
        LogItem("string", b"hi"),
        LogItem("fault", 0x1000),
        LogItem("selector fault", 0x2B),
        LogItem("stack", (1, 2)),
        LogItem("lv", (7,)),
        LogItem("gv", (8,)),
        LogItem("cv", ()),
        LogItem("tv", (9,)),
    ]
    assert expected == split_items(data, 4, "little")


def test_lengths_and_words_are_in_the_targets_byte_order() -> None:
    data = bytes.fromhex("05 0001 0000000000000009")
    assert [LogItem("lv", (9,))] == split_items(data, 8, "big")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        b"\x01\x05\x00abc",
        b"\x7f\x00\x00",
        b"\x01\x01\x00a\x02",
        b"\xff\x02\x00ab",
        bytes(8),  # a word of zeros: two empty memory items, and two bytes that belong to none
    ],
)
def test_anything_else_is_not_cut(data: bytes) -> None:
    assert split_items(data, 8, "little") is None
