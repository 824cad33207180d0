"""
The tickets of pass count and max hits that come back if the instruction faults.

``hits`` of a probepoint is the number of tickets that are drawn. A hit notes in NOTES which one it drew, and where; if
its thread gets a signal for a fault of that instruction, a program in the kernel (the eBPF engine's signal programs)
gives the ticket back before the thread can run on. So whether a limit is reached says the number of tickets, never a
flag; that the handler of such a hit executed ``remove`` is undone in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.layout import LIMIT, NOTE_SIZE, REMOVE, REMOVED_BY, MapName, ProbeField
from dprobes.bpf.lower.hosts.host import CONTEXT
from dprobes.bpf.lower.hosts.ptregs import REGISTER_OFFSETS

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Label
    from dprobes.bpf.lower.writer import Writer

__all__ = ["Ticket", "ticket_of"]

_R = Register

_KEY, _EMPTY = -4, -96
"""Where on the stack the key of a note is put, and an empty note."""


def ticket_of(writer: Writer) -> Ticket | None:
    """Return the ticket of a handler; None if there is nothing to give back."""
    request = writer.request
    if request.note is None or not (request.passcount or request.maxhits or writer.flow.uses("remove")):
        return None
    return Ticket(writer, request.note)


class Ticket:
    """Write what a handler does for its ticket; ``note`` is its pair in the note of a thread."""

    def __init__(self, writer: Writer, note: int) -> None:
        self._asm = writer.asm
        self._host = writer.host
        self._probe = writer.request.probe
        self._pair = 16 * note

    def open(self, busy: Label) -> None:
        """Let R7 point to the handler's pair, and empty that; go to ``busy`` if there is none. Takes R0-R5."""
        asm, found = self._asm, self._asm.label()
        self._host.global_tid()
        asm.store(_R.R10, _KEY, _R.R0, Size.W)
        self._look_up()
        asm.jump_if(Jump.JNE, _R.R0, 0, found)
        for offset in range(0, NOTE_SIZE, 8):
            asm.store(_R.R10, _EMPTY + offset, 0)
        asm.load_map(_R.R1, MapName.NOTES)
        asm.mov(_R.R2, _R.R10)
        asm.alu(Alu.ADD, _R.R2, _KEY)
        asm.mov(_R.R3, _R.R10)
        asm.alu(Alu.ADD, _R.R3, _EMPTY)
        asm.mov(_R.R4, 0)
        asm.call(Helper.MAP_UPDATE_ELEM)
        self._look_up()
        asm.jump_if(Jump.JEQ, _R.R0, 0, busy)
        asm.place(found)
        asm.mov(_R.R7, _R.R0)
        asm.store(_R.R7, self._pair, 0)

    def _look_up(self) -> None:
        asm = self._asm
        asm.load_map(_R.R1, MapName.NOTES)
        asm.mov(_R.R2, _R.R10)
        asm.alu(Alu.ADD, _R.R2, _KEY)
        asm.call(Helper.MAP_LOOKUP_ELEM)

    def draw(self, last: int | None, out: Label) -> None:
        """
        Draw a ticket into R2 and note it, R1 being the entry and R8 the attach cookie; takes R3.

        Go to ``out`` if the ``last`` one has been drawn.
        """
        asm = self._asm
        if last is not None:
            asm.mov(_R.R3, last)
            asm.load(_R.R2, _R.R1, ProbeField.HITS)
            asm.jump_if(Jump.JGT, _R.R2, _R.R3, out)
        asm.mov(_R.R2, 1)
        asm.atomic(Atomic.ADD, _R.R1, ProbeField.HITS, _R.R2, fetch=True)
        if last is not None:
            # Somebody else was quicker.
            drawn = asm.label()
            asm.jump_if(Jump.JLE, _R.R2, _R.R3, drawn)
            asm.mov(_R.R2, -1)
            asm.atomic(Atomic.ADD, _R.R1, ProbeField.HITS, _R.R2)
            asm.jump(out)
            asm.place(drawn)
        if self._probe is None:
            asm.mov(_R.R3, _R.R8, wide=False)
            asm.store(_R.R7, self._pair + 8, _R.R3)
        else:
            asm.store(_R.R7, self._pair + 8, self._probe)
        asm.load(_R.R3, CONTEXT, REGISTER_OFFSETS["eip"])
        asm.store(_R.R7, self._pair, _R.R3)

    def disable(self) -> None:
        """Let no more handlers run, for the reason that is in R8; takes R0, R1, R3 and those of helpers."""
        asm, disabled, for_good = self._asm, self._asm.label(), self._asm.label()
        asm.jump_if(Jump.JEQ, _R.R8, LIMIT, disabled)  # there is no ticket left
        asm.jump_if(Jump.JNE, _R.R8, REMOVE, for_good)
        self._host.global_tid()
        asm.mov(_R.R3, _R.R0)
        asm.alu(Alu.OR, _R.R3, REMOVED_BY - (1 << 32), wide=False)
        self._host.probe_entry(_R.R1)
        asm.mov(_R.R0, 0)
        asm.atomic(Atomic.CMPXCHG, _R.R1, ProbeField.DISABLED, _R.R3, size=Size.W)
        asm.jump(disabled)
        asm.place(for_good)
        self._host.probe_entry(_R.R1)
        asm.store(_R.R1, ProbeField.DISABLED, 1, Size.W)
        asm.place(disabled)
