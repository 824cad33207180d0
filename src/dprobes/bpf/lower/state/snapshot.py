"""
The snapshot that a program's call stack is found by: its registers, and the memory that its stack pointer points to.

Unwinding needs the tables of all files that a process maps, which no handler can search. So the handler copies what is
going to change, and the reader of the ring does the rest. In the log stands the number of the handler's state, which no
other handler uses meanwhile: so the reader knows which snapshot belongs to a record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.bpf.asm.isa import Alu, Helper, Jump, Register, Size
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
from dprobes.bpf.lower.hosts.ptregs import REGISTER_OFFSETS
from dprobes.bpf.lower.state.handlerstate import LOG, Field
from dprobes.bpf.lower.state.stack import SCRATCH
from dprobes.rpn.isa import ITEM_PREFIX_SIZE, StackEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.asm.assembler import Assembler, Label
    from dprobes.bpf.lower.request import StackLayout

__all__ = ["write_snapshot"]

_R = Register
_PAGE = 4096
_REGISTERS = ENTRY_HEAD.size + SNAPSHOT.size
_STACK = _REGISTERS + 8 * SNAPSHOT_REGISTERS
_MASK = power_of_two(SNAPSHOT_STACK_MAX) - 1

_BEYOND = 64
"""Bytes behind the end of a stack that are copied as well: nothing but what its first function may look at."""


class SnapshotHost(Protocol):
    """What is asked of a ``Host`` for a snapshot."""

    def clear_memory(self) -> None:
        """Set R2 bytes at R1 to zero."""

    def global_pid(self) -> None:
        """Load the process id."""

    def user_registers(self, nobody: Label, to: Callable[[Register], None]) -> None:
        """Write the registers of the program."""

    def read_memory(self, arguments: Callable[[], None]) -> None:
        """Read memory of the program."""

    def task(self) -> None:
        """Load the address of the kernel's task structure."""

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
    layout: StackLayout | None = None,
) -> None:
    """Do what ``Host.user_stack`` says; with ``key`` the stack is one, of 8-byte words at that place of the state."""
    size = word_size if key is None else 8
    kept, copied, address, limit = work, work + 8, work + 16, work + 24
    nobody, end, done = asm.label(), asm.label(), asm.label()

    def point_to(register: Register, offset: int = 0) -> None:
        asm.mov(register, SCRATCH)
        asm.alu(Alu.ADD, register, area + offset)

    def arguments() -> None:
        """Load those of a copy of R9 bytes, which are counted already."""
        asm.load(_R.R1, SCRATCH, copied)
        asm.alu(Alu.SUB, _R.R1, _R.R9)
        asm.alu(Alu.AND, _R.R1, _MASK)
        asm.alu(Alu.ADD, _R.R1, SCRATCH)
        asm.alu(Alu.ADD, _R.R1, area + _STACK)
        asm.mov(_R.R2, _R.R9)
        asm.load(_R.R3, SCRATCH, address)
        asm.alu(Alu.SUB, _R.R3, _R.R9)

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
    asm.store(SCRATCH, limit, SNAPSHOT_STACK_MAX)
    if layout is not None:
        _find_end(asm, host, layout, area + _STACK, address, limit, word_size)
    asm.load(_R.R3, SCRATCH, address)
    # Page by page: memory behind the end of the stack need not be there.
    asm.mov(_R.R2, _PAGE)
    asm.alu(Alu.AND, _R.R3, _PAGE - 1)
    asm.alu(Alu.SUB, _R.R2, _R.R3)
    for number in range(SNAPSHOT_STACK_MAX // _PAGE):
        if number:
            asm.mov(_R.R2, _PAGE)
        asm.load(_R.R1, SCRATCH, copied)
        asm.load(_R.R3, SCRATCH, address)
        if layout is not None:
            whole = asm.label()
            asm.load(_R.R4, SCRATCH, limit)
            asm.alu(Alu.SUB, _R.R4, _R.R1)
            asm.jump_if(Jump.JEQ, _R.R4, 0, end)
            asm.jump_if(Jump.JGT, _R.R4, _PAGE, whole)  # the verifier compares with constants
            asm.jump_if(Jump.JGE, _R.R4, _R.R2, whole)
            asm.mov(_R.R2, _R.R4)
            asm.place(whole)
        asm.mov(_R.R9, _R.R2)
        for field, register in ((copied, _R.R1), (address, _R.R3)):
            asm.alu(Alu.ADD, register, _R.R9)
            asm.store(SCRATCH, field, register)
        host.read_memory(arguments)
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
        asm.store(_R.R1, LOG + ITEM_PREFIX_SIZE, StackEnd.NO_COPY, Size.of(word_size))
    else:
        asm.mov(_R.R1, SCRATCH)
        asm.alu(Alu.ADD, _R.R1, key)
        asm.store(_R.R1, 0, StackEnd.NO_COPY)
    asm.store(SCRATCH, kept, size)
    asm.place(done)
    asm.load(_R.R0, SCRATCH, kept)


def _find_end(
    asm: Assembler, host: SnapshotHost, layout: StackLayout, word: int, address: int, limit: int, word_size: int
) -> None:
    """
    Lower ``limit`` to what is used of the stack from ``address`` on, where that can be told. Takes R0-R5 and R9.

    The first stack of a process has its end in the kernel's memory; above that of another thread the C libraries have
    what the register for thread-local data points to. The unused rest is up to ten kilobytes that others would have to
    wait for. ``word`` is room for a word.
    """
    unknown = asm.label()
    host.task()
    asm.mov(_R.R9, _R.R0)
    if word_size == 8:
        _follow(asm, _R.R9, layout.base, word, unknown)
        _lower(asm, address, limit)
    _follow(asm, _R.R9, layout.mm, word, unknown)
    _follow(asm, _R.R3, layout.bottom, word, unknown)
    _lower(asm, address, limit)
    asm.place(unknown)


def _follow(asm: Assembler, base: Register, distance: int, word: int, unknown: Label) -> None:
    """Load the word of the kernel's memory at a distance from an address to R3."""
    asm.mov(_R.R3, base)
    asm.alu(Alu.ADD, _R.R3, distance)
    asm.mov(_R.R1, SCRATCH)
    asm.alu(Alu.ADD, _R.R1, word)
    asm.mov(_R.R2, 8)
    asm.call(Helper.PROBE_READ_KERNEL)
    asm.jump_if(Jump.JNE, _R.R0, 0, unknown)
    asm.load(_R.R3, SCRATCH, word)


def _lower(asm: Assembler, address: int, limit: int) -> None:
    """Lower the limit to what is between the stack pointer and the address in R3, if that is not more."""
    higher = asm.label()
    asm.alu(Alu.ADD, _R.R3, _BEYOND)
    asm.load(_R.R1, SCRATCH, address)
    asm.alu(Alu.SUB, _R.R3, _R.R1)
    asm.load(_R.R1, SCRATCH, limit)
    asm.jump_if(Jump.JGE, _R.R3, _R.R1, higher)  # also where the address is below
    asm.store(SCRATCH, limit, _R.R3)
    asm.place(higher)
