"""
Performance counters of the thread that took a hit, in eBPF (``push pmc``).

The kernel itself counts some events in ``task_struct``. Other counters belong to a CPU: its clock, or an event of each
CPU. For those, COUNTERS has a cell (``CounterCell``) for each thread and counter, and a program on ``sched_switch``
(``process_programs.follow_counters``) maintains the cells. The value is ``total`` plus what the counter of the CPU has
counted since ``since``. A thread gets its cells at its first reading.

A handler may be preempted between the reads of a cell and of the counter. The cell has changed then, and the handler
reads both again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import NO_OVERWRITE, Alu, Helper, Jump, Register
from dprobes.bpf.lower.hosts.hit_thread import read_kernel_word
from dprobes.bpf.lower.state.handler_state import SCRATCH
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
    from dprobes.bpf.lower.hosts.handler_host import Host
    from dprobes.bpf.lower.lowering_request import CounterLayout

__all__ = ["load_key", "read_event", "write_counter"]

_R = Register

_TRIES = 4
"""How often a handler reads a counter that changes under it before it gives up."""

_KEY, _SINCE, _TOTAL, _READING = 0, 1, 2, 3
"""Words for temporary use: the key of the cell, copies of two of its words, and three for other data."""

WORDS = 6


def write_counter(host: Host, asm: Assembler, counters: CounterLayout, number: int, work: int, unread: Label) -> None:
    """
    Load a counter to R0, or go to ``unread`` if it cannot be read. Clobbers R1-R5.

    Six words of the state at the offset ``work`` are for temporary use.
    """
    words = tuple(work + 8 * word for word in range(WORDS))
    if number in counters.members:
        _add_members(host, asm, counters.members[number], words, unread)
    else:
        _read_cell(host, asm, counters, number, words, unread)


def _add_members(host: Host, asm: Assembler, members: tuple[int, ...], words: tuple[int, ...], unread: Label) -> None:
    """Load the sum of members of the thread's ``task_struct``, each 64 bits, to R0."""
    total = words[_TOTAL]
    asm.store(SCRATCH, total, 0)
    for offset in members:
        host.task()
        read_kernel_word(asm, _R.R0, offset, (SCRATCH, words[_READING]), unread)
        asm.load(_R.R0, SCRATCH, total)
        asm.alu(Alu.ADD, _R.R0, _R.R3)
        asm.store(SCRATCH, total, _R.R0)


def _read_cell(
    host: Host, asm: Assembler, counters: CounterLayout, number: int, words: tuple[int, ...], unread: Label
) -> None:
    """Load a counter that CPUs count to R0."""
    cell, has_event = counters.cells.index(number), counters.has_event(number)
    known, done = asm.label(), asm.label()
    host.global_tid()
    asm.jump_if(Jump.JEQ, _R.R0, 0, unread)  # an idle thread: those of all CPUs have this id
    load_key(asm, cell)
    asm.store(SCRATCH, words[_KEY], _R.R0)
    asm.look_up(MapName.COUNTERS, SCRATCH, words[_KEY])
    asm.jump_if(Jump.JNE, _R.R0, 0, known)
    for word in range(COUNTER_CELL_SIZE // 8):
        asm.store(SCRATCH, words[_READING + word], 0)
    asm.load_map(_R.R1, MapName.COUNTERS)
    asm.add(_R.R2, SCRATCH, words[_KEY])
    asm.add(_R.R3, SCRATCH, words[_READING])
    asm.mov(_R.R4, NO_OVERWRITE)
    asm.call(Helper.MAP_UPDATE_ELEM)
    asm.place(known)
    for _ in range(_TRIES):
        again = asm.label()
        asm.look_up(MapName.COUNTERS, SCRATCH, words[_KEY])
        asm.jump_if(Jump.JEQ, _R.R0, 0, unread)
        asm.jump_if_word(Jump.JNE, _R.R0, CounterCell.IS_BROKEN, 0, unread)
        asm.copy_from(_R.R0, CounterCell.SINCE, SCRATCH, words[_SINCE])
        asm.copy_from(_R.R0, CounterCell.TOTAL, SCRATCH, words[_TOTAL])
        if has_event:
            read_event(asm, cell, (SCRATCH, words[_READING]), unread)
            asm.load(_R.R0, SCRATCH, words[_READING] + CounterReading.VALUE)
        else:
            host.time()
        asm.store(SCRATCH, words[_READING], _R.R0)
        asm.look_up(MapName.COUNTERS, SCRATCH, words[_KEY])
        asm.jump_if(Jump.JEQ, _R.R0, 0, unread)
        asm.load(_R.R1, SCRATCH, words[_SINCE])
        asm.load(_R.R2, SCRATCH, words[_TOTAL])
        asm.jump_if_word(Jump.JNE, _R.R0, CounterCell.SINCE, _R.R1, again, by=_R.R3)
        asm.jump_if_word(Jump.JNE, _R.R0, CounterCell.TOTAL, _R.R2, again, by=_R.R3)
        asm.load(_R.R0, SCRATCH, words[_READING])
        asm.alu(Alu.SUB, _R.R0, _R.R1)
        asm.alu(Alu.ADD, _R.R0, _R.R2)
        asm.jump(done)
        asm.place(again)
    asm.jump(unread)
    asm.place(done)


def load_key(asm: Assembler, cell: int) -> None:
    """Turn the id of a thread in R0, 32 bits, into the key of its cell; clobbers R1."""
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
