"""What is a call in eBPF, and few instructions here; registers that calls keep are kept, and more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.native.a64.assembler import Gpr, Memory, Operation, SystemRegister
from dprobes.native.a64.registers import RESULT

if TYPE_CHECKING:
    from dprobes.native.a64.assembler import A64Assembler
    from dprobes.native.memory import MapPlace

__all__ = ["write_cpu", "write_value_address"]

_GETCPU = 168
"""The number of the system call (include/uapi/asm-generic/unistd.h)."""
_ROOM = 16


def write_cpu(asm: A64Assembler, cpu_place: int | None) -> None:
    """
    Load the number of the CPU that the thread runs on to R0.

    ``cpu_place`` is where the C library has the thread's struct rseq, at its ``cpu_id``, in bytes from the thread
    pointer (rseq(2)); None: ask the kernel.
    """
    if cpu_place is not None:
        asm.read_system(RESULT, SystemRegister.TPIDR_EL0)
        asm.load(RESULT, Memory(RESULT, cpu_place), 4)
        return
    kept = (Gpr.X0, Gpr.X1, Gpr.X2)
    asm.calculate(Operation.SUB, Gpr.SP, Gpr.SP, _ROOM + 32)
    for place, register in enumerate(kept):
        asm.store(Memory(Gpr.SP, _ROOM + 8 * place), register)
    asm.calculate(Operation.ADD, Gpr.X0, Gpr.SP, 0)
    asm.mov_number(Gpr.X1, 0)
    asm.mov_number(Gpr.X2, 0)
    asm.mov_number(Gpr.X8, _GETCPU)
    asm.system_call()
    asm.load(RESULT, Memory(Gpr.SP), 4)
    for place, register in enumerate(kept):
        asm.load(register, Memory(Gpr.SP, _ROOM + 8 * place))
    asm.calculate(Operation.ADD, Gpr.SP, Gpr.SP, _ROOM + 32)


def write_value_address(asm: A64Assembler, place: MapPlace) -> None:
    """Let R0 be the address of the value whose index, a u32 that is in bounds, is at R2."""
    asm.load(RESULT, Memory(Gpr.X1), 4)
    asm.calculate(Operation.MUL, RESULT, RESULT, place.stride)
    asm.mov_number(Gpr.X17, place.address)
    asm.calculate(Operation.ADD, RESULT, RESULT, Gpr.X17)
