"""
The routines that handlers of a process call: replacements of the kernel's helpers, without the kernel.

::

    routines for memory and identities │ those of ``native.routines``, for each shape of a map

They are one block of code within reach of all handlers. They have the arguments of the helpers, and clobber R0 to R5,
S1 and S2.

A seccomp filter may kill the process for an unexpected system call (seccomp(2)). So the reader of records adds the
thread's name and user id, which only the kernel has. The one exception is SEND_SIGNAL: a handler calls it to stop the
process.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Helper, Jump
from dprobes.native.ebpf_translator import write_function
from dprobes.native.generated_code import Fixup, NativeCode, Runtime, Surroundings
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
from dprobes.native.routines.handler_ring import output_routine
from dprobes.native.routines.shared_hash_table import hash_routine
from dprobes.native.virtual_assembler import MemoryWord, SystemCall, VirtualRegister, move
from dprobes.target.process_maps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.bpf.map_layouts import MapName
    from dprobes.native.generated_code import ProcessFacts
    from dprobes.native.routines.handler_ring import RingShape
    from dprobes.native.routines.shared_hash_table import TableShape
    from dprobes.native.virtual_assembler import Label, VirtualAssembler

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

_V = VirtualRegister
_HASH_HELPERS = (Helper.MAP_LOOKUP_ELEM, Helper.MAP_UPDATE_ELEM, Helper.MAP_DELETE_ELEM)


def make_runtime(
    asm: VirtualAssembler, facts: ProcessFacts, rings: RingShape, tables: Mapping[MapName, TableShape]
) -> Runtime:
    """
    Write the routines of a process, and return them with their addresses.

    ``rings`` is the shape of the rings for records, ``tables`` has the shape of each hash table.
    """
    fixups: list[Fixup] = []
    routines: dict[Helper, int] = {}
    for helper, write in (
        (Helper.PROBE_READ_USER, write_read),
        (Helper.PROBE_READ_USER_STR, write_read_string),
        (Helper.PROBE_WRITE_USER, write_write),
    ):
        routines[helper] = asm.here
        fixups += write(asm)
    routines[Helper.GET_CURRENT_PID_TGID] = asm.here
    write_ids(asm, facts.process_page, facts.tid_place)
    routines[Helper.KTIME_GET_NS] = asm.here
    write_clock(asm, facts.clock_page)
    routines[Helper.GET_CURRENT_TASK] = asm.here
    fixups += write_stack_end(asm, facts.first_stack)
    routines[Helper.SEND_SIGNAL] = asm.here
    write_signal(asm)
    around = Surroundings({}, routines, {}, facts.has_rdpid, cpu_place=facts.cpu_place)
    routines[Helper.RINGBUF_OUTPUT] = write_function(asm, output_routine(rings), around)
    by_shape: dict[tuple[TableShape, Helper], int] = {}
    map_routines = {}
    for name, shape in tables.items():
        for helper in _HASH_HELPERS:
            if (shape, helper) not in by_shape:
                by_shape[shape, helper] = write_function(asm, hash_routine(helper, shape), around)
            map_routines[name, helper] = by_shape[shape, helper]
    return Runtime(NativeCode(asm.address, asm.assemble(), tuple(fixups)), routines, map_routines)


def _return(asm: VirtualAssembler, number: int) -> None:
    move(asm, _V.R0, number)
    asm.ret()


# Identities of a hit, and its time.


def write_ids(asm: VirtualAssembler, process_page: int, tid_place: int | None) -> None:
    """
    Write GET_CURRENT_PID_TGID: R0 has the process id in the upper half, the thread id in the lower one.

    ``tid_place`` is the offset of the thread id in the C library's data, in bytes from the thread pointer. The thread
    id is 0 if ``tid_place`` is None, or if the table of a nested process lacks the thread.
    """
    move(asm, _V.S1, process_page)
    asm.read(_V.R0, _V.S1, PROCESS_PID, 4)
    asm.alu(Alu.LSH, _V.R0, 32)
    if tid_place is not None:
        local, place, left, found = _V.R3, _V.S1, _V.S2, _V.R5
        nested, following, known = asm.label(), asm.label(), asm.label()
        asm.read_thread(local, tid_place)
        asm.read(found, place, PROCESS_IS_NESTED, 4)
        asm.branch(Jump.JNE, found, 0, nested, wide=False)
        asm.alu(Alu.OR, _V.R0, local)
        asm.ret()
        asm.place(nested)
        move(asm, found, local, wide=False)
        asm.alu(Alu.AND, found, THREAD_SLOTS - 1, wide=False)
        asm.alu(Alu.MUL, found, THREAD.size)
        asm.alu(Alu.ADD, place, found)
        move(asm, left, THREAD_WINDOW)
        asm.place(following)
        asm.read(found, place, PROCESS_THREADS, 4)
        asm.branch(Jump.JEQ, found, local, known, wide=False)
        asm.alu(Alu.ADD, place, THREAD.size)
        asm.count_down(left, 1, following)
        asm.ret()
        asm.place(known)
        asm.read(found, place, PROCESS_THREADS + THREAD.size // 2, 4)
        asm.alu(Alu.OR, _V.R0, found)
    asm.ret()


def write_stack_end(asm: VirtualAssembler, first_stack: int | None) -> list[Fixup]:
    """
    Write GET_CURRENT_TASK: R0 is the upper end of the stack that contains the address in R1, or 0 if it is unknown.

    The C library places a thread's data, to which the thread pointer points, above the thread's stack. The main
    thread's stack ends at ``first_stack``; None: unknown. R0 is the lower of these two addresses above R1. The load of
    the thread pointer may fault before the C library has set it; return the fix-up.
    """
    none, known, looked = asm.label(), asm.label(), asm.label()
    fault = asm.here
    asm.read_thread_pointer(_V.R0)
    asm.place(looked)
    if first_stack is not None:
        # Of two unsigned distances, the one to an address below is the greater one.
        move(asm, _V.R3, first_stack)
        move(asm, _V.R4, _V.R0)
        asm.alu(Alu.SUB, _V.R4, _V.R1)
        move(asm, _V.R2, _V.R3)
        asm.alu(Alu.SUB, _V.R2, _V.R1)
        asm.branch(Jump.JLE, _V.R4, _V.R2, known)
        move(asm, _V.R0, _V.R3)
    asm.place(known)
    asm.branch(Jump.JLT, _V.R0, _V.R1, none)
    asm.ret()
    missing = asm.here
    move(asm, _V.R0, 0)
    asm.jump(looked)
    asm.place(none)
    _return(asm, 0)
    return [Fixup(fault, missing)]


def write_signal(asm: VirtualAssembler) -> None:
    """Write SEND_SIGNAL: send the signal in R1 to the calling thread by tgkill(2)."""
    move(asm, _V.R5, _V.R1)
    asm.enter_kernel(SystemCall.GETTID)
    move(asm, _V.R2, _V.R0)
    asm.enter_kernel(SystemCall.GETPID)
    move(asm, _V.R1, _V.R0)
    move(asm, _V.R3, _V.R5)
    asm.enter_kernel(SystemCall.TGKILL)
    asm.ret()


def write_clock(asm: VirtualAssembler, clock_page: int) -> None:
    """
    Write KTIME_GET_NS: CLOCK_MONOTONIC in nanoseconds, from the processor's counter.

    ::

        time + (counter - CLOCK_COUNTER) * rate / 2**32, signed, of the valid reading of the clock page

    The difference is signed: the counter of another CPU may be a little lower than that of the page. The routine starts
    again if the page has changed meanwhile. The page changes a few times a second.
    """
    again, page, reading, version = asm.label(), _V.S1, _V.S2, _V.R5
    move(asm, page, clock_page)
    asm.place(again)
    asm.read(version, page, CLOCK_VERSION, is_shared=True)
    move(asm, reading, version)
    asm.alu(Alu.AND, reading, 1)
    asm.alu(Alu.MUL, reading, CLOCK_READING.size)
    asm.alu(Alu.ADD, reading, page)
    asm.read_counter()
    asm.alu(Alu.SUB, _V.R0, MemoryWord(reading, CLOCK_READINGS + CLOCK_COUNTER))
    asm.scale(reading, CLOCK_READINGS + CLOCK_RATE)
    asm.alu(Alu.ADD, _V.R0, MemoryWord(reading, CLOCK_READINGS + CLOCK_TIME))
    asm.branch(Jump.JNE, version, MemoryWord(page, CLOCK_VERSION), again)
    asm.ret()


# Copies between the probed program's memory, which may be unmapped, and the tool's. They return -EFAULT after a fault.
#
# They use no string instructions, which depend on the direction flag of x86, and read no bytes that were not requested.


_WORD = 8
_ONES, _HIGHS = 0x0101010101010101, 0x8080808080808080
_START, _LEFT, _DATA = _V.S1, _V.R4, _V.R5


def _resolved(asm: VirtualAssembler, places: list[tuple[int, Label]]) -> list[Fixup]:
    return [Fixup(at, asm.address_of(target)) for at, target in places]


def _copy(asm: VirtualAssembler, faulting: list[tuple[int, Label]], fault: Label, *, stores: bool) -> None:
    """
    Write a copy of _LEFT bytes from R3 to R1, by words and then by bytes. Clobbers R1, R3, _LEFT and _DATA.

    Append the loads, or with ``stores`` the stores, to ``faulting``: after a fault they continue at ``fault``.
    """
    words, tail, byte, done = asm.label(), asm.label(), asm.label(), asm.label()
    asm.place(words)
    asm.branch(Jump.JLT, _LEFT, _WORD, tail)
    for label, width in ((words, _WORD), (byte, 1)):
        if width == 1:
            asm.place(tail)
            asm.branch(Jump.JEQ, _LEFT, 0, done)
            asm.place(byte)
        if not stores:
            faulting.append((asm.here, fault))
        asm.read(_DATA, _V.R3, 0, width)
        if stores:
            faulting.append((asm.here, fault))
        asm.write(_V.R1, 0, _DATA, width)
        asm.alu(Alu.ADD, _V.R3, width)
        asm.alu(Alu.ADD, _V.R1, width)
        if width == 1:
            asm.count_down(_LEFT, width, label)
        else:
            asm.alu(Alu.SUB, _LEFT, width)
            asm.jump(label)
    asm.place(done)


def _clear(asm: VirtualAssembler, fault: Label) -> None:
    """Write the code at the label ``fault``, for a read that faulted: clear R2 bytes at _START, and return -EFAULT."""
    cleared = asm.label()
    asm.place(fault)
    asm.branch(Jump.JEQ, _V.R2, 0, cleared)
    asm.write_number(_START, 0, 0, 1)
    asm.alu(Alu.ADD, _START, 1)
    asm.alu(Alu.SUB, _V.R2, 1)
    asm.jump(fault)
    asm.place(cleared)
    _return(asm, -errno.EFAULT)


def write_read(asm: VirtualAssembler) -> list[Fixup]:
    """
    Write the routine that copies R2 bytes at R3 to R1. R0 is 0, or -EFAULT if a byte cannot be read.

    After a fault all bytes at R1 are cleared. A word, the most frequent size, has the shortest path. Return the
    fix-ups.
    """
    faulting: list[tuple[int, Label]] = []
    fault, any_size = asm.label(), asm.label()
    move(asm, _START, _V.R1)
    move(asm, _LEFT, _V.R2)
    asm.branch(Jump.JNE, _V.R2, _WORD, any_size)
    faulting.append((asm.here, fault))
    asm.read(_V.R0, _V.R3, 0)
    asm.write(_V.R1, 0, _V.R0)
    _return(asm, 0)
    asm.place(any_size)
    _copy(asm, faulting, fault, stores=False)
    _return(asm, 0)
    _clear(asm, fault)
    return _resolved(asm, faulting)


def write_write(asm: VirtualAssembler) -> list[Fixup]:
    """
    Write the routine that writes R3 bytes at R2 to the probed program's memory at R1. R0 is 0 or -EFAULT.

    Bytes before the one that faulted may have been written. Return the fix-ups.
    """
    faulting: list[tuple[int, Label]] = []
    fault = asm.label()
    move(asm, _LEFT, _V.R3)
    move(asm, _V.R3, _V.R2)
    _copy(asm, faulting, fault, stores=True)
    _return(asm, 0)
    asm.place(fault)
    _return(asm, -errno.EFAULT)
    return _resolved(asm, faulting)


def write_read_string(asm: VirtualAssembler) -> list[Fixup]:
    """
    Write the routine that copies the string at R3 to R1, at most R2 bytes including the NUL.

    R0 is the number of bytes written, 0 if R2 is 0, or -EFAULT, after which all R2 bytes at R1 are cleared. A longer
    string is truncated and NUL-terminated. Whole words are read only where they do not cross into another page: so
    memory after the string is never accessed.
    """
    faulting: list[tuple[int, Label]] = []
    again, byte, ended, cut, fault, empty = (asm.label() for _ in range(6))
    asm.branch(Jump.JEQ, _V.R2, 0, empty)
    move(asm, _START, _V.R1)
    move(asm, _LEFT, _V.R2)
    asm.place(again)
    # Read a word at once, if there is room for nine bytes, and it lies in one page.
    asm.branch(Jump.JLE, _LEFT, _WORD, byte)
    asm.add(_V.R0, _V.R3, _WORD - 1)
    asm.alu(Alu.XOR, _V.R0, _V.R3)
    asm.branch(Jump.JGE, _V.R0, PAGE_SIZE, byte)
    faulting.append((asm.here, fault))
    asm.read(_V.R0, _V.R3, 0)
    move(asm, _V.S2, -_ONES)
    asm.alu(Alu.ADD, _V.S2, _V.R0)
    move(asm, _DATA, _V.R0)
    asm.alu(Alu.XOR, _DATA, -1)
    asm.alu(Alu.AND, _V.S2, _DATA)
    move(asm, _DATA, _HIGHS)
    asm.branch(Jump.JSET, _V.S2, _DATA, byte)  # one of the bytes is 0
    asm.write(_V.R1, 0, _V.R0)
    _advance(asm, _WORD)
    asm.jump(again)
    asm.place(byte)
    asm.branch(Jump.JEQ, _LEFT, 1, cut)
    faulting.append((asm.here, fault))
    asm.read(_V.R0, _V.R3, 0, 1)
    asm.write(_V.R1, 0, _V.R0, 1)
    _advance(asm, 1)
    asm.branch(Jump.JEQ, _V.R0, 0, ended)
    asm.branch(Jump.JSET, _V.R3, _WORD - 1, byte)
    asm.jump(again)
    asm.place(cut)
    asm.write_number(_V.R1, 0, 0, 1)
    asm.alu(Alu.ADD, _V.R1, 1)
    asm.place(ended)
    move(asm, _V.R0, _V.R1)
    asm.alu(Alu.SUB, _V.R0, _START)
    asm.ret()
    asm.place(empty)
    _return(asm, 0)
    _clear(asm, fault)
    return _resolved(asm, faulting)


def _advance(asm: VirtualAssembler, width: int) -> None:
    asm.alu(Alu.ADD, _V.R3, width)
    asm.alu(Alu.ADD, _V.R1, width)
    asm.alu(Alu.SUB, _LEFT, width)


def fault_entry(asm: VirtualAssembler, fixups: Sequence[Fixup], otherwise: int) -> bytes:
    """
    Return an SA_SIGINFO handler for SIGSEGV and SIGBUS: after a fault of a fix-up, the thread continues at its target.

    ``otherwise`` is the address of the handler for all other faults. Only processes of the tool use it. In a probed
    process the tracer applies fix-ups, because it gets the signal before the process does.
    """
    context, fault, other = _V.R3, _V.R0, _V.S1
    asm.read(fault, context, asm.fault_place)
    for fixup in fixups:
        following = asm.label()
        move(asm, other, fixup.instruction)
        asm.branch(Jump.JNE, fault, other, following)
        move(asm, other, fixup.target)
        asm.write(context, asm.fault_place, other)
        asm.ret()
        asm.place(following)
    asm.jump_far(otherwise)
    return asm.assemble()
