"""
Routines that say who hits a probe, and when: what the kernel's helpers do, without the kernel.

What only that knows is added to records by who reads them; a signal is the one exception (``native.x86.x86_runtime``).

A system call takes its number in x8, returns in x0, and keeps all other registers (arch/arm64/kernel/entry.S).
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Helper
from dprobes.native.a64.a64_assembler import (
    RESULT,
    SCRATCH_1,
    SCRATCH_2,
    SCRATCH_3,
    A64Assembler,
    Condition,
    Gpr,
    Memory,
    Operation,
    Shift,
    SystemRegister,
)
from dprobes.native.a64.a64_translator import write_routine
from dprobes.native.generated_code import Fixup, RoutineWriters, written_runtime
from dprobes.native.process_page import (
    CLOCK_COUNTER,
    CLOCK_RATE,
    CLOCK_READING,
    CLOCK_READINGS,
    CLOCK_TIME,
    CLOCK_VERSION,
    PROCESS_IS_NESTED,
    PROCESS_PID,
    PROCESS_THREADS,
    THREAD,
    THREAD_SLOTS,
    THREAD_WINDOW,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.bpf.map_layouts import MapName
    from dprobes.native.a64.a64_assembler import Label
    from dprobes.native.generated_code import ProcessFacts, Runtime
    from dprobes.native.routines.handler_ring import RingShape
    from dprobes.native.routines.shared_hash_table import TableShape

__all__ = [
    "fault_entry",
    "make_runtime",
    "write_clock",
    "write_ids",
    "write_read",
    "write_read_string",
    "write_signal",
    "write_stack_end",
    "write_write",
]

_TGKILL, _GETPID, _GETTID = 131, 172, 178
"""Numbers of system calls (include/uapi/asm-generic/unistd.h)."""


def _system_call(asm: A64Assembler, number: int) -> None:
    asm.mov_number(Gpr.X8, number)
    asm.system_call()


def _write_pair(asm: A64Assembler, high: Gpr, low: Gpr) -> None:
    """Write the return of two words in one."""
    asm.shift(Shift.LSL, high, high, 32)
    asm.calculate(Operation.ORR, RESULT, high, low)
    asm.ret()


def write_ids(asm: A64Assembler, process_page: int, tid_place: int | None) -> None:
    """
    Write GET_CURRENT_PID_TGID: the process id in the upper half, the thread id in the lower one.

    ``tid_place`` is where the C library has the thread id, in bytes from the thread pointer; None: it is given as 0.
    Where that is the id of a nested PID namespace, the process page has the other one; 0 if it is not there.
    """
    place, pid, found, tid, local, left = SCRATCH_1, SCRATCH_2, SCRATCH_3, Gpr.X0, Gpr.X1, Gpr.X2
    asm.mov_number(place, process_page)
    asm.load(pid, Memory(place, PROCESS_PID), 4)
    if tid_place is None:
        asm.mov_number(tid, 0)
    else:
        following, known, told = asm.label(), asm.label(), asm.label()
        asm.read_system(tid, SystemRegister.TPIDR_EL0)
        asm.load(tid, Memory(tid, tid_place), 4)
        asm.load(found, Memory(place, PROCESS_IS_NESTED), 4)
        asm.compare(found, 0, wide=False)
        asm.jump_if(Condition.EQ, told)
        asm.mov(local, tid, wide=False)
        asm.mov_number(tid, 0)
        asm.calculate(Operation.AND, found, local, THREAD_SLOTS - 1)
        asm.calculate(Operation.MUL, found, found, THREAD.size)
        asm.calculate(Operation.ADD, place, place, found)
        asm.mov_number(left, THREAD_WINDOW)
        asm.place(following)
        asm.load(found, Memory(place, PROCESS_THREADS), 4)
        asm.compare(found, local, wide=False)
        asm.jump_if(Condition.EQ, known)
        asm.calculate(Operation.ADD, place, place, THREAD.size)
        asm.calculate(Operation.SUBS, left, left, 1)
        asm.jump_if(Condition.NE, following)
        asm.jump(told)
        asm.place(known)
        asm.load(tid, Memory(place, PROCESS_THREADS + THREAD.size // 2), 4)
        asm.place(told)
    _write_pair(asm, pid, tid)


def write_stack_end(asm: A64Assembler, first_stack: int | None) -> list[Fixup]:
    """
    Write GET_CURRENT_TASK: the end of the stack that the address in R1 is in, as far as anybody knows; else 0.

    It is what the thread pointer says or ``first_stack``, the first of both that is above the address
    (``native.x86.x86_runtime``). Nothing of that faults.
    """
    none, known = asm.label(), asm.label()
    asm.read_system(RESULT, SystemRegister.TPIDR_EL0)
    if first_stack is not None:
        asm.mov_number(SCRATCH_1, first_stack)
    else:
        asm.mov(SCRATCH_1, RESULT)
    # Of two distances that are counted without a sign, that to what lies below is the greater one.
    asm.calculate(Operation.SUB, SCRATCH_2, RESULT, Gpr.X0)
    asm.calculate(Operation.SUB, SCRATCH_3, SCRATCH_1, Gpr.X0)
    asm.compare(SCRATCH_2, SCRATCH_3)
    asm.jump_if(Condition.LS, known)
    asm.mov(RESULT, SCRATCH_1)
    asm.place(known)
    asm.compare(RESULT, Gpr.X0)
    asm.jump_if(Condition.LO, none)
    asm.ret()
    asm.place(none)
    asm.mov_number(RESULT, 0)
    asm.ret()
    return []


def write_signal(asm: A64Assembler) -> None:
    """Write SEND_SIGNAL: the signal in R1 goes to this thread, at once."""
    asm.mov(Gpr.X2, Gpr.X0)
    _system_call(asm, _GETTID)
    asm.mov(Gpr.X1, Gpr.X0)
    _system_call(asm, _GETPID)
    _system_call(asm, _TGKILL)
    asm.mov(RESULT, Gpr.X0)
    asm.ret()


def write_clock(asm: A64Assembler, clock_page: int) -> None:
    """
    Write KTIME_GET_NS: CLOCK_MONOTONIC, from the timer's counter.

    ::

        time + (counter - CLOCK_COUNTER) * rate / 2**32, signed, of the valid reading of the clock page

    The counter may have been read on another CPU than the page was written on, or before it was: the difference is
    signed. It begins anew if the page has changed meanwhile, which happens some times in a second.
    """
    again = asm.label()
    version, number, other, reading = SCRATCH_1, RESULT, SCRATCH_2, SCRATCH_3
    page = Gpr.X0
    asm.mov_number(page, clock_page)
    asm.place(again)
    _write_field(asm, version, page, CLOCK_VERSION)
    asm.calculate(Operation.AND, reading, version, 1)
    asm.calculate(Operation.MUL, reading, reading, CLOCK_READING.size)
    asm.calculate(Operation.ADD, reading, reading, page)
    asm.synchronize()
    asm.read_system(number, SystemRegister.CNTVCT_EL0)
    _write_field(asm, other, reading, CLOCK_READINGS + CLOCK_COUNTER)
    asm.calculate(Operation.SUB, number, number, other)
    _write_field(asm, other, reading, CLOCK_READINGS + CLOCK_RATE)
    asm.multiply_high(Gpr.X2, number, other, is_signed=True)
    asm.calculate(Operation.MUL, number, number, other)
    asm.extract(number, Gpr.X2, number, 32)
    _write_field(asm, other, reading, CLOCK_READINGS + CLOCK_TIME)
    asm.calculate(Operation.ADD, number, number, other)
    _write_field(asm, other, page, CLOCK_VERSION)
    asm.compare(version, other)
    asm.jump_if(Condition.NE, again)
    asm.ret()


def _write_field(asm: A64Assembler, dst: Gpr, page: Gpr, place: int) -> None:
    """Load a word of a page so that no later load is done before."""
    asm.calculate(Operation.ADD, dst, page, place)
    asm.load_acquire(dst, dst)


# Routines that copy between the program's memory, which may not be there, and ours: what the kernel's helpers do.
#
# They take their arguments as eBPF's helpers do, change what calls change, and return 0 or EFAULT in R0. They read
# nothing beyond what was asked for.


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


# A signal handler for SIGSEGV and SIGBUS that lets a thread go on at a fix-up, for a process of our own.
#
# In the probed process it is the tracer who does this, who sees a signal before the program does.


_PC = 440
"""Where ``ucontext_t`` has pc: its sigcontext is at 176, with the fault's address, 31 registers and sp before it."""

_CONTEXT = Gpr.X2
"""The third argument of a handler with SA_SIGINFO."""


def fault_entry(address: int, fixups: Sequence[Fixup], otherwise: int) -> bytes:
    """
    Return the code of a handler with SA_SIGINFO, to be placed at ``address``.

    ``otherwise`` is the address of the handler for all other faults.
    """
    asm = A64Assembler(address)
    asm.load(Gpr.X9, Memory(_CONTEXT, _PC))
    for fixup in fixups:
        following = asm.label()
        asm.mov_number(Gpr.X10, fixup.instruction)
        asm.compare(Gpr.X9, Gpr.X10)
        asm.jump_if(Condition.NE, following)
        asm.mov_number(Gpr.X10, fixup.target)
        asm.store(Memory(_CONTEXT, _PC), Gpr.X10)
        asm.ret()
        asm.place(following)
    asm.mov_number(Gpr.X10, otherwise)
    asm.jump_by(Gpr.X10)
    return asm.assemble()


# The routines for AArch64.


def make_runtime(address: int, facts: ProcessFacts, rings: RingShape, tables: Mapping[MapName, TableShape]) -> Runtime:
    """Return the routines for ``address``."""
    writers = RoutineWriters(
        {
            Helper.PROBE_READ_USER: write_read,
            Helper.PROBE_READ_USER_STR: write_read_string,
            Helper.PROBE_WRITE_USER: write_write,
        },
        {Helper.SEND_SIGNAL: write_signal},
        write_ids,
        write_clock,
        write_stack_end,
        write_routine,
    )
    return written_runtime(A64Assembler(address), writers, facts, rings, tables)
