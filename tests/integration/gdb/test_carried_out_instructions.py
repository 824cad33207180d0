"""Instructions that are carried out here do what the processor does: each is compared with a step of the emulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.engines.gdb.remote_protocol import Stopped
from dprobes.engines.gdb.stub_registers import processor_of, registers_of
from dprobes.engines.gdb.stub_requests import Stub
from dprobes.engines.gdb.stub_stepper import EMULATED, EffectEmulator, Emulator
from dprobes.engines.gdb.stub_target import StubTarget
from dprobes.engines.gdb.stub_transports import open_transport
from dprobes.errors import TargetError
from dprobes.target.code.foreign_instructions import LENGTH_MAX, instruction_length
from dprobes.target.code.machine_code import decode
from integration.gdb.processors import PROCESSORS, EmulatedProgram, Processor

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

STEPS = 3000
"""From the start on: the dynamic linker's code has more kinds of instructions than any program of ours."""
EXPECTED = 300
"""How many of them are carried out at least; on zSeries, where most set the condition code, not many more are."""
X86_LENGTH_MAX = 15
X86_64 = Processor("x86_64", "x86_64-linux-gnu", 8, "little")


class Shadow(StubTarget):
    """A target that is not written to: what was to be is kept in ``written``."""

    def __init__(self, stub: Stub, processor: Processor) -> None:
        row = processor_of(architecture(processor.name))
        assert row is not None
        super().__init__(stub, processor.order, row.default_description(), row.breakpoint)
        self.written: dict[int, bytes] = {}

    def write(self, address: int, data: bytes) -> bool:
        self.written[address] = data
        return True


def instruction_at(target: StubTarget, machine: str, pc: int) -> bytes:
    if machine in EMULATED:
        code = target.read(pc, X86_LENGTH_MAX)
        try:
            return next(decode(code, 64 if machine == "x86_64" else 32, pc)).raw
        except (StopIteration, TargetError):
            return b""
    code = target.read(pc, LENGTH_MAX)
    return code[: instruction_length(machine, code, pc) or 0]


@pytest.mark.parametrize("name", [*PROCESSORS, "x86_64"])
def test_each_is_as_a_step(build: Builder, tmp_path: Path, name: str) -> None:
    processor, arch = PROCESSORS.get(name, X86_64), architecture(name)
    path = processor.build(build, "hotloop.c") if name != "x86_64" else build("hotloop.c")
    program = EmulatedProgram(processor, tmp_path, str(path), "10")
    stub = Stub(open_transport(program.endpoint), 5.0)
    carried_out = 0
    try:
        stub.start()
        target = Shadow(stub, processor)
        row = processor_of(arch)
        assert row is not None
        names = registers_of(arch, row, target.description)
        emulator = Emulator(target, processor.word_size) if name in EMULATED else EffectEmulator(target, arch, names)
        thread = stub.current_thread()
        registers = target.registers(thread)
        for _ in range(STEPS):
            pc, expected = registers[row.pc], registers.copy()
            raw = instruction_at(target, name, pc)
            target.written.clear()
            is_carried_out = bool(raw) and emulator.emulate(raw, expected)
            reply = target.step(thread, pc, row.pc, is_exact=True)
            assert isinstance(reply, Stopped)
            registers = target.registers(thread)
            if is_carried_out:
                carried_out += 1
                where = f"{raw.hex()} at {pc:#x}"
                found = {key: registers[key] for key in names.values() if registers[key] != expected[key]}
                assert not found, where
                assert {at: target.read(at, len(data)) for at, data in target.written.items()} == target.written, where
        assert carried_out >= EXPECTED
    finally:
        program.close()
        stub.close()
