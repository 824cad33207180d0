"""
Routines that copy between the program's memory, which may not be there, and ours: what the kernel's helpers do.

They take their arguments as eBPF's helpers do, change rax, rdi, rsi, rdx, rcx, r8, r10 and r11, and return 0 or EFAULT.
They use no string instructions, which depend on the direction flag, and read nothing beyond what was asked for.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from dprobes.native.faults import Fixup
from dprobes.native.x86.assembler import Condition, Gpr, Memory, Operation, Shift

if TYPE_CHECKING:
    from dprobes.native.x86.assembler import Label, X86Assembler

__all__ = ["write_read", "write_read_string", "write_write"]

_WORD = 8
_ONES, _HIGHS = 0x0101010101010101, 0x8080808080808080
_PAGE_SHIFT = 12


def _may_fault(asm: X86Assembler, fixups: list[tuple[int, Label]], target: Label) -> None:
    """Note that the next instruction may fault."""
    fixups.append((asm.here, target))


def _resolved(asm: X86Assembler, places: list[tuple[int, Label]]) -> list[Fixup]:
    return [Fixup(at, asm.address_of(target)) for at, target in places]


def _copy(asm: X86Assembler, size: Gpr, faulting: list[tuple[int, Label]], fault: Label, *, stores: bool) -> None:
    """Write the copying of ``size`` bytes from rdx to rdi, by words and then by bytes; r8 is taken."""
    words, tail, byte, done = asm.label(), asm.label(), asm.label(), asm.label()
    source, target = Memory(Gpr.RDX), Memory(Gpr.RDI)
    asm.place(words)
    asm.compare(size, _WORD)
    asm.jump_if(Condition.B, tail)
    for label, width in ((words, _WORD), (byte, 1)):
        if width == 1:
            asm.place(tail)
            asm.compare(size, 0)
            asm.jump_if(Condition.E, done)
            asm.place(byte)
        if not stores:
            _may_fault(asm, faulting, fault)
        asm.load(Gpr.R8, source, width)
        if stores:
            _may_fault(asm, faulting, fault)
        asm.store(target, Gpr.R8, width)
        asm.calculate(Operation.ADD, Gpr.RDX, width)
        asm.calculate(Operation.ADD, Gpr.RDI, width)
        asm.calculate(Operation.SUB, size, width)
        if width == 1:
            asm.jump_if(Condition.NE, label)
        else:
            asm.jump(label)
    asm.place(done)


def _clear(asm: X86Assembler, fault: Label) -> None:
    """Write what follows a fault of a read: rsi bytes at r10 are cleared, and EFAULT is returned."""
    cleared = asm.label()
    asm.place(fault)
    asm.compare(Gpr.RSI, 0)
    asm.jump_if(Condition.E, cleared)
    asm.store_number(Memory(Gpr.R10), 0, 1)
    asm.calculate(Operation.ADD, Gpr.R10, 1)
    asm.calculate(Operation.SUB, Gpr.RSI, 1)
    asm.jump(fault)
    asm.place(cleared)
    asm.mov_number(Gpr.RAX, -errno.EFAULT)
    asm.ret()


def write_read(asm: X86Assembler) -> list[Fixup]:
    """
    Write the routine that reads: rsi bytes at rdx to rdi. If one cannot be read all are cleared.

    A word, the most frequent size, takes the shortest way.
    """
    faulting: list[tuple[int, Label]] = []
    fault, any_size = asm.label(), asm.label()
    asm.mov(Gpr.R10, Gpr.RDI)
    asm.mov(Gpr.RCX, Gpr.RSI)
    asm.compare(Gpr.RSI, _WORD)
    asm.jump_if(Condition.NE, any_size)
    _may_fault(asm, faulting, fault)
    asm.load(Gpr.RAX, Memory(Gpr.RDX))
    asm.store(Memory(Gpr.RDI), Gpr.RAX)
    asm.mov_number(Gpr.RAX, 0)
    asm.ret()
    asm.place(any_size)
    _copy(asm, Gpr.RCX, faulting, fault, stores=False)
    asm.mov_number(Gpr.RAX, 0)
    asm.ret()
    _clear(asm, fault)
    return _resolved(asm, faulting)


def write_write(asm: X86Assembler) -> list[Fixup]:
    """Write the routine that changes the program's memory: rdx bytes at rsi to rdi."""
    faulting: list[tuple[int, Label]] = []
    fault = asm.label()
    asm.mov(Gpr.RCX, Gpr.RDX)
    asm.mov(Gpr.RDX, Gpr.RSI)
    _copy(asm, Gpr.RCX, faulting, fault, stores=True)
    asm.mov_number(Gpr.RAX, 0)
    asm.ret()
    asm.place(fault)
    asm.mov_number(Gpr.RAX, -errno.EFAULT)
    asm.ret()
    return _resolved(asm, faulting)


def write_read_string(asm: X86Assembler) -> list[Fixup]:
    """
    Write the routine that reads a string at rdx to rdi, rsi bytes with its NUL at most.

    rax is its length with the NUL. A string that is longer is cut, and ends with a NUL all the same. Words are read
    whole only where they do not reach into another page: so what follows the string is never asked for.
    """
    faulting: list[tuple[int, Label]] = []
    again, byte, ended, cut, fault, empty = (asm.label() for _ in range(6))
    asm.compare(Gpr.RSI, 0)
    asm.jump_if(Condition.E, empty)
    asm.mov(Gpr.R10, Gpr.RDI)
    asm.mov(Gpr.RCX, Gpr.RSI)
    asm.place(again)
    # A word at once, if there is room for nine bytes, and it lies in one page.
    asm.compare(Gpr.RCX, _WORD)
    asm.jump_if(Condition.BE, byte)
    asm.lea(Gpr.RAX, Memory(Gpr.RDX, _WORD - 1))
    asm.calculate(Operation.XOR, Gpr.RAX, Gpr.RDX)
    asm.shift(Shift.SHR, Gpr.RAX, _PAGE_SHIFT)
    asm.jump_if(Condition.NE, byte)
    _may_fault(asm, faulting, fault)
    asm.load(Gpr.RAX, Memory(Gpr.RDX))
    asm.mov_number(Gpr.R11, -_ONES)
    asm.calculate(Operation.ADD, Gpr.R11, Gpr.RAX)
    asm.mov(Gpr.R8, Gpr.RAX)
    asm.calculate(Operation.XOR, Gpr.R8, -1)
    asm.calculate(Operation.AND, Gpr.R11, Gpr.R8)
    asm.mov_number(Gpr.R8, _HIGHS)
    asm.test(Gpr.R11, Gpr.R8)
    asm.jump_if(Condition.NE, byte)  # one of the bytes is 0
    asm.store(Memory(Gpr.RDI), Gpr.RAX)
    asm.calculate(Operation.ADD, Gpr.RDX, _WORD)
    asm.calculate(Operation.ADD, Gpr.RDI, _WORD)
    asm.calculate(Operation.SUB, Gpr.RCX, _WORD)
    asm.jump(again)
    asm.place(byte)
    asm.compare(Gpr.RCX, 1)
    asm.jump_if(Condition.E, cut)
    _may_fault(asm, faulting, fault)
    asm.load(Gpr.RAX, Memory(Gpr.RDX), 1)
    asm.store(Memory(Gpr.RDI), Gpr.RAX, 1)
    asm.calculate(Operation.ADD, Gpr.RDX, 1)
    asm.calculate(Operation.ADD, Gpr.RDI, 1)
    asm.calculate(Operation.SUB, Gpr.RCX, 1)
    asm.compare(Gpr.RAX, 0)
    asm.jump_if(Condition.E, ended)
    asm.test(Gpr.RDX, _WORD - 1)
    asm.jump_if(Condition.NE, byte)
    asm.jump(again)
    asm.place(cut)
    asm.store_number(Memory(Gpr.RDI), 0, 1)
    asm.calculate(Operation.ADD, Gpr.RDI, 1)
    asm.place(ended)
    asm.mov(Gpr.RAX, Gpr.RDI)
    asm.calculate(Operation.SUB, Gpr.RAX, Gpr.R10)
    asm.ret()
    asm.place(empty)
    asm.mov_number(Gpr.RAX, 0)
    asm.ret()
    _clear(asm, fault)
    return _resolved(asm, faulting)
