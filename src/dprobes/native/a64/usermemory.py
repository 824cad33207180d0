"""
Routines that copy between the program's memory, which may not be there, and ours: what the kernel's helpers do.

They take their arguments as eBPF's helpers do, change what calls change, and return 0 or EFAULT in R0. They read
nothing beyond what was asked for.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from dprobes.native.a64.assembler import Condition, Gpr, Memory, Operation, Shift
from dprobes.native.a64.registers import RESULT, SCRATCH_1, SCRATCH_2, SCRATCH_3
from dprobes.native.faults import Fixup

if TYPE_CHECKING:
    from dprobes.native.a64.assembler import A64Assembler, Label

__all__ = ["write_read", "write_read_string", "write_write"]

_WORD = 8
_ONES, _HIGHS = 0x0101010101010101, 0x8080808080808080
_PAGE_SHIFT = 12
_START, _LEFT, _DATA = SCRATCH_1, SCRATCH_2, SCRATCH_3
_FIRST, _SECOND, _THIRD = Gpr.X0, Gpr.X1, Gpr.X2


def _may_fault(asm: A64Assembler, fixups: list[tuple[int, Label]], target: Label) -> None:
    """Note that the next instruction may fault."""
    fixups.append((asm.here, target))


def _resolved(asm: A64Assembler, places: list[tuple[int, Label]]) -> list[Fixup]:
    return [Fixup(at, asm.address_of(target)) for at, target in places]


def _write_advance(asm: A64Assembler, source: Gpr, target: Gpr, width: int) -> None:
    asm.calculate(Operation.ADD, source, source, width)
    asm.calculate(Operation.ADD, target, target, width)
    asm.calculate(Operation.SUBS, _LEFT, _LEFT, width)


def _write_copy(
    asm: A64Assembler, source: Gpr, target: Gpr, faulting: list[tuple[int, Label]], fault: Label, *, stores: bool
) -> None:
    """Write the copying of _LEFT bytes, by words and then by bytes."""
    words, tail, byte, done = asm.label(), asm.label(), asm.label(), asm.label()
    asm.place(words)
    asm.compare(_LEFT, _WORD)
    asm.jump_if(Condition.LO, tail)
    for label, width in ((words, _WORD), (byte, 1)):
        if width == 1:
            asm.place(tail)
            asm.compare(_LEFT, 0)
            asm.jump_if(Condition.EQ, done)
            asm.place(byte)
        if not stores:
            _may_fault(asm, faulting, fault)
        asm.load(_DATA, Memory(source), width)
        if stores:
            _may_fault(asm, faulting, fault)
        asm.store(Memory(target), _DATA, width)
        _write_advance(asm, source, target, width)
        if width == 1:
            asm.jump_if(Condition.NE, label)
        else:
            asm.jump(label)
    asm.place(done)


def _write_result(asm: A64Assembler, number: int) -> None:
    asm.mov_number(RESULT, number)
    asm.ret()


def _write_clear(asm: A64Assembler, fault: Label) -> None:
    """Write what follows a fault of a read: R2 bytes at _START are cleared, and EFAULT is returned."""
    cleared = asm.label()
    asm.place(fault)
    asm.compare(_SECOND, 0)
    asm.jump_if(Condition.EQ, cleared)
    asm.store(Memory(_START), Gpr.ZR, 1)
    asm.calculate(Operation.ADD, _START, _START, 1)
    asm.calculate(Operation.SUB, _SECOND, _SECOND, 1)
    asm.jump(fault)
    asm.place(cleared)
    _write_result(asm, -errno.EFAULT)


def write_read(asm: A64Assembler) -> list[Fixup]:
    """Write the routine that reads: R2 bytes at R3 to R1. If one cannot be read all are cleared."""
    faulting: list[tuple[int, Label]] = []
    fault = asm.label()
    asm.mov(_START, _FIRST)
    asm.mov(_LEFT, _SECOND)
    _write_copy(asm, _THIRD, _FIRST, faulting, fault, stores=False)
    _write_result(asm, 0)
    _write_clear(asm, fault)
    return _resolved(asm, faulting)


def write_write(asm: A64Assembler) -> list[Fixup]:
    """Write the routine that changes the program's memory: R3 bytes at R2 to R1."""
    faulting: list[tuple[int, Label]] = []
    fault = asm.label()
    asm.mov(_LEFT, _THIRD)
    _write_copy(asm, _SECOND, _FIRST, faulting, fault, stores=True)
    _write_result(asm, 0)
    asm.place(fault)
    _write_result(asm, -errno.EFAULT)
    return _resolved(asm, faulting)


def write_read_string(asm: A64Assembler) -> list[Fixup]:
    """
    Write the routine that reads a string at R3 to R1, R2 bytes with its NUL at most.

    R0 is its length with the NUL. A string that is longer is cut, and ends with a NUL all the same. Words are read
    whole only where they do not reach into another page: so what follows the string is never asked for.
    """
    faulting: list[tuple[int, Label]] = []
    again, byte, ended, cut, fault, empty = (asm.label() for _ in range(6))
    asm.compare(_SECOND, 0)
    asm.jump_if(Condition.EQ, empty)
    asm.mov(_START, _FIRST)
    asm.mov(_LEFT, _SECOND)
    asm.place(again)
    # A word at once, if there is room for nine bytes, and it lies in one page.
    asm.compare(_LEFT, _WORD)
    asm.jump_if(Condition.LS, byte)
    asm.calculate(Operation.ADD, RESULT, _THIRD, _WORD - 1)
    asm.calculate(Operation.EOR, RESULT, RESULT, _THIRD)
    asm.shift(Shift.LSR, RESULT, RESULT, _PAGE_SHIFT)
    asm.compare(RESULT, 0)
    asm.jump_if(Condition.NE, byte)
    _may_fault(asm, faulting, fault)
    asm.load(_DATA, Memory(_THIRD))
    asm.mov_number(Gpr.X17, -_ONES)
    asm.calculate(Operation.ADD, Gpr.X17, Gpr.X17, _DATA)
    asm.calculate(Operation.EOR, RESULT, _DATA, -1)
    asm.calculate(Operation.AND, Gpr.X17, Gpr.X17, RESULT)
    asm.test(Gpr.X17, _HIGHS)
    asm.jump_if(Condition.NE, byte)  # one of the bytes is 0
    asm.store(Memory(_FIRST), _DATA)
    _write_advance(asm, _THIRD, _FIRST, _WORD)
    asm.jump(again)
    asm.place(byte)
    asm.compare(_LEFT, 1)
    asm.jump_if(Condition.EQ, cut)
    _may_fault(asm, faulting, fault)
    asm.load(_DATA, Memory(_THIRD), 1)
    asm.store(Memory(_FIRST), _DATA, 1)
    _write_advance(asm, _THIRD, _FIRST, 1)
    asm.compare(_DATA, 0)
    asm.jump_if(Condition.EQ, ended)
    asm.test(_THIRD, _WORD - 1)
    asm.jump_if(Condition.NE, byte)
    asm.jump(again)
    asm.place(cut)
    asm.store(Memory(_FIRST), Gpr.ZR, 1)
    asm.calculate(Operation.ADD, _FIRST, _FIRST, 1)
    asm.place(ended)
    asm.calculate(Operation.SUB, RESULT, _FIRST, _START)
    asm.ret()
    asm.place(empty)
    _write_result(asm, 0)
    _write_clear(asm, fault)
    return _resolved(asm, faulting)
