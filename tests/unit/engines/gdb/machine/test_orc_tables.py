"""Tables for walking up stacks, as kernels before and since Linux 6.4 have them."""

from __future__ import annotations

import struct

import pytest

from dprobes.engines.gdb.machine.orc_tables import OrcEntry, OrcKind, OrcLayout, OrcRegister, OrcTable
from dprobes.errors import TargetError

PRESENT, FORMER = OrcLayout(8, 3, None), OrcLayout(8, 2, 10)
ADDRESSES, ENTRIES = 0xFFFFFFFF82000000, 0xFFFFFFFF82100000
CODE = 0xFFFFFFFF81000000


def packed(sp: int, sp_offset: int, bp: int, bp_offset: int, kind: int, *, end: int = 0) -> bytes:
    return struct.pack("<hhH", sp_offset, bp_offset, sp | bp << 4 | kind << 8 | end << 10)


@pytest.mark.parametrize(
    ("layout", "number", "kind"),
    [
        (PRESENT, 0, OrcKind.UNDEFINED),
        (PRESENT, 1, OrcKind.END_OF_STACK),
        (PRESENT, 2, OrcKind.CALL),
        (PRESENT, 3, OrcKind.REGS),
        (PRESENT, 4, OrcKind.REGS_PARTIAL),
        (FORMER, 0, OrcKind.CALL),
        (FORMER, 1, OrcKind.REGS),
        (FORMER, 2, OrcKind.REGS_PARTIAL),
    ],
)
def test_an_entry_of_each_kind(layout: OrcLayout, number: int, kind: OrcKind) -> None:
    data = packed(OrcRegister.SP, 24, OrcRegister.PREV_SP, -16, number)
    assert layout.entry(data) == OrcEntry(OrcRegister.SP, 24, OrcRegister.PREV_SP, -16, kind)


def test_the_end_of_a_stack_was_a_bit() -> None:
    found = FORMER.entry(packed(OrcRegister.SP, 8, 0, 0, 1, end=1))
    assert found is not None
    assert found.kind is OrcKind.END_OF_STACK


def test_a_kind_that_there_is_not() -> None:
    assert PRESENT.entry(packed(5, 8, 0, 0, 5)) is None
    assert FORMER.entry(packed(5, 8, 0, 0, 3)) is None


class Memory:
    def __init__(self, starts: list[int]) -> None:
        numbers = [start - (ADDRESSES + 4 * place) for place, start in enumerate(starts)]
        entries = [packed(OrcRegister.SP, 8 * place, 0, 0, 2) for place in range(len(starts))]
        self.parts = {ADDRESSES: struct.pack(f"<{len(starts)}i", *numbers), ENTRIES: b"".join(entries)}
        self.reads = 0

    def read(self, address: int, size: int) -> bytes:
        self.reads += 1
        start = ENTRIES if address >= ENTRIES else ADDRESSES
        return self.parts[start][address - start : address - start + size]


def test_the_entry_for_an_address_is_the_last_one_before_it() -> None:
    memory = Memory([CODE + 16 * n for n in range(100)])
    table = OrcTable(memory.read, PRESENT, ADDRESSES, ENTRIES, 100)
    found = [table.entry_at(address) for address in (CODE, CODE + 15, CODE + 16, CODE + 0x1000)]
    assert [None if entry is None else entry.sp_offset for entry in found] == [0, 0, 8, 8 * 99]
    assert table.entry_at(CODE - 1) is None
    before = memory.reads
    assert table.entry_at(CODE + 15) == found[1]
    assert memory.reads == before


def test_a_table_that_cannot_be_read() -> None:
    table = OrcTable(lambda *_: b"", PRESENT, ADDRESSES, ENTRIES, 2)
    with pytest.raises(TargetError, match="an unwind table of the kernel at 0xffffffff82000004 cannot be read"):
        table.entry_at(CODE)
