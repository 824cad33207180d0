"""Single instructions that a processor executes for us, on one that is made up here."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from dprobes.engines.gdb.machine.machine_target import Paging
from dprobes.engines.gdb.machine.privileged_registers import CPUID, RDMSR, Executor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.engines.gdb.machine.machine_target import MachineTarget

TEXT, PIECE = 0xFFFFFFFF81000000, 1 << 16
ENTRY = TEXT + 0x800
"""Where a fault leads to."""
START = {"rax": 1, "rbx": 2, "rcx": 3, "rdx": 4, "rsp": 5, "eflags": 6, "rip": 7}


class Processor:
    """A processor with kernel text in memory; ``faults`` is whether its instructions do."""

    def __init__(self, text: bytes, *, faults: bool = False) -> None:
        self.text, self.faults = text, faults
        self.state = dict(START)
        self.executed: list[int] = []
        self.searched = 0

    def registers(self, _: object) -> dict[str, int]:
        return dict(self.state)

    def write_back(self, _: object, registers: Mapping[str, int]) -> None:
        self.state = dict(registers)

    def step(self, _: object, pc: int, name: str, *, is_exact: bool) -> None:
        assert (name, is_exact, self.state["rip"]) == ("rip", False, pc)
        self.executed.append(pc)
        if self.faults:
            self.state |= {"rip": ENTRY, "rsp": 0x77}
        else:
            self.state |= {"rip": pc + 2, "rax": self.state["rcx"] + 1, "rdx": 0xAB, "rbx": 0xCD}

    def read_large(self, _: int, __: Paging, address: int, size: int) -> bytes:
        self.searched += 1
        return self.text[address - TEXT : address - TEXT + size]


def executor(processor: Processor) -> Executor:
    return Executor(cast("MachineTarget", processor), TEXT, 0x1000, Paging.FOUR_LEVELS)


def test_registers_are_what_they_were_behind_an_instruction() -> None:
    processor = Processor(b"\x90" * 100 + RDMSR + b"\x90" * 100)
    assert executor(processor).execute(RDMSR, None, {"rcx": 0x1B}, ("rdx", "rax")) == (0xAB, 0x1C)
    assert processor.executed == [TEXT + 100]
    assert processor.state == START


def test_an_instruction_that_faults_has_no_result() -> None:
    processor = Processor(RDMSR, faults=True)
    assert executor(processor).execute(RDMSR, None, {"rcx": 0x1B}, ("rdx", "rax")) is None
    assert processor.state == START


def test_an_instruction_that_is_nowhere_in_the_kernel_is_not_executed() -> None:
    processor = Processor(b"\x90" * 100)
    found = executor(processor)
    assert found.execute(CPUID, None, {}, ("rax",)) is None
    assert (processor.executed, processor.searched) == ([], 1)
    assert found.execute(CPUID, None, {}, ("rax",)) is None
    assert processor.searched == 1  # where it is, or not, is known then


def test_an_instruction_is_found_across_pieces() -> None:
    processor = Processor(b"\x90" * (PIECE - 1) + CPUID + b"\x90" * PIECE)
    executor(processor).execute(CPUID, None, {"rax": 0}, ("rax",))
    assert processor.executed == [TEXT + PIECE - 1]
