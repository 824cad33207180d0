"""The parts of keys."""

from __future__ import annotations

from dprobes.keyed.table_layout import kept_part, parts_of
from dprobes.rpn.keyed_tables import Key, KeyKind, Table, TableKind


def test_parts_for_programs() -> None:
    table = Table("t", TableKind.COUNT, (Key(KeyKind.KERNEL_STACK, 3), Key(KeyKind.COMM), Key(KeyKind.WORD)))
    words = b"".join(word.to_bytes(8, "little") for word in (0x1000, 0x2000, 0))
    assert parts_of(table, words + b"caf\xc3\xa9".ljust(16, b"\0") + (5).to_bytes(8, "little")) == (
        ["0x1000", "0x2000"],
        "café",
        5,
    )


def test_what_is_kept() -> None:
    names = Table("n", TableKind.LAST, value=Key(KeyKind.TEXT, 7))
    assert kept_part(names, [int.from_bytes(b"ab\0\0\0\0\0\0", "little")]) == "ab"
    stacks = Table("s", TableKind.LAST, value=Key(KeyKind.FRAMES, 3))
    assert kept_part(stacks, [0x1000, 0x2000, 0]) == ["0x1000", "0x2000"]


def test_bytes_that_are_no_text_are_numbers() -> None:
    table = Table("t", TableKind.COUNT, (Key(KeyKind.BYTES, 5), Key(KeyKind.BYTES, 8), Key(KeyKind.WORD)))
    assert table.key_size == 24
    assert parts_of(table, b"a\0\\ ~~~~" + b"\x7f\xc3\xa9\n\x1fAZ\xff" + (5).to_bytes(8, "little")) == (
        r"a\x00\x5c ~",
        r"\x7f\xc3\xa9\x0a\x1fAZ\xff",
        5,
    )
