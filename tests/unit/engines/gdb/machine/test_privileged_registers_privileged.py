"""Registers that only the system sees, and segmented addresses by descriptor tables and in real mode."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, cast

import pytest

from dprobes.engines.gdb.machine.privileged_registers import CPUID, RDMSR, Privileged, Segment, SystemRegisters
from dprobes.engines.gdb.remote_protocol import ThreadId
from dprobes.vm import SelectorFault

if TYPE_CHECKING:
    from dprobes.engines.gdb.machine.machine_target import MachineTarget
    from dprobes.engines.gdb.machine.privileged_registers import Executor, Monitor
    from dprobes.engines.gdb.stub_registers import Registers

GDT, LDT = 0x1000, 0x2000
THREAD = ThreadId(1, 2)
LONG = 1 << 21
KERNEL, USER = 0x10, 0x33


def descriptor(base: int, limit: int, kind: int, flags: int) -> bytes:
    """Return a descriptor: type and S, DPL and P in ``kind``, G, D, L and AVL in ``flags`` (Intel SDM, figure 3-8)."""
    low = limit & 0xFFFF | (base & 0xFFFF) << 16
    high = base >> 16 & 0xFF | kind << 8 | (limit >> 16 & 0xF) << 16 | flags << 20 | base & 0xFF000000
    return struct.pack("<II", low, high)


TABLE = b"".join(
    (
        bytes(8),
        descriptor(0x12345678, 0xFFF, 0x93, 0x4),  # 0x08: data, in bytes
        descriptor(0x100, 0xFFFFF, 0x9B, 0xC),  # 0x10: code that can be read, in pages
        descriptor(0, 0xFFFFF, 0x99, 0xC),  # 0x18: code that can be executed only
        descriptor(0, 0xFFFFF, 0x91, 0xC),  # 0x20: data that can be read only
        descriptor(0, 0xFFFFF, 0x13, 0xC),  # 0x28: not present
        descriptor(0, 0xFFFFF, 0x8B, 0xC),  # 0x30: a task
    )
)
LOCAL = descriptor(0x7000, 0xF, 0xF3, 0x4)


class Machine:
    """Memory with descriptor tables, and a monitor that counts questions."""

    def __init__(self, *, is_long: bool) -> None:
        self.asked: list[int] = []
        code = Segment(KERNEL, 0x500, 0xFFFFFFFF, LONG if is_long else 0)
        self.system = SystemRegisters(
            {"cs": code, "ldt": Segment(0x48, LDT, 7, 0), "tr": Segment(0x40, 0, 0x67, 0)},
            {"gdt": (GDT, len(TABLE) - 1), "idt": (0x3000, 0xFFF)},
            {"dr0": 5, "dr7": 0x400},
        )

    def system_registers(self, processor: int) -> SystemRegisters:
        self.asked.append(processor)
        return self.system

    def read(self, address: int, size: int) -> bytes:
        for start, table in ((GDT, TABLE + bytes(64)), (LDT, LOCAL + bytes(64))):
            if start <= address < start + len(table):
                return table[address - start :][:size]
        return b""


class Known(dict[str, int]):
    """Registers by name."""

    def value(self, name: str) -> int:
        return self.get(name, 0)


class Processor:
    """Execute ``cpuid`` and ``rdmsr``."""

    def execute(self, code: bytes, thread: object, inputs: dict[str, int], outputs: tuple[str, ...]) -> tuple[int, ...]:
        assert thread == THREAD
        if code == CPUID:
            assert outputs == ("rdx", "rcx", "rbx", "rax")
            return (4 | 1 << 40, 3, 2, inputs["rax"] + 1)
        assert (code, outputs) == (RDMSR, ("rdx", "rax"))
        return 0xAB, inputs["rcx"]


def privileged(machine: Machine, *, executes: bool = True) -> Privileged:
    executor = cast("Executor", Processor()) if executes else None
    return Privileged(cast("MachineTarget", machine), cast("Monitor", machine), executor)


def registers(**values: int) -> Registers:
    return cast("Registers", Known({"cr0": 1, "cs": KERNEL} | values))


def test_the_monitor_is_asked_once_for_each_stop_and_processor() -> None:
    machine = Machine(is_long=True)
    found = privileged(machine)
    assert [found.value(name, THREAD) for name in ("dr0", "dr1", "dr7", "tr", "ldtr")] == [5, 0, 0x400, 0x40, 0x48]
    assert found.table("gdt", THREAD) == (GDT, len(TABLE) - 1)
    assert machine.asked == [1]
    found.value("tr", ThreadId(1, 1))
    found.forget()
    found.value("tr", ThreadId(1, 1))
    assert machine.asked == [1, 0, 0]


def test_registers_of_several_values() -> None:
    found = privileged(Machine(is_long=True))
    assert found.selected("idtr", 0, THREAD, registers()) == (0x3000, 0xFFF)
    assert found.selected("cpuid", 0x1_0000_0007, THREAD, registers()) == (4, 3, 2, 8)
    assert found.selected("msr", 0x1B, THREAD, registers()) == (0xAB << 32 | 0x1B,)


def test_what_no_instruction_can_be_executed_for() -> None:
    found = privileged(Machine(is_long=True))
    assert found.selected("cpuid", 7, THREAD, registers(cs=USER)) == (0, 0, 0, 0)
    assert found.selected("msr", 0x1B, THREAD, registers(cs=USER)) == (0,)
    assert found.selected("msr", 0xC0000080, THREAD, registers(cs=USER, efer=0xD01)) == (0xD01,)
    assert privileged(Machine(is_long=True), executes=False).selected("msr", 0x1B, THREAD, registers()) == (0,)


def test_where_code_is() -> None:
    assert privileged(Machine(is_long=True)).code_base(THREAD) == 0
    assert privileged(Machine(is_long=False)).code_base(THREAD) == 0x500


def linear(
    selector: int, offset: int, size: int = 4, *, is_long: bool = False, write: bool = False, **values: int
) -> int:
    found = privileged(Machine(is_long=is_long))
    return found.linear_address(selector, offset, size, THREAD, registers(**values), write=write)


def test_a_selector_of_real_mode() -> None:
    assert linear(0xF000, 0x1FFF0, cr0=0) == 0xFFFF0


def test_a_segment_has_its_base_but_in_long_mode() -> None:
    assert linear(0x08, 0x10) == 0x12345688
    assert linear(0x08, 0x10, is_long=True) == 0x10
    assert linear(0x04, 0x8) == 0x7008  # of the local table
    assert linear(0x2B, 0x10, is_long=True, fs=0x2B, fs_base=0x7F00) == 0x7F10


def test_limits_are_bytes_or_pages() -> None:
    assert linear(0x08, 0xFFC) == 0x12345678 + 0xFFC
    assert linear(0x10, 0xFFFFFFFC) == 0x1_0000_00FC
    assert linear(0x08, 0xFFD, is_long=True) == 0xFFD
    for selector, offset in ((0x08, 0xFFD), (0x04, 0xD)):
        with pytest.raises(SelectorFault):
            linear(selector, offset)


@pytest.mark.parametrize(
    ("selector", "write"),
    [(0, False), (3, False), (0x18, False), (0x28, False), (0x30, False), (0x10, True), (0x20, True), (0x38, False)],
)
def test_what_a_segment_does_not_allow(selector: int, write: bool) -> None:
    with pytest.raises(SelectorFault):
        linear(selector, 0, write=write)


def test_what_it_allows() -> None:
    assert linear(0x20, 8) == 8
    assert linear(0x18, 8, size=0) == 8  # an address alone
    assert linear(0x08, 8, write=True) == 0x12345680
