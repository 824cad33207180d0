"""
Snapshot from which a user call stack is unwound: registers, and memory from the stack pointer on.

Unwinding needs the tables of all files that a process maps, which a handler cannot search. So the handler copies the
data that will change, and the reader of the ring unwinds it. The log contains the number of the handler's state, which
no other handler uses at that time. By this number, the reader finds the snapshot of a record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.bpf.bpf_instructions import Alu, Helper, Jump, Register, Size
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS, read_kernel_word
from dprobes.bpf.lower.state.handler_state import LOG, SCRATCH, Field
from dprobes.bpf.map_layouts import (
    ENTRY_HEAD,
    KEY_POSITION,
    KIND_SHIFT,
    SNAPSHOT,
    SNAPSHOT_REGISTERS,
    SNAPSHOT_STACK_MAX,
    STACK_COPY,
    STACK_COPY_MAX,
    Entry,
    power_of_two,
)
from dprobes.rpn.instruction_set import ITEM_PREFIX_SIZE, StackEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.bpf_assembler import Assembler, Label
    from dprobes.bpf.lower.lowering_request import StackLayout

__all__ = ["STACK_COPY_SIZE", "write_place", "write_snapshot", "write_stack_copy"]

_R = Register
_PAGE = 4096
_REGISTERS = ENTRY_HEAD.size + SNAPSHOT.size
_STACK = _REGISTERS + 8 * SNAPSHOT_REGISTERS
_MASK = power_of_two(SNAPSHOT_STACK_MAX) - 1

_BEYOND = 64
"""Bytes to copy beyond the end of a stack. Only the first function of the stack may use them."""


class SnapshotHost(Protocol):
    """The methods of a ``Host`` that a snapshot or a copy needs."""

    def clear_memory(self) -> None:
        """Set R2 bytes at R1 to zero; clobbers R0-R5."""

    def global_pid(self) -> None:
        """Load the process id in the initial namespace to R0; clobbers R1-R5."""

    def register(self, dst: Register, name: str) -> None:
        """Load a register of the hit thread to ``dst``; clobbers R9."""

    def user_registers(self, nobody: Label, to: Callable[[Register], None]) -> None:
        """
        Write the thread's user registers as ``struct pt_regs`` to the address that ``to`` loads. Clobbers R0-R5.

        Go to ``nobody`` in a thread of the kernel.
        """

    def read_memory(self, arguments: Callable[[], None]) -> None:
        """
        Read R2 bytes of user memory at R3 to R1; R0 is 0 on success. Clobbers R1-R5.

        ``arguments`` loads these registers.
        """

    def task(self) -> None:
        """Load the address of the current thread's ``task_struct`` to R0; clobbers R1-R5."""

    def output(self) -> None:
        """Put R3 bytes at R2 into the ring; R0 is 0 if there was room. Clobbers R1-R5."""


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
    """Write the code of ``Host.user_stack``. With ``key``, the stack is a key of 8-byte words at this offset."""
    size = word_size if key is None else 8
    kept, copied, address, limit = work, work + 8, work + 16, work + 24
    nobody, end, done = asm.label(), asm.label(), asm.label()

    def point_to(register: Register, offset: int = 0) -> None:
        asm.add(register, SCRATCH, area + offset)

    def arguments() -> None:
        """Load the arguments of the read of R9 bytes, which have already been added to the count."""
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
    asm.copy_from(_R.R2, REGISTER_OFFSETS["esp"], SCRATCH, address, by=_R.R3)
    asm.store(SCRATCH, limit, SNAPSHOT_STACK_MAX)
    if layout is not None:
        _find_end(asm, host, layout, area + _STACK, address, limit, word_size)
    asm.load(_R.R3, SCRATCH, address)
    # Page by page: memory after the end of the stack may be unmapped.
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
        asm.add(_R.R1, SCRATCH, key)
        asm.store(_R.R1, 0, StackEnd.NO_COPY)
    asm.store(SCRATCH, kept, size)
    asm.place(done)
    asm.load(_R.R0, SCRATCH, kept)


def _find_end(
    asm: Assembler, host: SnapshotHost, layout: StackLayout, word: int, address: int, limit: int, word_size: int
) -> None:
    """
    Lower ``limit`` to the used part of the stack from ``address`` on, where its end is known. Clobbers R0-R5 and R9.

    The end of a process's first stack is in the kernel's memory. C libraries place the thread-local data, to which the
    register ``base`` points, above the stack of any other thread. The unused rest is up to ten kilobytes, for which
    other entries would have to wait. ``word`` is room for a word.
    """
    unknown = asm.label()
    host.task()
    asm.mov(_R.R9, _R.R0)
    if word_size == 8:
        read_kernel_word(asm, _R.R9, layout.base, (SCRATCH, word), unknown)
        _lower(asm, address, limit)
    read_kernel_word(asm, _R.R9, layout.mm, (SCRATCH, word), unknown)
    read_kernel_word(asm, _R.R3, layout.bottom, (SCRATCH, word), unknown)
    _lower(asm, address, limit)
    asm.place(unknown)


def _lower(asm: Assembler, address: int, limit: int) -> None:
    """Lower the limit to the distance between the stack pointer and the address in R3, if that is less."""
    higher = asm.label()
    asm.alu(Alu.ADD, _R.R3, _BEYOND)
    asm.load(_R.R1, SCRATCH, address)
    asm.alu(Alu.SUB, _R.R3, _R.R1)
    asm.load(_R.R1, SCRATCH, limit)
    asm.jump_if(Jump.JGE, _R.R3, _R.R1, higher)  # also where the address is below
    asm.store(SCRATCH, limit, _R.R3)
    asm.place(higher)


# A copy of the program's stack, in the ring entry of the record or key whose call stacks are unwound from the copy.
#
# Where each CPU has its own ring and threads migrate, the reader would have to match two separate entries. The copy is
# made at the end of the handler: the log only reserves the place of a stack. No verifier checks this code;
# ``map_layouts.STACK_COPY`` describes the format.


_NAMES = tuple(name for name in REGISTER_OFFSETS if name not in ("cs", "ss", "eflags"))
"""The registers that unwinding needs."""
_REGISTERS_SIZE = 8 * SNAPSHOT_REGISTERS

STACK_COPY_SIZE = 8 + _REGISTERS_SIZE + STACK_COPY_MAX + 8 + STACK_COPY.size
"""Maximum size of a copy in bytes, with registers and padding."""

_FAR = 64 << 20
"""Distance in bytes beyond which an end belongs to another stack, because stacks are hardly ever larger."""

_BLIND = 16 << 10
"""Bytes to copy of a stack whose end is unknown."""


def write_place(asm: Assembler, host: SnapshotHost, work: int) -> None:
    """
    Write code that zeroes R2 bytes at R1 (the position LP) for a call stack, and links them to the previous one.

    The code returns the size in R0, and clobbers R1-R5 and R9. ``work`` is a word for temporary use.
    """
    asm.store(SCRATCH, work, _R.R2)
    asm.mov(_R.R9, _R.R1)
    host.clear_memory()
    asm.copy_from(SCRATCH, Field.STACKS, _R.R9, 0)
    asm.load(_R.R1, SCRATCH, Field.LP)
    asm.alu(Alu.ADD, _R.R1, 1)
    asm.store(SCRATCH, Field.STACKS, _R.R1)
    asm.load(_R.R0, SCRATCH, work)


def write_stack_copy(asm: Assembler, host: SnapshotHost, entry: int, work: int, last: int | None) -> None:
    """
    Append a copy of the stack to the R3 bytes of an entry at ``entry`` in the state. Clobbers R0-R5 and R9.

    R3 is then the total size. ``work`` has five words for temporary use. ``last`` is the field with the position of the
    log's last call stack.
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
    asm.derive(Alu.SUB, _R.R3, _R.R2, _R.R1)
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
    asm.derive(Alu.SUB, _R.R3, _R.R2, SCRATCH)
    asm.alu(Alu.ADD, _R.R3, STACK_COPY.size - entry)


def _find_limit(asm: Assembler, limit: int, address: int) -> None:
    """
    Set ``limit`` to the number of bytes to copy from the address in R1 on.

    It is the used part of a stack whose end is known. An end that is more than ``_FAR`` away belongs to another stack.
    """
    known, less = asm.label(), asm.label()
    asm.call(Helper.GET_CURRENT_TASK)  # in a process: returns the end of the stack that R1 is in
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


def _copy(asm: Assembler, host: SnapshotHost, place: int, address: int, limit: int) -> None:
    """Copy page by page, as far as memory is mapped. The field ``place`` then has the address after the copy."""
    again, whole, done = asm.label(), asm.label(), asm.label()
    asm.place(again)
    asm.jump_if_word(Jump.JEQ, SCRATCH, limit, 0, done, by=_R.R4)
    asm.load(_R.R3, SCRATCH, address)
    asm.derive(Alu.AND, _R.R1, _R.R3, _PAGE - 1)
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
