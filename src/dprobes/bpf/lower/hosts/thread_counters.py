"""
Performance counters of the thread that took a hit, in eBPF (``push pmc``).

The kernel itself counts some events in ``task_struct``. Other counters belong to a CPU: its clock, or an event of each
CPU. For those, COUNTERS has a cell (``CounterCell``) for each thread and counter, and a program on ``sched_switch``
(``process_programs.follow_counters``) maintains the cells. The value is ``total`` plus the increase of the CPU's
counter since ``since``. A thread gets its cells when a counter is first read.

A handler may be preempted between its reads of a cell and of the counter. The cell has changed then, and the handler
reads both again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import NO_OVERWRITE, Alu, Helper, Jump, Register
from dprobes.bpf.lower.hosts.hit_thread import read_kernel_word
from dprobes.bpf.map_layouts import (
    COUNTER_CELL_SIZE,
    COUNTER_READING_SIZE,
    COUNTER_SHIFT,
    CounterCell,
    CounterReading,
    MapName,
)

if TYPE_CHECKING:
    from dprobes.bpf.bpf_assembler import Assembler, Label
    from dprobes.bpf.lower.hosts.hit_thread import Identities
    from dprobes.bpf.lower.lowering_request import CounterLayout

__all__ = ["load_key", "read_event", "write_counter"]

_R = Register

_TRIES = 4
"""Maximum number of attempts to read a counter while its cell changes."""

_KEY, _SINCE, _TOTAL, _READING = 0, 8, 16, 24
"""Offsets in the room for temporary data: the key of the cell, copies of two of its words, and three more words."""


def write_counter(
    host: Identities, asm: Assembler, counters: CounterLayout, number: int, room: tuple[Register, int], unread: Label
) -> None:
    """Load a counter to R0. Arguments and clobbered registers are those of ``Host.counter``."""
    if number in counters.members:
        _add_members(host, asm, counters.members[number], room, unread)
    else:
        _read_cell(host, asm, counters, number, room, unread)


def _add_members(
    host: Identities, asm: Assembler, members: tuple[int, ...], room: tuple[Register, int], unread: Label
) -> None:
    """
    Load the sum of 64-bit members of the thread's ``task_struct`` to R0. Clobbers R1-R5.

    ``members`` has their offsets in bytes. Go to ``unread`` if one cannot be read; ``room`` is for temporary use.
    """
    base, total = room[0], room[1] + _TOTAL
    asm.store(base, total, 0)
    for offset in members:
        host.task()
        read_kernel_word(asm, _R.R0, offset, (base, room[1] + _READING), unread)
        asm.load(_R.R0, base, total)
        asm.alu(Alu.ADD, _R.R0, _R.R3)
        asm.store(base, total, _R.R0)


def _read_cell(
    host: Identities, asm: Assembler, counters: CounterLayout, number: int, room: tuple[Register, int], unread: Label
) -> None:
    """Load the current thread's value of a per-CPU counter to R0; clobbers R1-R5."""
    cell, has_event = counters.cells.index(number), counters.has_event(number)
    base, key, since, total, reading = room[0], *(room[1] + word for word in (_KEY, _SINCE, _TOTAL, _READING))
    known, done = asm.label(), asm.label()
    host.global_tid()
    asm.jump_if(Jump.JEQ, _R.R0, 0, unread)  # an idle thread: those of all CPUs have this id
    load_key(asm, cell)
    asm.store(base, key, _R.R0)
    asm.look_up(MapName.COUNTERS, base, key)
    asm.jump_if(Jump.JNE, _R.R0, 0, known)
    for word in range(0, COUNTER_CELL_SIZE, 8):
        asm.store(base, reading + word, 0)
    asm.load_map(_R.R1, MapName.COUNTERS)
    asm.add(_R.R2, base, key)
    asm.add(_R.R3, base, reading)
    asm.mov(_R.R4, NO_OVERWRITE)
    asm.call(Helper.MAP_UPDATE_ELEM)
    asm.place(known)
    for _ in range(_TRIES):
        again = asm.label()
        asm.look_up(MapName.COUNTERS, base, key, unread)
        asm.jump_if_word(Jump.JNE, _R.R0, CounterCell.IS_BROKEN, 0, unread)
        asm.copy_from(_R.R0, CounterCell.SINCE, base, since)
        asm.copy_from(_R.R0, CounterCell.TOTAL, base, total)
        if has_event:
            read_event(asm, cell, (base, reading), unread)
            asm.load(_R.R0, base, reading + CounterReading.VALUE)
        else:
            host.time()
        asm.store(base, reading, _R.R0)
        asm.look_up(MapName.COUNTERS, base, key, unread)
        asm.load(_R.R1, base, since)
        asm.load(_R.R2, base, total)
        asm.jump_if_word(Jump.JNE, _R.R0, CounterCell.SINCE, _R.R1, again, by=_R.R3)
        asm.jump_if_word(Jump.JNE, _R.R0, CounterCell.TOTAL, _R.R2, again, by=_R.R3)
        asm.load(_R.R0, base, reading)
        asm.alu(Alu.SUB, _R.R0, _R.R1)
        asm.alu(Alu.ADD, _R.R0, _R.R2)
        asm.jump(done)
        asm.place(again)
    asm.jump(unread)
    asm.place(done)


def load_key(asm: Assembler, cell: int) -> None:
    """Turn a 32-bit thread id in R0 into the key of the thread's cell. Clobbers R1."""
    if cell:
        asm.mov(_R.R1, cell << 32)
        asm.alu(Alu.OR, _R.R0, _R.R1)


def read_event(asm: Assembler, cell: int, room: tuple[Register, int], unread: Label) -> None:
    """
    Read the event of this CPU for a counter to ``room`` (``CounterReading``). Clobbers R0-R5.

    ``cell`` is the number of the counter in ``CounterLayout.cells``. Go to ``unread`` if there is no event, or if it
    has not counted all the time.
    """
    asm.call(Helper.GET_SMP_PROCESSOR_ID)
    asm.mov(_R.R2, _R.R0, wide=False)
    asm.alu(Alu.ADD, _R.R2, cell << COUNTER_SHIFT)
    asm.load_map(_R.R1, MapName.COUNTER_EVENTS)
    asm.add(_R.R3, *room)
    asm.mov(_R.R4, COUNTER_READING_SIZE)
    asm.call(Helper.PERF_EVENT_READ_VALUE)
    asm.jump_if(Jump.JNE, _R.R0, 0, unread)
    base, offset = room
    asm.load(_R.R1, base, offset + CounterReading.ENABLED)
    asm.load(_R.R2, base, offset + CounterReading.RUNNING)
    asm.jump_if(Jump.JNE, _R.R1, _R.R2, unread)
