"""
The snapshot that a program's call stack is found by: its registers, and the memory that its stack pointer points to.

Unwinding needs the tables of all files that a process maps, which no handler can search. So the handler copies what is
going to change, and the reader of the ring does the rest. In the log stands the number of the handler's state, which no
other handler uses meanwhile: so the reader knows which snapshot belongs to a record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.bpf.asm.isa import Alu, Jump, Register, Size
from dprobes.bpf.layout import (
    ENTRY_HEAD,
    KEY_POSITION,
    KIND_SHIFT,
    SNAPSHOT,
    SNAPSHOT_REGISTERS,
    SNAPSHOT_STACK_MAX,
    Entry,
    power_of_two,
)
from dprobes.bpf.lower.handlerstate import LOG, PREFIX_SIZE, Field
from dprobes.bpf.lower.ptregs import REGISTER_OFFSETS
from dprobes.bpf.lower.stack import SCRATCH
from dprobes.rpn.isa import StackEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.asm.assembler import Assembler, Label

__all__ = ["write_snapshot"]

_R = Register
_PAGE = 4096
_REGISTERS = ENTRY_HEAD.size + SNAPSHOT.size
_STACK = _REGISTERS + 8 * SNAPSHOT_REGISTERS
_MASK = power_of_two(SNAPSHOT_STACK_MAX) - 1


class SnapshotHost(Protocol):
    """What is asked of a ``Host`` for a snapshot."""

    def clear_memory(self) -> None:
        """Set R2 bytes at R1 to zero."""

    def global_pid(self) -> None:
        """Load the process id."""

    def user_registers(self, nobody: Label, to: Callable[[Register], None]) -> None:
        """Write the registers of the program."""

    def read_memory(self) -> None:
        """Read memory of the program."""

    def output(self) -> None:
        """Put an entry into the ring."""


def write_snapshot(
    asm: Assembler,
    host: SnapshotHost,
    area: int,
    work: int,
    log_mask: int,
    word_size: int,
    key: int | None = None,
) -> None:
    """Do what ``Host.user_stack`` says; with ``key`` the stack is one, of 8-byte words at that place of the state."""
    size = word_size if key is None else 8
    kept, copied, address = work, work + 8, work + 16
    nobody, end, done = asm.label(), asm.label(), asm.label()

    def point_to(register: Register, offset: int = 0) -> None:
        asm.mov(register, SCRATCH)
        asm.alu(Alu.ADD, register, area + offset)

    asm.store(SCRATCH, kept, _R.R2)
    asm.store(SCRATCH, address, 0)
    asm.mov(_R.R9, _R.R1)
    host.clear_memory()
    asm.load(_R.R1, SCRATCH, Field.NUMBER)
    asm.alu(Alu.ADD, _R.R1, 1)
    asm.store(_R.R9, 0, _R.R1, Size.of(size))
    point_to(_R.R2)
    asm.store(_R.R2, ENTRY_HEAD.size + 4, _R.R1, Size.W)
    asm.store(_R.R2, 0, Entry.SNAPSHOT << KIND_SHIFT, Size.W)
    asm.store(_R.R2, 4, 0, Size.W)
    if key is None:
        asm.load(_R.R1, SCRATCH, Field.LP)
    else:
        asm.mov(_R.R1, KEY_POSITION)
    asm.store(_R.R2, ENTRY_HEAD.size + 8, _R.R1, Size.W)
    asm.store(_R.R2, ENTRY_HEAD.size + 12, word_size, Size.W)
    host.global_pid()
    point_to(_R.R2)
    asm.store(_R.R2, ENTRY_HEAD.size, _R.R0, Size.W)
    asm.store(SCRATCH, copied, 0)
    host.user_registers(nobody, lambda register: point_to(register, _REGISTERS))
    point_to(_R.R2, _REGISTERS)
    asm.load(_R.R3, _R.R2, REGISTER_OFFSETS["esp"])
    asm.store(SCRATCH, address, _R.R3)
    # Page by page: memory behind the end of the stack need not be there.
    asm.mov(_R.R2, _PAGE)
    asm.alu(Alu.AND, _R.R3, _PAGE - 1)
    asm.alu(Alu.SUB, _R.R2, _R.R3)
    for number in range(SNAPSHOT_STACK_MAX // _PAGE):
        if number:
            asm.mov(_R.R2, _PAGE)
        asm.load(_R.R1, SCRATCH, copied)
        asm.load(_R.R3, SCRATCH, address)
        asm.alu(Alu.AND, _R.R1, _MASK)
        asm.mov(_R.R4, _R.R1)
        asm.alu(Alu.ADD, _R.R4, _R.R2)
        asm.store(SCRATCH, copied, _R.R4)
        asm.mov(_R.R4, _R.R3)
        asm.alu(Alu.ADD, _R.R4, _R.R2)
        asm.store(SCRATCH, address, _R.R4)
        asm.alu(Alu.ADD, _R.R1, SCRATCH)
        asm.alu(Alu.ADD, _R.R1, area + _STACK)
        asm.mov(_R.R9, _R.R2)
        host.read_memory()
        last = asm.label()
        asm.jump_if(Jump.JEQ, _R.R0, 0, last)
        asm.load(_R.R1, SCRATCH, copied)
        asm.alu(Alu.SUB, _R.R1, _R.R9)
        asm.store(SCRATCH, copied, _R.R1)
        asm.jump(end)
        asm.place(last)
    asm.place(end)
    asm.load(_R.R3, SCRATCH, copied)
    asm.alu(Alu.AND, _R.R3, _MASK)
    asm.alu(Alu.ADD, _R.R3, _STACK)
    point_to(_R.R2)
    host.output()
    asm.jump_if(Jump.JEQ, _R.R0, 0, done)
    asm.place(nobody)
    if key is None:
        asm.load(_R.R1, SCRATCH, Field.LP)
        asm.alu(Alu.AND, _R.R1, log_mask)
        asm.alu(Alu.ADD, _R.R1, SCRATCH)
        asm.store(_R.R1, LOG + PREFIX_SIZE, StackEnd.NO_COPY, Size.of(word_size))
    else:
        asm.mov(_R.R1, SCRATCH)
        asm.alu(Alu.ADD, _R.R1, key)
        asm.store(_R.R1, 0, StackEnd.NO_COPY)
    asm.store(SCRATCH, kept, size)
    asm.place(done)
    asm.load(_R.R0, SCRATCH, kept)
