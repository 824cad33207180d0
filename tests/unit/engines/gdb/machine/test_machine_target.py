"""Physical memory through a stub's packets, and what is set back before anything goes on."""

from __future__ import annotations

import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.gdb.machine.machine_target import MachineTarget, Paging
from dprobes.engines.gdb.remote_protocol import ThreadId
from dprobes.engines.gdb.stub_registers import RegisterPlace, TargetDescription
from dprobes.engines.gdb.stub_requests import Stub
from dprobes.errors import EngineError
from support.fake_stub import FakeStub

if TYPE_CHECKING:
    from collections.abc import Iterator

THREAD = ThreadId(1, 1)
NAMES = ("rip", "cr0", "cr3", "cr4", "efer")
DESCRIPTION = TargetDescription(
    "", {name: RegisterPlace(name, number, number * 8, 8) for number, name in enumerate(NAMES)}
)
ROOT = 0x1000
PRESENT, WRITABLE = 1, 2
KERNEL = 0xFFFFFFFF80000000
"""An address that only the kernel's own tables show."""
KERNEL_ROOT = 0x10000


class Machine:
    """Physical memory with page tables, in which 0x400000 is the page 0x5000 and 0x401000 the read-only one 0x6000."""

    def __init__(self) -> None:
        self.memory = bytearray(0x20000)
        self.is_physical = False
        self.mask = b"0x1"
        for root, address, page, flags in (
            (ROOT, 0x400000, 0x5000, PRESENT | WRITABLE),
            (ROOT, 0x401000, 0x6000, PRESENT),
            (KERNEL_ROOT, KERNEL, 0x7000, PRESENT | WRITABLE),
        ):
            table = root
            for level, shift in enumerate((39, 30, 21, 12)):
                place = table + (address >> shift & 511) * 8
                table += 0x1000
                entry = (page if level == 3 else table) | flags | PRESENT | WRITABLE * (level < 3)
                self.memory[place : place + 8] = struct.pack("<Q", entry)
        self.memory[0x5000:0x5004] = b"here"
        self.memory[0x6000:0x6004] = b"read"
        self.memory[0x7000:0x7004] = b"kern"

    def linear(self, address: int) -> int | None:
        return {0x400: 0x5000, 0x401: 0x6000}.get(address >> 12)

    def answer(self, payload: bytes) -> bytes | None:
        text = payload.decode("latin-1")
        if text == "qqemu.PhyMemMode":
            return b"%d" % self.is_physical
        if text.startswith("Qqemu.PhyMemMode:"):
            self.is_physical = text.endswith("1")
            return b"OK"
        if text == "qqemu.sstep":
            return self.mask
        if text.startswith("Qqemu.sstep="):
            self.mask = b"0x" + text.partition("=")[2].encode()
            return b"OK"
        if text == "g":
            return struct.pack("<5Q", 0x400000, 0x80000001, ROOT, 1 << 5, 1 << 10).hex().encode()
        if text[:1] in ("m", "M"):
            head, _, digits = text[1:].partition(":")
            start, size = (int(number, 16) for number in head.split(","))
            if not self.is_physical:
                page = self.linear(start)
                start = len(self.memory) if page is None else page + (start & 0xFFF)
            if start >= len(self.memory):
                return b"E14"
            if text[:1] == "m":
                return self.memory[start : start + size].hex().encode()
            self.memory[start : start + size] = bytes.fromhex(digits)
            return b"OK"
        if text.startswith("P"):
            return b"OK" if text.startswith("P0=") else b"E01"
        return b"OK" if text[:1] in ("D", "z") or text.startswith("Hg") else b""


@contextmanager
def target() -> Iterator[tuple[MachineTarget, Machine, FakeStub]]:
    machine = Machine()
    with FakeStub(machine.answer) as fake:
        stub = Stub(fake.transport)
        stub.start()
        yield MachineTarget(stub, "little", DESCRIPTION, b"\xcc"), machine, fake


def test_addresses_are_the_processors_unless_physical_ones_are_asked_for() -> None:
    with target() as (behind, machine, _):
        assert behind.read(0x400000, 4) == b"here"
        assert behind.read_physical(0x6000, 4) == b"read"
        assert machine.is_physical
        assert behind.read(0x401000, 4) == b"read"
        assert not machine.is_physical
        assert behind.read(0x402000, 4) == b""


def test_physical_memory_is_read_in_blocks_and_once() -> None:
    with target() as (behind, _, fake):
        behind.read_physical(0x5000, 8)
        before = len(fake.asked)
        assert behind.read_physical(0x5100, 16) == bytes(16)
        assert len(fake.asked) == before
        assert len(behind.read_physical(0x1FFF8, 16)) == 8  # where memory ends


def test_another_processor_has_other_memory_at_an_address() -> None:
    with target() as (machine, memory, _):
        machine.registers(THREAD)
        assert machine.read(0x400000, 4) == b"here"
        memory.memory[0x5000:0x5004] = b"away"
        machine.registers(THREAD)
        assert machine.read(0x400000, 4) == b"here", "the machine stands still"
        machine.registers(ThreadId(1, 2))
        assert machine.read(0x400000, 4) == b"away"


def test_what_was_written_is_read_then() -> None:
    with target() as (behind, machine, _):
        assert behind.read_physical(0x5000, 4) == b"here"
        assert behind.write_physical(0x5000, b"HERE")
        assert behind.read_physical(0x5000, 4) == b"HERE"
        assert behind.read(0x400000, 4) == b"HERE"
        assert machine.memory[0x5000:0x5004] == b"HERE"


def test_what_the_processor_could_not_write_is_not_written() -> None:
    with target() as (behind, machine, _):
        behind.registers(THREAD)
        assert behind.write(0x400000, b"new!")
        assert not behind.write(0x401000, b"new!")
        assert not behind.write(0x400FFE, b"new!")  # the second half
        assert not behind.write(0x402000, b"new!")
        assert machine.memory[0x6000:0x6004] == b"read"
        assert machine.memory[0x5FFE:0x6000] == bytes(2)


def test_memory_of_the_kernel_is_read_by_its_own_tables() -> None:
    with target() as (behind, _, __):
        assert behind.read(KERNEL, 4) == b""
    with target() as (behind, _, __):
        behind.kernel_tables = KERNEL_ROOT
        assert behind.read(KERNEL, 4) == b"kern"
        assert behind.read_large(KERNEL_ROOT, Paging.FOUR_LEVELS, KERNEL, 0x1000)[:4] == b"kern"
        assert len(behind.read_large(KERNEL_ROOT, Paging.FOUR_LEVELS, KERNEL, 0x2000)) == 0x1000


def test_where_an_address_is() -> None:
    with target() as (behind, _, __):
        registers = behind.registers(THREAD)
        found = behind.translate(registers, 0x400010)
        assert found is not None
        assert (found.physical, found.is_writable) == (0x5010, True)
        assert behind.translate(registers, 0x403000) is None


def test_only_registers_that_were_changed_are_set() -> None:
    with target() as (behind, _, fake):
        registers = behind.registers(THREAD)
        registers["rip"] = 0x1234
        behind.write_back(THREAD, registers)
        behind.stub.flush()
        assert [each for each in fake.asked if each[:1] in (b"P", b"G")] == [b"P0=3412000000000000"]


def test_a_register_that_the_stub_does_not_set() -> None:
    with target() as (behind, _, __):
        registers = behind.registers(THREAD)
        registers["cr3"] = 0
        with pytest.raises(EngineError, match="the stub fake does not set the register 'cr3'"):
            behind.write_back(THREAD, registers)


@pytest.mark.parametrize("leave", [MachineTarget.leave_standing, MachineTarget.let_go])
def test_steps_hold_interrupts_until_the_end(leave: object) -> None:
    assert callable(leave)
    with target() as (behind, machine, _):
        behind.hold_interrupts()
        assert machine.mask == b"0x7"
        behind.read_physical(0, 8)
        leave(behind)
        assert machine.mask == b"0x1"
        assert not machine.is_physical
