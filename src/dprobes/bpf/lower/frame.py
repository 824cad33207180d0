"""
What stands around every handler: whose hits count, limits, the slot, and the record at the end.

::

    entry     turn, filter, probe table, passcount and maxhits, claim of a slot
    body      the handler
    end       record, stack trace, the wish to be taken away; the slot is given back
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.layout import (
    ENTRY_HEAD,
    KIND_SHIFT,
    LIMIT,
    NAME_SIZE,
    REMOVE,
    Entry,
    MapName,
    ProbeField,
)
from dprobes.bpf.lower.host import CONTEXT
from dprobes.bpf.lower.scopefilter import write_filter
from dprobes.bpf.lower.slot import FRAMES, LOG, RANGES, Field, Frame
from dprobes.bpf.lower.stack import SCRATCH
from dprobes.bpf.lower.switchover import write_turn
from dprobes.bpf.lower.tickets import ticket_of
from dprobes.record.layout import Item
from dprobes.rpn.isa import RPN_STACK_CELLS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.bpf.asm.assembler import Label
    from dprobes.bpf.lower.writer import Writer

__all__ = ["ABORT", "EXIT", "EXIT_WITH", "REMOVE_PROBE", "EntryAndEnd"]

EXIT, ABORT, REMOVE_PROBE, EXIT_WITH = 0, 1, 2, 16
"""How a handler ended, in ``Field.ENDING``; ``exit N`` is EXIT_WITH + N."""

_TRIES = 4
"""How many slots are tried: as many hits may be under way on a CPU, one interrupting the other."""

_KEY = -4
_ENDED = -24
"""Where on the stack things are put before there is a slot: the key of one, and an ENDED entry."""

_R = Register
_HEAD = ENTRY_HEAD.size


class EntryAndEnd:
    """Write what stands around one handler."""

    def __init__(self, writer: Writer) -> None:
        self._w = writer
        self._asm = writer.asm
        self._request = writer.request
        self._flow = writer.flow
        self._out = writer.asm.label()
        self._busy = writer.asm.label()
        self._ticket = ticket_of(writer)
        self._items = self._request.items | Item.MAJOR | Item.MINOR | (Item.WIDE if writer.wide else Item(0))
        self._places = dict(_item_places(self._items))
        self.header_size = max(offset + size for offset, size in self._places.values())

    # Entry

    def enter(self) -> None:
        """Write everything that comes before the handler."""
        self._asm.mov(CONTEXT, _R.R1)
        write_turn(self._asm, self._request, self._out)
        write_filter(self._asm, self._request.filter, self._w.host.global_pid, self._out)
        self._w.host.find_module(self._out, self._busy)
        self._w.host.find_mapper(self._out)
        self._count_hit()
        self._claim()
        self._initialise()

    def _count_hit(self) -> None:
        """Write the counting; R8 keeps the attach cookie and R9 whether it is the last hit. R7 is still free."""
        asm, request, host = self._asm, self._request, self._w.host
        if request.probe is None:
            host.cookie()
            asm.mov(_R.R8, _R.R0)
        if self._ticket is not None:
            self._ticket.open(self._busy)
        if request.probe is None:
            asm.mov(_R.R0, _R.R8)
            host.entry_at(_R.R1, _R.R0)
        else:
            host.probe_entry(_R.R1)
        asm.load(_R.R2, _R.R1, ProbeField.DISABLED, Size.W)
        asm.jump_if(Jump.JNE, _R.R2, 0, self._out)
        last = request.passcount + request.maxhits - 1
        if self._ticket is not None:
            self._ticket.draw(last if request.maxhits else None, self._out)
        else:
            asm.mov(_R.R2, 1)
            limited = bool(request.passcount or request.maxhits)
            asm.atomic(Atomic.ADD, _R.R1, ProbeField.HITS, _R.R2, fetch=limited)
        if request.passcount:
            asm.jump_if(Jump.JLT, _R.R2, request.passcount, self._out)
        if request.maxhits:
            asm.mov(_R.R3, last)
            asm.jump_if(Jump.JGT, _R.R2, _R.R3, self._out)
            asm.alu(Alu.SUB, _R.R3, _R.R2)
            asm.mov(_R.R9, _R.R3)  # 0 for the last one

    def _claim(self) -> None:
        """Write the search for a free slot; its number is put into the slot."""
        asm, slots = self._asm, self._request.tables.slots
        claimed, address = asm.label(), _R.R3
        asm.call(Helper.GET_SMP_PROCESSOR_ID)
        asm.alu(Alu.MUL, _R.R0, _TRIES)
        for attempt in range(_TRIES):
            if attempt:
                asm.alu(Alu.ADD, _R.R0, 1)
            asm.mov(_R.R1, _R.R0)
            asm.alu(Alu.AND, _R.R1, slots - 1)
            asm.mov(_R.R2, _R.R1)
            asm.alu(Alu.LSH, _R.R2, 3)
            asm.load_value(address, MapName.CLAIMS)
            asm.alu(Alu.ADD, address, _R.R2)
            asm.mov(_R.R4, 1)
            asm.atomic(Atomic.XCHG, address, 0, _R.R4)
            asm.jump_if(Jump.JEQ, _R.R4, 0, claimed)
        if self._request.maxhits:
            self._miss_last()
        if self._request.module is not None or self._ticket is not None:
            asm.place(self._busy)
        self._count_missed()
        asm.jump(self._out)
        asm.place(claimed)
        asm.store(_R.R10, _KEY, _R.R1, Size.W)
        asm.load_map(_R.R1, MapName.SCRATCH)
        asm.mov(_R.R2, _R.R10)
        asm.alu(Alu.ADD, _R.R2, _KEY)
        asm.call(Helper.MAP_LOOKUP_ELEM)
        asm.jump_if(Jump.JEQ, _R.R0, 0, self._out)
        asm.mov(SCRATCH, _R.R0)
        asm.load(_R.R1, _R.R10, _KEY, Size.W)
        asm.store(SCRATCH, Field.NUMBER, _R.R1)

    def _miss_last(self) -> None:
        """Write what happens if the last hit finds no slot: the probepoint is to be taken away all the same."""
        asm, other = self._asm, self._asm.label()
        asm.jump_if(Jump.JNE, _R.R9, 0, other)
        if self._ticket is None:
            self._entry_without_slot()
            asm.store(_R.R1, ProbeField.DISABLED, 1, Size.W)
        self._ended_entry(_R.R10, _ENDED, LIMIT, cookie=_R.R8)
        asm.place(other)

    def _entry_without_slot(self) -> None:
        """Let R1 point to the entry in the probe table; R8 holds the cookie still. Takes R2."""
        if self._request.probe is None:
            self._asm.mov(_R.R2, _R.R8)
            self._w.host.entry_at(_R.R1, _R.R2)
        else:
            self._w.host.probe_entry(_R.R1)

    def _count_missed(self) -> None:
        asm = self._asm
        self._entry_without_slot()
        asm.mov(_R.R2, 1)
        asm.atomic(Atomic.ADD, _R.R1, ProbeField.MISSED, _R.R2)

    def _initialise(self) -> None:
        asm, flow = self._asm, self._flow
        if self._request.probe is None:
            asm.store(SCRATCH, Field.PROBE, _R.R8)
            asm.alu(Alu.ARSH, _R.R8, 32)
            asm.store(SCRATCH, Field.MOVED, _R.R8)
        if self._request.maxhits:
            asm.store(SCRATCH, Field.IS_LAST, _R.R9)
        if self._w.reads_unwritten:
            asm.mov(_R.R1, SCRATCH)
            asm.mov(_R.R2, 8 * RPN_STACK_CELLS)
            self._w.host.clear_memory()
        zero = [Field.LP, Field.ENDING, Field.UNHANDLED, FRAMES + Frame.HANDLER]
        if self._w.counts_jumps:
            zero.append(Field.JUMPS)
        if flow.uses("push plp"):
            zero.append(Field.PLP)
        if flow.uses("pop lp"):
            zero.append(Field.LOGGED)
        if flow.uses("pop stp"):
            zero.append(Field.TRACED)
        if flow.uses("call <procname>", "ret") or self._takes_traces:
            zero.append(Field.DEPTH)
        if flow.catches:
            zero.append(Field.DISPATCHES)
        if flow.uses("push x") or self._takes_traces:
            zero += [Field.LAST_CODE, Field.LAST_PARM1, Field.LAST_PARM2]
        if self._takes_traces:
            zero += [Field.STP, Field.TRACE_COUNT_AT, Field.TRACES, *(RANGES + 8 * n for n in range(6))]
        if self._w.slot.heap:
            zero.append(Field.HEAP_END)
        for field in zero:
            asm.store(SCRATCH, field, 0)
        asm.store(SCRATCH, Field.SBP, RPN_STACK_CELLS)
        asm.store(SCRATCH, Field.TSP, RPN_STACK_CELLS)
        if flow.uses("setmaj", "setmaj <major>", "setmin", "setmin <minor>"):
            asm.store(SCRATCH, Field.MAJOR, self._w.point.major)
            asm.store(SCRATCH, Field.MINOR, self._w.point.minor)
        self._w.host.prepare()
        if Item.TIME in self._items:
            self._w.host.time()
            asm.store(SCRATCH, self._header(Item.TIME), _R.R0)
        for item, name in ((Item.CS, "cs"), (Item.IP, "eip"), (Item.SS, "ss"), (Item.SP, "esp")):
            if item in self._items:
                self._w.host.register(_R.R1, name)
                asm.store(SCRATCH, self._header(item), _R.R1, Size.of(self._places[item][1]))

    @property
    def _takes_traces(self) -> bool:
        return bool(self._w.slot.ex_logmax)

    # End

    def leave(self) -> None:
        """Write everything that comes after the handler."""
        asm = self._asm
        release = asm.label()
        self._note_unhandled()
        if self._flow.uses("abort", "vfyrw"):
            asm.load(_R.R1, SCRATCH, Field.ENDING)
            asm.jump_if(Jump.JEQ, _R.R1, ABORT, self._ended(release))
        self._record()
        if self._takes_traces:
            self._trace_record()
        self._wish(release)
        asm.place(release)
        asm.load(_R.R1, SCRATCH, Field.NUMBER)
        asm.alu(Alu.AND, _R.R1, self._request.tables.slots - 1)
        asm.alu(Alu.LSH, _R.R1, 3)
        asm.load_value(_R.R2, MapName.CLAIMS)
        asm.alu(Alu.ADD, _R.R2, _R.R1)
        asm.store(_R.R2, 0, 0)
        asm.place(self._out)
        asm.mov(_R.R0, 0)
        asm.exit()

    def _ended(self, release: Label) -> Label:
        """Return where a handler goes that ended by ``abort``: even that may be the last hit."""
        if not self._request.maxhits:
            return release
        self._wish_label = self._asm.label()
        return self._wish_label

    _wish_label: Label | None = None

    def _note_unhandled(self) -> None:
        asm = self._asm
        if not any(i.row is None or i.row.faults for i in self._flow.instructions.values()):
            return
        handled = asm.label()
        asm.load(_R.R3, SCRATCH, Field.UNHANDLED)
        asm.jump_if(Jump.JEQ, _R.R3, 0, handled)
        self._w.host.probe_entry(_R.R1)
        asm.atomic(Atomic.OR, _R.R1, ProbeField.UNHANDLED, _R.R3)
        asm.place(handled)

    def _header(self, item: Item) -> int:
        """Return the offset in the slot of an item of the log record's header."""
        return LOG - self.header_size + self._places[item][0]

    def _record(self) -> None:
        asm, host, start = self._asm, self._w.host, LOG - self.header_size
        self._head(start - _HEAD, Entry.RECORD)
        asm.store(SCRATCH, start, int(self._items), Size.W)
        flow = self._flow
        if flow.uses("setmaj", "setmaj <major>", "setmin", "setmin <minor>"):
            for item, field in ((Item.MAJOR, Field.MAJOR), (Item.MINOR, Field.MINOR)):
                asm.load(_R.R1, SCRATCH, field)
                asm.store(SCRATCH, self._header(item), _R.R1, Size.W)
        else:
            asm.store(SCRATCH, self._header(Item.MAJOR), self._w.point.major, Size.W)
            asm.store(SCRATCH, self._header(Item.MINOR), self._w.point.minor, Size.W)
        for item, load in ((Item.CPU, host.cpu), (Item.PID, host.pid), (Item.UID, host.uid), (Item.TID, host.tid)):
            if item in self._items:
                load()
                asm.store(SCRATCH, self._header(item), _R.R0, Size.W)
        if Item.PROCESS_NAME in self._items:
            asm.mov(_R.R1, SCRATCH)
            asm.alu(Alu.ADD, _R.R1, self._header(Item.PROCESS_NAME))
            host.process_name()
        asm.mov(_R.R2, SCRATCH)
        asm.alu(Alu.ADD, _R.R2, start - _HEAD)
        asm.load(_R.R3, SCRATCH, Field.LP)
        asm.alu(Alu.AND, _R.R3, self._w.slot.log_mask)
        asm.alu(Alu.ADD, _R.R3, self.header_size + _HEAD)
        host.output()
        self._count_output()

    def _count_output(self) -> None:
        asm, lost, counted = self._asm, self._asm.label(), self._asm.label()
        asm.jump_if(Jump.JNE, _R.R0, 0, lost)
        self._w.host.count(ProbeField.RECORDS)
        asm.jump(counted)
        asm.place(lost)
        self._w.host.count(ProbeField.LOST)
        asm.place(counted)

    def _head(self, at: int, kind: Entry, base: Register = SCRATCH, cookie: Register | None = None) -> None:
        """Write the head of a ring entry; takes R0-R5. Without ``cookie`` that is in the slot."""
        asm = self._asm
        if self._request.wants_tid or kind is Entry.ENDED:
            self._w.host.global_tid()
            asm.store(base, at + 4, _R.R0, Size.W)
        else:
            asm.store(base, at + 4, 0, Size.W)
        if self._request.probe is not None:
            asm.store(base, at, _signed(self._request.probe | kind << KIND_SHIFT), Size.W)
            return
        if cookie is None:
            asm.load(_R.R1, SCRATCH, Field.PROBE, Size.W)
        else:
            asm.mov(_R.R1, cookie, wide=False)
        asm.alu(Alu.OR, _R.R1, kind << KIND_SHIFT)
        asm.store(base, at, _R.R1, Size.W)

    def _ended_entry(self, base: Register, at: int, reason: Register | int, cookie: Register | None = None) -> None:
        """Write the wish to take the probepoint away, and put it into the ring."""
        asm = self._asm
        self._head(at, Entry.ENDED, base, cookie)
        asm.store(base, at + _HEAD, reason, Size.W)
        self._w.host.global_pid()
        asm.store(base, at + _HEAD + 4, _R.R0, Size.W)
        asm.mov(_R.R2, base)
        asm.alu(Alu.ADD, _R.R2, at)
        asm.mov(_R.R3, _HEAD + 8)
        self._w.host.output(wakes=True)

    def _trace_record(self) -> None:
        """Write the record of the stack traces: the same header with other flags, and the codes 0,0."""
        asm, none = self._asm, self._asm.label()
        asm.load(_R.R1, SCRATCH, Field.STP)
        asm.jump_if(Jump.JEQ, _R.R1, 0, none)
        trace = self._w.slot.trace
        to = trace - self.header_size - _HEAD
        # The trace area lies beyond the reach of 16-bit offsets.
        asm.mov(_R.R4, SCRATCH)
        asm.alu(Alu.ADD, _R.R4, to)
        source = LOG - self.header_size - _HEAD
        for offset in range(0, self.header_size + _HEAD, 4):
            asm.load(_R.R1, SCRATCH, source + offset, Size.W)
            asm.store(_R.R4, offset, _R.R1, Size.W)
        kind = Entry.TRACE << KIND_SHIFT
        asm.load(_R.R1, _R.R4, 0, Size.W)
        asm.alu(Alu.OR, _R.R1, kind)
        asm.store(_R.R4, 0, _R.R1, Size.W)
        asm.store(_R.R4, _HEAD, int(self._items | Item.STACK_TRACE), Size.W)
        for item in (Item.MAJOR, Item.MINOR):
            asm.store(_R.R4, _HEAD + self._places[item][0], 0, Size.W)
        asm.mov(_R.R2, _R.R4)
        asm.load(_R.R3, SCRATCH, Field.STP)
        asm.alu(Alu.AND, _R.R3, self._w.slot.trace_mask)
        asm.alu(Alu.ADD, _R.R3, self.header_size + _HEAD)
        self._w.host.output()
        self._count_output()
        asm.place(none)

    def _wish(self, release: Label) -> None:
        """Write what happens if the probepoint is to be taken away."""
        asm, flow, at = self._asm, self._flow, Field.WORK
        if not (self._request.maxhits or flow.uses("remove", "exit <code>")):
            return
        wish = asm.label()
        if flow.uses("remove", "exit <code>"):
            other, exits = asm.label(), asm.label()
            asm.load(_R.R8, SCRATCH, Field.ENDING)
            asm.jump_if(Jump.JEQ, _R.R8, EXIT, other)
            asm.jump_if(Jump.JGE, _R.R8, EXIT_WITH, exits)
            asm.mov(_R.R8, REMOVE)
            asm.jump(wish)
            asm.place(exits)
            asm.alu(Alu.SUB, _R.R8, EXIT_WITH)
            # A crash dump (2) is the kernel's: in a user program it is an exit.
            asm.jump_if(Jump.JEQ, _R.R8, 2, other)
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
        self._ended_entry(SCRATCH, at, _R.R8)


def _item_places(items: Item) -> Iterator[tuple[Item, tuple[int, int]]]:
    """Iterate over the items of a header with their offset behind its start, and their size in bytes."""
    position = 4
    for item in (Item.MAJOR, Item.MINOR, Item.CPU, Item.PID, Item.UID, Item.CS, Item.IP, Item.SS, Item.SP, Item.TIME,
                 Item.PROCESS_NAME, Item.TID):  # fmt: skip
        if item in items:
            wide = Item.WIDE in items and item in (Item.IP, Item.SP)
            size = NAME_SIZE if item is Item.PROCESS_NAME else 8 if wide or item is Item.TIME else 4
            yield item, (position, size)
            position += size


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value
