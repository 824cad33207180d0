"""The parts of keys."""

from __future__ import annotations

from dprobes.keyed.parts import parts_of
from dprobes.rpn.tables import Key, KeyKind, Table, TableKind


def test_parts_for_programs() -> None:
    table = Table("t", TableKind.COUNT, (Key(KeyKind.KERNEL_STACK, 3), Key(KeyKind.COMM), Key(KeyKind.WORD)))
    words = b"".join(word.to_bytes(8, "little") for word in (0x1000, 0x2000, 0))
    assert parts_of(table, words + b"caf\xc3\xa9".ljust(16, b"\0") + (5).to_bytes(8, "little")) == (
        ["0x1000", "0x2000"],
        "café",
        5,
    )
