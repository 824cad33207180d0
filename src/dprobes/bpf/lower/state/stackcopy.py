"""
A copy of the program's stack behind the record, or the key, whose call stacks are found by it: one entry of a ring.

Where each CPU has its own ring, and threads come from one to another, two entries would have to find each other. The
copy is made when all else is done: what the handler has logged of a stack is where it is to stand. No verifier sees
this code; ``layout.STACK_COPY`` says what it makes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.bpf.asm.isa import Alu, Helper, Jump, Register, Size
from dprobes.bpf.layout import SNAPSHOT_REGISTERS, STACK_COPY, STACK_COPY_MAX
from dprobes.bpf.lower.hosts.ptregs import REGISTER_OFFSETS
from dprobes.bpf.lower.state.handlerstate import Field
from dprobes.bpf.lower.state.stack import SCRATCH

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.asm.assembler import Assembler

__all__ = ["STACK_COPY_SIZE", "write_place", "write_stack_copy"]

_R = Register
_NAMES = tuple(name for name in REGISTER_OFFSETS if name not in ("cs", "ss", "eflags"))
"""The registers by which frames are found."""
_PAGE = 4096
_REGISTERS_SIZE = 8 * SNAPSHOT_REGISTERS

STACK_COPY_SIZE = 8 + _REGISTERS_SIZE + STACK_COPY_MAX + 8 + STACK_COPY.size
"""The bytes of a copy at most, with registers and what fills it up."""

_FAR = 64 << 20
"""The size of a stack that hardly any is larger than."""

_BLIND = 16 << 10
"""Bytes that are copied of a stack whose end is not known."""

_BEYOND = 64
"""Bytes behind the end of a stack that are copied as well: nothing but what its first function may look at."""


class CopyHost(Protocol):
    """What is asked of a ``Host`` for a copy."""

    def clear_memory(self) -> None:
        """Set R2 bytes at R1 to zero."""

    def register(self, dst: Register, name: str) -> None:
        """Load a register of the program."""

    def read_memory(self, arguments: Callable[[], None]) -> None:
        """Read memory of the program."""

    def global_pid(self) -> None:
        """Load the process id."""


def write_place(asm: Assembler, host: CopyHost, work: int) -> None:
    """Note that a call stack is to stand in R2 bytes at R1, where LP is; R0 is R2. Takes R1-R5 and R9."""
    asm.store(SCRATCH, work, _R.R2)
    asm.mov(_R.R9, _R.R1)
    host.clear_memory()
    asm.load(_R.R1, SCRATCH, Field.STACKS)
    asm.store(_R.R9, 0, _R.R1)
    asm.load(_R.R1, SCRATCH, Field.LP)
    asm.alu(Alu.ADD, _R.R1, 1)
    asm.store(SCRATCH, Field.STACKS, _R.R1)
    asm.load(_R.R0, SCRATCH, work)


def write_stack_copy(asm: Assembler, host: CopyHost, entry: int, work: int, last: int | None) -> None:
    """
    Add the copy to R3 bytes of an entry at a place of the state; R3 is the size of all then. Takes R0-R5 and R9.

    ``work`` are five words for that, and ``last`` is where it stands which call stack of the log is the last one.
    """
    size, place, first, address, limit = (work + 8 * n for n in range(5))
    asm.store(SCRATCH, size, _R.R3)
    asm.alu(Alu.ADD, _R.R3, 7)
    asm.alu(Alu.AND, _R.R3, ~7)
    asm.alu(Alu.ADD, _R.R3, entry)
    asm.alu(Alu.ADD, _R.R3, SCRATCH)
    asm.store(SCRATCH, place, _R.R3)
    for name in _NAMES:
        host.register(_R.R1, name)
        asm.load(_R.R2, SCRATCH, place)
        asm.store(_R.R2, REGISTER_OFFSETS[name], _R.R1)
    asm.load(_R.R1, _R.R2, REGISTER_OFFSETS["esp"])
    asm.alu(Alu.ADD, _R.R2, _REGISTERS_SIZE)
    asm.store(SCRATCH, place, _R.R2)
    asm.store(SCRATCH, first, _R.R2)
    asm.store(SCRATCH, address, _R.R1)
    _find_limit(asm, limit, address)
    _copy(asm, host, place, address, limit)
    host.global_pid()
    asm.load(_R.R2, SCRATCH, place)
    asm.load(_R.R1, SCRATCH, first)
    asm.mov(_R.R3, _R.R2)
    asm.alu(Alu.SUB, _R.R3, _R.R1)
    asm.alu(Alu.ADD, _R.R2, 7)
    asm.alu(Alu.AND, _R.R2, ~7)
    asm.store(_R.R2, 0, _R.R0, Size.W)
    asm.store(_R.R2, 12, _R.R3, Size.W)
    if last is None:
        asm.store(_R.R2, 4, 0, Size.W)
    else:
        asm.load(_R.R1, SCRATCH, last)
        asm.store(_R.R2, 4, _R.R1, Size.W)
    asm.load(_R.R1, SCRATCH, size)
    asm.store(_R.R2, 8, _R.R1, Size.W)
    asm.mov(_R.R3, _R.R2)
    asm.alu(Alu.SUB, _R.R3, SCRATCH)
    asm.alu(Alu.ADD, _R.R3, STACK_COPY.size - entry)


def _find_limit(asm: Assembler, limit: int, address: int) -> None:
    """
    Let ``limit`` be how much is copied from the address in R1 on: what is used of a stack whose end is known.

    An end that is far away is that of another stack.
    """
    known, less = asm.label(), asm.label()
    asm.call(Helper.GET_CURRENT_TASK)  # of a process: the end of the stack that R1 is in
    asm.alu(Alu.ADD, _R.R0, _BEYOND)
    asm.load(_R.R1, SCRATCH, address)
    asm.alu(Alu.SUB, _R.R0, _R.R1)
    asm.mov(_R.R2, _R.R0)
    asm.mov(_R.R0, STACK_COPY_MAX)
    asm.jump_if(Jump.JGT, _R.R0, _R.R2, less)
    asm.jump_if(Jump.JLE, _R.R2, _FAR, known)
    asm.mov(_R.R0, _BLIND)
    asm.jump(known)
    asm.place(less)
    asm.mov(_R.R0, _R.R2)
    asm.place(known)
    asm.store(SCRATCH, limit, _R.R0)


def _copy(asm: Assembler, host: CopyHost, place: int, address: int, limit: int) -> None:
    """Copy page by page, as far as there is memory; ``place`` is behind the copy then."""
    again, whole, done = asm.label(), asm.label(), asm.label()
    asm.place(again)
    asm.load(_R.R4, SCRATCH, limit)
    asm.jump_if(Jump.JEQ, _R.R4, 0, done)
    asm.load(_R.R3, SCRATCH, address)
    asm.mov(_R.R1, _R.R3)
    asm.alu(Alu.AND, _R.R1, _PAGE - 1)
    asm.mov(_R.R2, _PAGE)
    asm.alu(Alu.SUB, _R.R2, _R.R1)
    asm.jump_if(Jump.JLE, _R.R2, _R.R4, whole)
    asm.mov(_R.R2, _R.R4)
    asm.place(whole)
    asm.mov(_R.R9, _R.R2)

    def arguments() -> None:
        asm.load(_R.R1, SCRATCH, place)
        asm.mov(_R.R2, _R.R9)
        asm.load(_R.R3, SCRATCH, address)

    host.read_memory(arguments)
    asm.jump_if(Jump.JNE, _R.R0, 0, done)
    for field, operation in ((place, Alu.ADD), (address, Alu.ADD), (limit, Alu.SUB)):
        asm.load(_R.R1, SCRATCH, field)
        asm.alu(operation, _R.R1, _R.R9)
        asm.store(SCRATCH, field, _R.R1)
    asm.jump(again)
    asm.place(done)
