"""
From the entry of a call to its return, in the table of a process (``bpf.calltable``).

The first slot is nearly always the right one, and free if the last call with this frame has returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembler
from dprobes.bpf.asm.isa import Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.calltable import KEY, MULTIPLIER, PROBE_SHIFT, REGISTERS, SLOTS_SHIFT, TIME, WINDOW
from dprobes.bpf.layout import MapName, ProbeField
from dprobes.bpf.lower.hosts.host import CONTEXT
from dprobes.bpf.lower.hosts.ptregs import REGISTER_OFFSETS
from dprobes.bpf.lower.request import Lowered
from dprobes.bpf.lower.state.handlerstate import StateLayout

if TYPE_CHECKING:
    from dprobes.arch import Architecture
    from dprobes.bpf.calltable import CallTable
    from dprobes.bpf.lower.hosts.host import Host
    from dprobes.bpf.lower.request import Request

__all__ = ["table_entry_program", "take_from_table"]

_R = Register
_KEY, _SLOT, _LEFT, _OLDEST, _VICTIM, _OLD = _R.R1, _R.R2, _R.R3, _R.R4, _R.R5, _R.R0
_KEPT_SLOT = _R.R7


def take_from_table(asm: Assembler, request: Request, seen: int) -> None:
    """Take the entry of the call that returns away, to ``seen`` in the frame (time 0: there is none). Takes R0-R3."""
    assert request.entry is not None
    again, found, unseen = asm.label(), asm.label(), asm.label()
    table, count = _table_of(request), len(request.entry.registers)
    _find_window(asm, request)
    asm.load(_OLD, _SLOT, KEY)
    asm.jump_if(Jump.JEQ, _OLD, _KEY, found)
    asm.mov(_LEFT, WINDOW - 1)
    asm.place(again)
    asm.alu(Alu.ADD, _SLOT, table.slot)
    asm.load(_OLD, _SLOT, KEY)
    asm.jump_if(Jump.JEQ, _OLD, _KEY, found)
    asm.alu(Alu.SUB, _LEFT, 1)
    asm.jump_if(Jump.JNE, _LEFT, 0, again)
    for word in range(count + 1):
        asm.store(_R.R10, seen - 8 * word, 0)
    asm.jump(unseen)
    asm.place(found)
    for number in range(count):
        asm.load(_OLD, _SLOT, REGISTERS + 8 * number)
        asm.store(_R.R10, seen - 8 * (number + 1), _OLD)
    asm.load(_OLD, _SLOT, TIME)
    asm.store(_R.R10, seen, _OLD)
    asm.store(_SLOT, TIME, 0)
    asm.store(_SLOT, KEY, 0)
    asm.place(unseen)


def table_entry_program(architecture: Architecture, request: Request, host: type[Host]) -> Lowered:
    """Return the program at the entry."""
    assert request.entry is not None
    asm = Assembler()
    asked = host(asm, architecture, request, uses_ip=False, uses_ids=False)
    out, forget = asm.label(), asm.label()
    asm.mov(CONTEXT, _R.R1)
    assert request.probe is not None
    asked.probe_entry(_R.R1)
    asm.load(_R.R1, _R.R1, ProbeField.DISABLED, Size.W)
    asm.jump_if(Jump.JNE, _R.R1, 0, out)
    _find_window(asm, request)
    _claim(asm, _table_of(request))
    asm.mov(_KEPT_SLOT, _SLOT)
    for number, (name, _, distance) in enumerate(request.entry.registers):
        if distance is None:
            asked.register(_R.R1, name)
            asm.store(_KEPT_SLOT, REGISTERS + 8 * number, _R.R1)
            continue
        _read_word(asm, asked, architecture.word_size, REGISTERS + 8 * number, distance)
        asm.jump_if(Jump.JNE, _R.R0, 0, forget)
    asm.call(Helper.KTIME_GET_NS)
    asm.store(_KEPT_SLOT, TIME, _R.R0)
    asm.jump(out)
    asm.place(forget)
    asm.store(_KEPT_SLOT, KEY, 0)
    asm.place(out)
    asm.mov(_R.R0, 0)
    asm.exit()
    return Lowered(asm.assemble(), StateLayout(1), asked.sleeps, architecture.word_size)


def _read_word(asm: Assembler, asked: Host, size: int, place: int, distance: int) -> None:
    """Read a word that is at a distance from the stack pointer to a place in the slot that is kept."""

    def arguments() -> None:
        asm.mov(_R.R1, _KEPT_SLOT)
        asm.alu(Alu.ADD, _R.R1, place)
        asm.mov(_R.R2, size)
        asm.load(_R.R3, CONTEXT, REGISTER_OFFSETS["esp"])
        asm.alu(Alu.ADD, _R.R3, distance)

    asked.read_memory(arguments)


def _table_of(request: Request) -> CallTable:
    table = request.abilities.calls
    assert table is not None
    return table


def _find_window(asm: Assembler, request: Request) -> None:
    """Load the key of the call to R1, and where its slots begin to R2. Takes R3."""
    assert request.probe is not None
    asm.load(_KEY, CONTEXT, REGISTER_OFFSETS["esp"])
    if request.probe:
        asm.mov(_R.R2, request.probe << PROBE_SHIFT)
        asm.alu(Alu.OR, _KEY, _R.R2)
    asm.mov(_SLOT, _KEY)
    asm.mov(_R.R3, MULTIPLIER)
    asm.alu(Alu.MUL, _SLOT, _R.R3)
    asm.alu(Alu.RSH, _SLOT, 64 - SLOTS_SHIFT)
    asm.alu(Alu.LSH, _SLOT, _table_of(request).slot.bit_length() - 1)
    asm.load_value(_R.R3, MapName.ENTRIES)
    asm.alu(Alu.ADD, _SLOT, _R.R3)


def _claim(asm: Assembler, table: CallTable) -> None:
    """Let R2 be a slot with the key in R1: that of a call that never returned, a free one, or the oldest one's."""
    look, occupied, evict, mine = (asm.label() for _ in range(4))
    asm.mov(_LEFT, WINDOW)
    asm.mov(_OLDEST, -1)
    asm.mov(_VICTIM, _SLOT)
    asm.place(look)
    asm.load(_OLD, _SLOT, KEY)
    asm.jump_if(Jump.JNE, _OLD, 0, occupied)
    asm.atomic(Atomic.CMPXCHG, _SLOT, KEY, _KEY)
    asm.jump_if(Jump.JEQ, _OLD, 0, mine)
    asm.place(occupied)
    asm.jump_if(Jump.JEQ, _OLD, _KEY, mine)
    _note_oldest(asm)
    asm.alu(Alu.ADD, _SLOT, table.slot)
    asm.alu(Alu.SUB, _LEFT, 1)
    asm.jump_if(Jump.JNE, _LEFT, 0, look)
    asm.mov(_SLOT, _VICTIM)
    asm.place(evict)
    asm.store(_SLOT, TIME, 0)  # nobody else takes it away while it is being filled
    asm.load(_OLD, _SLOT, KEY)
    asm.mov(_LEFT, _OLD)
    asm.atomic(Atomic.CMPXCHG, _SLOT, KEY, _KEY)
    asm.jump_if(Jump.JNE, _OLD, _LEFT, evict)
    asm.place(mine)


def _note_oldest(asm: Assembler) -> None:
    """Let R5 be the slot with the lowest time less one so far, which is R4: so what is being filled comes last."""
    is_younger = asm.label()
    asm.load(_OLD, _SLOT, TIME)
    asm.alu(Alu.SUB, _OLD, 1)
    asm.jump_if(Jump.JGE, _OLD, _OLDEST, is_younger)
    asm.mov(_OLDEST, _OLD)
    asm.mov(_VICTIM, _SLOT)
    asm.place(is_younger)
