"""The entries of an interrupt descriptor table, of which those of faults are returned."""

from __future__ import annotations

import struct

from dprobes.engines.gdb.machine.privileged_registers import fault_entries

HANDLER = 0xFFFFFFFF81C00000


def gate(address: int, *, present: bool = True) -> bytes:
    low, middle, high = address & 0xFFFF, address >> 16 & 0xFFFF, address >> 32
    return struct.pack("<HHBBHII", low, 0x10, 0, 0x8E if present else 0, middle, high, 0)


def test_faults_begin_at_the_addresses_of_their_gates() -> None:
    table = b"".join(gate(HANDLER + 0x100 * number, present=number != 9) for number in range(256))
    found = fault_entries(lambda address, size: table[address - 0x1000 :][:size], 0x1000, 0xFFF)
    assert found == {HANDLER + 0x100 * number for number in range(32) if number not in (1, 2, 3, 4, 9, 18)}


def test_a_short_table_has_few() -> None:
    table = b"".join(gate(HANDLER + 0x100 * number) for number in range(256))
    assert fault_entries(lambda _, size: table[:size], 0, 0x1F) == {HANDLER}
    assert fault_entries(lambda *_: b"", 0, 0xFFF) == frozenset()
