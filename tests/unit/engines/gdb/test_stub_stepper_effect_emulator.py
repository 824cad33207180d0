"""Instructions are carried out on a stub's registers and memory, or else nothing is done."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.engines.gdb.stub_registers import processor_of, registers_of
from dprobes.engines.gdb.stub_requests import Stub
from dprobes.engines.gdb.stub_stepper import EffectEmulator
from dprobes.engines.gdb.stub_target import StubTarget
from support.fake_stub import FakeStub

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.gdb.stub_registers import Registers

CODE, STACK, DATA = 0x1000, 0x2000, 0x3000
STP = bytes.fromhex("fd7bbea9")  # stp x29, x30, [sp, #-32]!
LDR = bytes.fromhex("413440f9")  # ldr x1, [x2, #104]
BTYPE = 0x400


class Process:
    """An AArch64 process, of QEMU if ``is_emulated``; its stub refuses what it could not do if ``is_strict``."""

    def __init__(self, *, is_emulated: bool = True, is_strict: bool = True) -> None:
        self.memory = {page: bytearray(0x1000) for page in (CODE, STACK, DATA)}
        self.is_emulated, self.is_strict = is_emulated, is_strict

    def answer(self, payload: bytes) -> bytes:
        text = payload.decode()
        match text[:1]:
            case "q" if text == "qqemu.sstepbits" and self.is_emulated:
                return b"ENABLE=1"
            case "g":
                return bytes(8 * 33 + 4).hex().encode()
            case "m" | "M":
                place, _, data = text[1:].partition(":")
                at, size = (int(number, 16) for number in place.split(","))
                page = self.memory.get(at & -0x1000)
                if page is None or (data and self.is_strict and at & -0x1000 == CODE):
                    return b"E14"
                start = at & 0xFFF
                if data:
                    page[start : start + size] = bytes.fromhex(data)
                return b"OK" if data else page[start : start + size].hex().encode()
            case "H":
                return b"OK"
        return b""


@contextmanager
def emulator_of(process: Process) -> Iterator[tuple[EffectEmulator, Registers]]:
    arch = architecture("aarch64")
    processor = processor_of(arch)
    assert processor is not None
    with FakeStub(process.answer) as fake:
        fake.transport.peer = "qemu-aarch64"
        stub = Stub(fake.transport, 5)
        stub.start()
        target = StubTarget(stub, "little", processor.default_description(), processor.breakpoint)
        registers = target.registers(None)
        registers["pc"], registers["sp"], registers["x2"] = CODE, STACK + 0x100, DATA
        registers["x29"], registers["x30"] = 0x1122, 0x3344
        yield EffectEmulator(target, arch, registers_of(arch, processor, target.description)), registers


def test_registers_are_stored_together_before_the_stack_pointer_moves() -> None:
    process = Process()
    with emulator_of(process) as (emulator, registers):
        assert emulator.emulate(STP, registers)
        assert (registers["pc"], registers["sp"]) == (CODE + 4, STACK + 0xE0)
    assert process.memory[STACK][0xE0:0xF0].hex() == "22110000000000004433000000000000"


def test_a_load_reads_what_is_in_memory() -> None:
    process = Process()
    process.memory[DATA][104:112] = bytes(range(1, 9))
    with emulator_of(process) as (emulator, registers):
        assert emulator.emulate(LDR, registers)
        assert (registers["pc"], registers["x1"]) == (CODE + 4, 0x0807_0605_0403_0201)


@pytest.mark.parametrize(("code", "base", "place"), [(STP, "sp", 0x9000), (LDR, "x2", 0x9000)])
def test_a_fault_is_the_processors_business(code: bytes, base: str, place: int) -> None:
    with emulator_of(Process()) as (emulator, registers):
        registers[base] = place
        before = registers.all_bytes()
        assert not emulator.emulate(code, registers)
        assert registers.all_bytes() == before


@pytest.mark.parametrize("process", [Process(is_emulated=False), Process(is_strict=False)])
def test_only_the_stack_is_accessed_through_a_stub_that_gets_at_everything(process: Process) -> None:
    with emulator_of(process) as (emulator, registers):
        assert not emulator.emulate(LDR, registers)
        assert emulator.emulate(STP, registers)


def test_nothing_is_carried_out_where_the_processor_may_refuse_it() -> None:
    """Behind an indirect branch, in pages that are guarded, only some instructions may follow."""
    with emulator_of(Process()) as (emulator, registers):
        registers["cpsr"] = BTYPE
        assert not emulator.emulate(STP, registers)


def test_what_is_not_known_is_not_carried_out() -> None:
    with emulator_of(Process()) as (emulator, registers):
        assert not emulator.emulate(bytes.fromhex("3f2303d5"), registers)  # paciasp
