"""Registers are found by name, memory is read in blocks and once, and breakpoints do not show in it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.engines.gdb.remote_protocol import Stopped, ThreadId, packet
from dprobes.engines.gdb.stub_registers import processor_of
from dprobes.engines.gdb.stub_requests import Stub
from dprobes.engines.gdb.stub_stepper import Emulator
from dprobes.engines.gdb.stub_target import StubTarget
from support.fake_stub import FakeStub

if TYPE_CHECKING:
    from collections.abc import Iterator

BASE = 0x1000
THREAD = ThreadId(0, 1)


class Machine:
    """Memory and registers of i386, without a description, and what breakpoints its stub knows."""

    def __init__(self, *, knows_breakpoints: bool, steps: bool = True) -> None:
        self.memory = bytearray(range(256)) * 2
        self.registers = bytearray(16 * 4)
        self.breakpoints: set[int] = set()
        self._knows_breakpoints = knows_breakpoints
        self._steps = steps
        self.stuck = 0
        self.running = False

    def set_pc(self, value: int) -> None:
        self.registers[32:36] = value.to_bytes(4, "little")

    @property
    def pc(self) -> int:
        return int.from_bytes(self.registers[32:36], "little")

    def answer(self, payload: bytes) -> bytes | None:
        text = payload.decode("latin-1")
        match text[:1]:
            case "m":
                start, size = (int(number, 16) for number in text[1:].split(","))
                data = self.memory[start - BASE :][:size] if BASE <= start < BASE + len(self.memory) else b""
                return data.hex().encode() or b"E14"
            case "M":
                head, _, digits = text[1:].partition(":")
                start = int(head.partition(",")[0], 16) - BASE
                self.memory[start : start + len(digits) // 2] = bytes.fromhex(digits)
                return b"OK"
            case "g":
                return self.registers.hex().encode()
            case "G":
                self.registers[:] = bytes.fromhex(text[1:])
                return b"OK"
            case "P":
                number, _, value = text[1:].partition("=")
                at = 4 * int(number, 16)
                self.registers[at : at + 4] = bytes.fromhex(value)
                return b"OK"
            case "Z" | "z" if self._knows_breakpoints and text[1] == "0":
                address = int(text.split(",")[1], 16)
                (self.breakpoints.add if text[0] == "Z" else self.breakpoints.discard)(address)
                return b"OK"
            case "D" | "H":
                return b"OK"
            case "c":
                return None
            case "s":
                if self.stuck:
                    self.stuck -= 1
                else:
                    self.set_pc(self.pc + 1)
                return b"S05"
        return b""


@contextmanager
def target_of(machine: Machine) -> Iterator[tuple[StubTarget, FakeStub]]:
    processor = processor_of(architecture("i386"))
    assert processor is not None
    with FakeStub(machine.answer) as fake:
        stub = Stub(fake.transport, 5)
        stub.start()
        yield StubTarget(stub, "little", processor.default_description(), processor.breakpoint), fake


def test_registers_by_name() -> None:
    machine = Machine(knows_breakpoints=True)
    machine.registers[:8] = bytes(range(8))
    with target_of(machine) as (target, fake):
        registers = target.registers(THREAD)
        assert registers["eax"] == 0x03020100
        assert registers["ecx"] == 0x07060504
        assert registers.value("rax") == 0
        assert "rax" not in registers
        registers["ebx"] = 0x1_8000_0001
        target.write_back(THREAD, registers)
        assert machine.registers[12:16] == b"\x01\0\0\x80"
        assert fake.asked[-1].startswith(b"P3=")
        for name in ("eax", "ecx", "edx", "ebx"):
            registers[name] = 5
        target.write_back(THREAD, registers)
        target.stub.ask("?")
        assert machine.registers[:16] == b"\5\0\0\0" * 4


def test_memory_is_read_in_blocks_and_once() -> None:
    machine = Machine(knows_breakpoints=True)
    with target_of(machine) as (target, fake):
        assert target.read(BASE + 60, 8) == bytes(range(60, 68))
        assert target.word(BASE + 4, 4) == 0x07060504
        assert [asked for asked in fake.asked if asked.startswith(b"m")] == [b"m1000,40", b"m1040,40"]
        assert target.write(BASE + 4, b"\xff")
        assert target.word(BASE + 4, 4) == 0x070605FF
        assert target.read(BASE + len(machine.memory) - 4, 8) == bytes(range(252, 256))
        assert target.read(BASE - 8, 4) == b""
        assert target.word(BASE - 8, 4) is None


@pytest.mark.parametrize("knows_breakpoints", [True, False])
def test_breakpoints(knows_breakpoints: bool) -> None:
    machine = Machine(knows_breakpoints=knows_breakpoints)
    with target_of(machine) as (target, _):
        assert target.insert(BASE + 70)
        assert target.insert(BASE + 70)
        assert (machine.breakpoints == {BASE + 70}) == knows_breakpoints
        assert (machine.memory[70] == 0xCC) != knows_breakpoints
        assert target.read(BASE + 64, 10) == bytes(range(64, 74))
        target.remove(BASE + 70)
        target.remove(BASE + 70)
        target.stub.ask("?")
        assert not machine.breakpoints
        assert machine.memory[70] == 70
        target.insert_again(BASE + 70)
        target.stub.ask("?")
        assert BASE + 70 in target.inserted
        target.forget(BASE + 70)
        assert not target.inserted
        assert target.insert(BASE + 80)
        target.let_go()
        assert not machine.breakpoints
        assert machine.memory[80] == 80


def test_nothing_is_written_where_nothing_is() -> None:
    with target_of(Machine(knows_breakpoints=False)) as (target, _):
        assert not target.insert(0x10)
        assert not target.inserted


def test_a_step_that_does_not_move_is_repeated() -> None:
    machine = Machine(knows_breakpoints=True)
    machine.set_pc(BASE)
    with target_of(machine) as (target, _):
        machine.stuck = 1
        assert target.step(THREAD, BASE, "eip", is_exact=False) == Stopped(5, None, {})
        assert machine.pc == BASE + 1
        machine.stuck = 1
        target.step(THREAD, BASE + 1, "eip", is_exact=True)
        assert machine.pc == BASE + 1


def test_instructions_that_are_carried_out_here() -> None:
    machine = Machine(knows_breakpoints=True)
    machine.set_pc(BASE)
    machine.registers[16:20] = (BASE + 0x80).to_bytes(4, "little")  # esp
    machine.registers[20:24] = b"\x11\x22\x33\x44"  # ebp
    with target_of(machine) as (target, _):
        emulator = Emulator(target, 4)
        registers = target.registers(THREAD)
        assert emulator.emulate(b"\x55", registers)  # push ebp
        assert not emulator.emulate(b"\x0f\xa2", registers)  # cpuid
        target.write_back(THREAD, registers)
        target.stub.ask("?")
        assert machine.pc == BASE + 1
        assert machine.registers[16:20] == (BASE + 0x7C).to_bytes(4, "little")
        assert machine.memory[0x7C:0x80] == b"\x11\x22\x33\x44"
        registers["esp"] = 0
        assert not emulator.emulate(b"\x5d", registers)  # pop ebp, where no memory is


def test_the_stop_that_an_interrupt_has_brought_once_more_is_no_answer_to_what_is_asked_next() -> None:
    """As QEMU (user mode) repeats it, for which the interrupt is a refusal."""
    machine = Machine(knows_breakpoints=True)
    with target_of(machine) as (target, fake):
        target.resume()
        target.interrupt()
        fake.send(packet(b"T05thread:1;") * 2)
        stop = target.await_stop(5.0)
        assert isinstance(stop, Stopped)
        assert target.interrupts == 0
        machine.set_pc(BASE)
        assert target.registers(None)["eip"] == BASE
        assert not target.has_answered(stop)
