"""The code after a handler: its record and stack traces, the request for removal; the state is released."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Atomic, Jump, Register, Size
from dprobes.bpf.layout import LIMIT, REMOVE, MapName, ProbeField
from dprobes.bpf.lower.state.handlerstate import ABORT, EXIT, EXIT_WITH, SKIP, Field
from dprobes.bpf.lower.state.stack import SCRATCH
from dprobes.rpn.needs import CORE_DUMP

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Label
    from dprobes.bpf.lower.hits.overload import Overload
    from dprobes.bpf.lower.hits.ringentries import RingEntries
    from dprobes.bpf.lower.hits.tickets import Ticket
    from dprobes.bpf.lower.writer import Writer

__all__ = ["Epilogue"]

_R = Register


class Epilogue:
    """The code after one handler; ``out`` is where a hit goes that has no state to give back."""

    def __init__(
        self, writer: Writer, entries: RingEntries, ticket: Ticket | None, overload: Overload | None, out: Label
    ) -> None:
        self._w = writer
        self._asm = writer.asm
        self._request = writer.request
        self._flow = writer.flow
        self._entries = entries
        self._ticket = ticket
        self._overload = overload
        self._out = out
        self._wish_label: Label | None = None

    def write(self) -> None:
        """Write all of it."""
        asm = self._asm
        release = asm.label()
        self._note_unhandled()
        if self._w.is_small and not self._w.raises and {ending for ending, _ in self._w.endings} == {ABORT}:
            self._measured()
            self._out_of_handler()
            return
        if self._flow.uses("abort", "vfyrw"):
            asm.load(_R.R1, SCRATCH, Field.ENDING)
            asm.jump_if(Jump.JEQ, _R.R1, ABORT, self._ended(release))
        self._entries.write_record()
        if self._w.state.ex_logmax:
            self._entries.write_traces()
        self._skip_function()
        self._wish(release)
        asm.place(release)
        self._measured()
        self._release()
        self._out_of_handler()

    def _measured(self) -> None:
        if self._overload is not None:
            self._overload.end()

    def _release(self) -> None:
        """Give the state back."""
        asm = self._asm
        if self._w.is_small:
            return
        asm.load(_R.R1, SCRATCH, Field.NUMBER)
        asm.alu(Alu.AND, _R.R1, self._request.tables.states - 1)
        asm.alu(Alu.LSH, _R.R1, 3)
        asm.load_value(_R.R2, MapName.CLAIMS)
        asm.alu(Alu.ADD, _R.R2, _R.R1)
        asm.store(_R.R2, 0, 0)

    def _out_of_handler(self) -> None:
        asm = self._asm
        asm.place(self._out)
        self._w.host.load_result()
        asm.exit()

    def _ended(self, release: Label) -> Label:
        """Return where a handler goes that ended by ``abort``: even that may be the last hit."""
        if not self._request.maxhits:
            return release
        self._wish_label = self._asm.label()
        return self._wish_label

    def _note_unhandled(self) -> None:
        asm = self._asm
        if self._w.is_small and not self._w.raises:
            return
        if not any(i.row is None or i.row.faults for i in self._flow.instructions.values()):
            return
        handled = asm.label()
        asm.load(_R.R3, SCRATCH, Field.UNHANDLED)
        asm.jump_if(Jump.JEQ, _R.R3, 0, handled)
        self._w.host.probe_entry(_R.R1)
        asm.atomic(Atomic.OR, _R.R1, ProbeField.UNHANDLED, _R.R3)
        asm.place(handled)

    def _skip_function(self) -> None:
        """Let the function return at once that a handler skips; not before the record, which shows the hit."""
        if not self._flow.uses("skip"):
            return
        asm, goes_on = self._asm, self._asm.label()
        asm.load(_R.R1, SCRATCH, Field.ENDING)
        asm.jump_if(Jump.JNE, _R.R1, SKIP, goes_on)
        asm.load(_R.R2, SCRATCH, Field.VALUE)
        self._w.host.override_return()
        asm.place(goes_on)

    @property
    def _dumps_core(self) -> bool:
        """Whether the handler may end by ``exit 3``."""
        instructions = self._flow.instructions.values()
        return any(i.row is not None and i.row.syntax == "exit <code>" and i.operand == CORE_DUMP for i in instructions)

    def _wish(self, release: Label) -> None:
        """Write the code for a probepoint that is to be removed."""
        asm, flow, at = self._asm, self._flow, Field.WORK
        if not (self._request.maxhits or flow.uses("remove", "exit <code>")):
            return
        wish = asm.label()
        if flow.uses("remove", "exit <code>"):
            other, exits = asm.label(), asm.label()
            asm.load(_R.R8, SCRATCH, Field.ENDING)
            asm.jump_if(Jump.JEQ, _R.R8, EXIT, other)
            if flow.uses("skip"):
                asm.jump_if(Jump.JEQ, _R.R8, SKIP, other)
            asm.jump_if(Jump.JGE, _R.R8, EXIT_WITH, exits)
            asm.mov(_R.R8, REMOVE)
            asm.jump(wish)
            asm.place(exits)
            asm.alu(Alu.SUB, _R.R8, EXIT_WITH)
            # A crash dump (2) is the kernel's: in a user program it is an exit.
            asm.jump_if(Jump.JEQ, _R.R8, 2, other)
            if self._dumps_core:
                stops = asm.label()
                asm.jump_if(Jump.JNE, _R.R8, CORE_DUMP, stops)
                self._w.host.note_stop(wish)
                asm.place(stops)
            self._w.host.stop_process()
            asm.jump(wish)
            asm.place(other)
        if self._wish_label is not None:
            asm.place(self._wish_label)
        if not self._request.maxhits:
            asm.jump(release)
        else:
            asm.load(_R.R1, SCRATCH, Field.IS_LAST)
            asm.jump_if(Jump.JNE, _R.R1, 0, release)
            asm.mov(_R.R8, LIMIT)
        asm.place(wish)
        if self._ticket is not None:
            self._ticket.disable()
        else:
            self._w.host.probe_entry(_R.R1)
            asm.store(_R.R1, ProbeField.DISABLED, 1, Size.W)
        self._entries.write_end(SCRATCH, at, _R.R8)
