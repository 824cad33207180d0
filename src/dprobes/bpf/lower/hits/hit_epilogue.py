"""Code after a handler, and its ring entries: the record, a record of stack traces, and the request for removal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Atomic, Helper, Jump, Register, Size
from dprobes.bpf.lower.state.handler_state import ABORT, EXIT, EXIT_WITH, LOG, SCRATCH, SKIP, Field
from dprobes.bpf.map_layouts import ENTRY_HEAD, KIND_SHIFT, LIMIT, NAME_SIZE, REMOVE, Entry, MapName, ProbeField
from dprobes.record.log_record import Item
from dprobes.rpn.instruction_set import ExceptionCode
from dprobes.rpn.program_needs import CORE_DUMP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.bpf.bpf_assembler import Label
    from dprobes.bpf.lower.hits.hit_limits import Overload, Ticket
    from dprobes.bpf.lower.template_writer import Writer

__all__ = ["Epilogue", "RingEntries"]

_OF_THREAD = Item.PID | Item.TID | Item.UID | Item.PROCESS_NAME

_R = Register
_HEAD = ENTRY_HEAD.size


class RingEntries:
    """Ring entries of one handler. ``items`` are the header items of its records."""

    def __init__(self, writer: Writer) -> None:
        self._w = writer
        self._asm = writer.asm
        self._request = writer.request
        self.items = self._request.items | Item.MAJOR | Item.MINOR | (Item.WIDE if writer.wide else Item(0))
        self._places = dict(_item_places(self.items))
        self._header_size = max(offset + size for offset, size in self._places.values())

    def header(self, item: Item) -> int:
        """Return the offset in the state of an item of the log record's header."""
        return LOG - self._header_size + self._places[item][0]

    def size_of(self, item: Item) -> int:
        """Return the size in bytes of an item of a record's header."""
        return self._places[item][1]

    def write_record(self) -> None:
        """Write the code that completes the record, whose header ``Prologue`` has begun, and puts it into the ring."""
        asm, host, start = self._asm, self._w.host, LOG - self._header_size
        is_read = self._read_thread(start - _HEAD) or self._write_ids(start - _HEAD)
        self._head(start - _HEAD, Entry.RECORD, has_tid=is_read)
        asm.store(SCRATCH, start, int(self.items), Size.W)
        self._mark_cut(start)
        flow = self._w.flow
        if flow.uses("setmaj", "setmaj <major>", "setmin", "setmin <minor>"):
            for item, field in ((Item.MAJOR, Field.MAJOR), (Item.MINOR, Field.MINOR)):
                asm.load(_R.R1, SCRATCH, field)
                asm.store(SCRATCH, self.header(item), _R.R1, Size.W)
        else:
            asm.store(SCRATCH, self.header(Item.MAJOR), self._w.point.major, Size.W)
            asm.store(SCRATCH, self.header(Item.MINOR), self._w.point.minor, Size.W)
        for item, load in ((Item.CPU, host.cpu), (Item.PID, host.pid), (Item.UID, host.uid), (Item.TID, host.tid)):
            if item in self.items and not (is_read and item in _OF_THREAD):
                load()
                asm.store(SCRATCH, self.header(item), _R.R0, Size.W)
        if Item.PROCESS_NAME in self.items and not is_read:
            asm.add(_R.R1, SCRATCH, self.header(Item.PROCESS_NAME))
            host.process_name()
        self._entry_size()
        copies = self._w.state.stack_copy and flow.uses("log ustack, <frames>", "log ustack")
        if copies:
            self._copy_stack(start - _HEAD)
        asm.add(_R.R2, SCRATCH, start - _HEAD)
        host.output()
        if copies:  # the traces have the same head
            self._kind(start - _HEAD, Entry.RECORD)
        self._count_output()

    def _mark_cut(self, start: int) -> None:
        """
        Set the flag CUT of the record, with its flag word at ``start``, if the log lacked room for an item.

        LP is then the end of the log before that item. Clobbers R1.
        """
        asm, marked = self._asm, int(self.items | Item.CUT)
        whole = asm.label()
        if self._w.may_cut:
            asm.jump_if_word(Jump.JEQ, SCRATCH, Field.CUT_AT, 0, whole)
            asm.alu(Alu.SUB, _R.R1, 1)
            asm.store(SCRATCH, Field.LP, _R.R1)
            asm.store(SCRATCH, start, marked, Size.W)
        elif self._w.may_overflow and self._w.is_enabled(ExceptionCode.LOG_OVERFLOW):
            asm.jump_if_word(Jump.JNE, SCRATCH, Field.UNHANDLED, int(ExceptionCode.LOG_OVERFLOW), whole)
            asm.store(SCRATCH, start, marked, Size.W)
        asm.place(whole)

    def _copy_stack(self, entry: int) -> None:
        """
        Append a copy of the user stack if the record has call stacks.

        R3 is the size of the record's entry, then of both.
        """
        from dprobes.bpf.lower.state.stack_snapshot import write_stack_copy

        asm, none = self._asm, self._asm.label()
        asm.jump_if_word(Jump.JEQ, SCRATCH, Field.STACKS, 0, none)
        self._kind(entry, Entry.STACKED)
        write_stack_copy(asm, self._w.host, entry, Field.WORK, Field.STACKS)
        asm.place(none)

    def _kind(self, entry: int, kind: Entry) -> None:
        """Write the first word of a ring entry: the number of the probepoint, and the kind of entry."""
        assert self._request.probe is not None
        self._asm.store(SCRATCH, entry, _signed(self._request.probe | kind << KIND_SHIFT), Size.W)

    def _entry_size(self) -> None:
        """Load the size in bytes of the record's ring entry to R3: head, record header, and the log up to LP."""
        asm, logged = self._asm, self._w.logged
        if logged is not None:
            asm.mov(_R.R3, logged + self._header_size + _HEAD)
            return
        asm.load(_R.R3, SCRATCH, Field.LP)
        asm.alu(Alu.AND, _R.R3, self._w.log_mask)
        asm.alu(Alu.ADD, _R.R3, self._header_size + _HEAD)

    def _read_thread(self, head: int) -> bool:
        """
        Write code that copies the thread's ids, name and user from ``task_struct`` to record header and entry head.

        Return False, and write none, if the layout of ``task_struct`` is unknown or ids of a PID namespace are needed.
        Separate helper calls would take a tenth of a hit. Clobbers R0-R5.
        """
        asm, task = self._asm, self._request.abilities.task
        if task is None or self._request.namespace is not None:
            return False
        asm.call(Helper.GET_CURRENT_TASK_BTF)
        words = [(item, place) for item, place in ((Item.PID, task.pid), (Item.TID, task.tid)) if item in self.items]
        for item, place in words:
            asm.copy_from(_R.R0, place, SCRATCH, self.header(item), size=Size.W)
        if self._request.wants_tid:
            asm.copy_from(_R.R0, task.tid, SCRATCH, head + 4, size=Size.W)
        if Item.PROCESS_NAME in self.items:
            for place in range(NAME_SIZE):  # the verifier allows reads of one character at a time
                asm.copy_from(_R.R0, task.name + place, SCRATCH, self.header(Item.PROCESS_NAME) + place, size=Size.B)
        if Item.UID in self.items:
            asm.load(_R.R1, _R.R0, task.cred)
            asm.copy_from(_R.R1, task.uid, SCRATCH, self.header(Item.UID), size=Size.W)
        return True

    def _write_ids(self, head: int) -> bool:
        """
        Write the ids by which the reader of the ring finds the thread's name and user. Clobbers R0-R5.

        The process id is in the place of the user and name, the thread id in the head of the entry. If the reader does
        not add them (``named_later``), or the record has no such items, write nothing and return False.
        """
        asm = self._asm
        if not (self._request.abilities.named_later and self.items & _OF_THREAD):
            return False
        asm.call(Helper.GET_CURRENT_PID_TGID)
        if self._request.wants_tid:
            asm.store(SCRATCH, head + 4, _R.R0, Size.W)
        if Item.TID in self.items:
            asm.store(SCRATCH, self.header(Item.TID), _R.R0, Size.W)
        asm.alu(Alu.RSH, _R.R0, 32)
        for item in (Item.PID, Item.UID):
            if item in self.items:
                asm.store(SCRATCH, self.header(item), _R.R0, Size.W)
        if Item.PROCESS_NAME in self.items:
            asm.store(SCRATCH, self.header(Item.PROCESS_NAME), _R.R0)
            asm.store(SCRATCH, self.header(Item.PROCESS_NAME) + NAME_SIZE // 2, 0)
        return True

    def write_traces(self) -> None:
        """Write the record of the stack traces: the same header with other flags, and the codes 0,0."""
        asm, none = self._asm, self._asm.label()
        asm.jump_if_word(Jump.JEQ, SCRATCH, Field.STP, 0, none)
        trace = self._w.state.trace
        to = trace - self._header_size - _HEAD
        # The trace area lies beyond the reach of 16-bit offsets.
        asm.add(_R.R4, SCRATCH, to)
        source = LOG - self._header_size - _HEAD
        for offset in range(0, self._header_size + _HEAD, 4):
            asm.copy_from(SCRATCH, source + offset, _R.R4, offset, size=Size.W)
        kind = Entry.TRACE << KIND_SHIFT
        asm.load(_R.R1, _R.R4, 0, Size.W)
        asm.alu(Alu.OR, _R.R1, kind)
        asm.store(_R.R4, 0, _R.R1, Size.W)
        asm.store(_R.R4, _HEAD, int(self.items | Item.STACK_TRACE), Size.W)
        for item in (Item.MAJOR, Item.MINOR):
            asm.store(_R.R4, _HEAD + self._places[item][0], 0, Size.W)
        asm.mov(_R.R2, _R.R4)
        asm.load(_R.R3, SCRATCH, Field.STP)
        asm.alu(Alu.AND, _R.R3, self._w.state.trace_mask)
        asm.alu(Alu.ADD, _R.R3, self._header_size + _HEAD)
        self._w.host.output()
        self._count_output()
        asm.place(none)

    def write_end(self, base: Register, at: int, reason: Register | int, cookie: Register | None = None) -> None:
        """Put a request to remove the probepoint for ``reason`` into the ring. The entry is built at ``base + at``."""
        asm = self._asm
        self._head(at, Entry.ENDED, base, cookie)
        asm.store(base, at + _HEAD, reason, Size.W)
        self._w.host.global_pid()
        asm.store(base, at + _HEAD + 4, _R.R0, Size.W)
        asm.mov(_R.R2, base)
        asm.alu(Alu.ADD, _R.R2, at)
        asm.mov(_R.R3, _HEAD + 8)
        self._w.host.output(wakes=True)

    def _head(
        self,
        at: int,
        kind: Entry,
        base: Register = SCRATCH,
        cookie: Register | None = None,
        *,
        has_tid: bool = False,
    ) -> None:
        """
        Write the head of a ring entry. Clobbers R0-R5.

        If ``cookie`` is None, the cookie is read from the state. With ``has_tid``, the thread id is already in the
        entry.
        """
        asm = self._asm
        if self._request.wants_tid and has_tid:
            pass  # it is already written
        elif self._request.wants_tid or kind is Entry.ENDED:
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

    def _count_output(self) -> None:
        asm, lost, counted = self._asm, self._asm.label(), self._asm.label()
        if self._request.abilities.polled:
            asm.jump_if(Jump.JEQ, _R.R0, 0, counted)
            self._w.host.count(ProbeField.LOST)
            asm.place(counted)
            return
        asm.jump_if(Jump.JNE, _R.R0, 0, lost)
        self._w.host.count(ProbeField.RECORDS)
        asm.jump(counted)
        asm.place(lost)
        self._w.host.count(ProbeField.LOST)
        asm.place(counted)


def _item_places(items: Item) -> Iterator[tuple[Item, tuple[int, int]]]:
    """Iterate over the items of a header with their offset after its start, and their size in bytes."""
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


# The code after a handler: its record and stack traces, the request for removal, and the release of the state.


class Epilogue:
    """
    A writer of the code after one handler: record, removal, and release of the state.

    ``out`` is the label for hits that have no state to release.
    """

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
        """Write all code after the handler, in its order."""
        asm = self._asm
        release = asm.label()
        self._note_unhandled()
        if self._w.is_small and not self._w.raises and {ending for ending, _ in self._w.endings} == {ABORT}:
            self._measured()
            self._out_of_handler()
            return
        if self._flow.uses("abort", "vfyrw"):
            asm.jump_if_word(Jump.JEQ, SCRATCH, Field.ENDING, ABORT, self._ended(release))
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
        """Write code that marks the hit's state as free for other hits."""
        asm = self._asm
        if self._w.is_small:
            return
        asm.load(_R.R1, SCRATCH, Field.NUMBER)
        asm.point_to_element(_R.R2, MapName.CLAIMS, _R.R1, self._request.tables.states, 8)
        asm.store(_R.R2, 0, 0)

    def _out_of_handler(self) -> None:
        asm = self._asm
        asm.place(self._out)
        self._w.host.load_result()
        asm.exit()

    def _ended(self, release: Label) -> Label:
        """
        Return the label to jump to after ``abort``.

        With maxhits, the code there removes the probepoint after the last hit.
        """
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
        asm.jump_if_word(Jump.JEQ, SCRATCH, Field.UNHANDLED, 0, handled, by=_R.R3)
        self._w.host.probe_entry(_R.R1)
        asm.atomic(Atomic.OR, _R.R1, ProbeField.UNHANDLED, _R.R3)
        asm.place(handled)

    def _skip_function(self) -> None:
        """Write the return from a function that the handler skips, after the record, which shows the hit."""
        if not self._flow.uses("skip"):
            return
        asm, goes_on = self._asm, self._asm.label()
        asm.jump_if_word(Jump.JNE, SCRATCH, Field.ENDING, SKIP, goes_on)
        asm.load(_R.R2, SCRATCH, Field.VALUE)
        self._w.host.override_return()
        asm.place(goes_on)

    @property
    def _dumps_core(self) -> bool:
        """True if the handler may end by ``exit 3``."""
        instructions = self._flow.instructions.values()
        return any(i.row is not None and i.row.syntax == "exit <code>" and i.operand == CORE_DUMP for i in instructions)

    def _wish(self, release: Label) -> None:
        """Write the code that requests removal after ``remove``, ``exit N`` or the last hit that maxhits allows."""
        asm, flow, at = self._asm, self._flow, Field.WORK
        if not (self._request.maxhits or flow.uses("remove", "exit <code>")):
            return
        wish = asm.label()
        if flow.uses("remove", "exit <code>"):
            other, exits = asm.label(), asm.label()
            asm.jump_if_word(Jump.JEQ, SCRATCH, Field.ENDING, EXIT, other, by=_R.R8)
            if flow.uses("skip"):
                asm.jump_if(Jump.JEQ, _R.R8, SKIP, other)
            asm.jump_if(Jump.JGE, _R.R8, EXIT_WITH, exits)
            asm.mov(_R.R8, REMOVE)
            asm.jump(wish)
            asm.place(exits)
            asm.alu(Alu.SUB, _R.R8, EXIT_WITH)
            # A crash dump (2) is for the kernel: in a user program it is an exit.
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
            asm.jump_if_word(Jump.JNE, SCRATCH, Field.IS_LAST, 0, release)
            asm.mov(_R.R8, LIMIT)
        asm.place(wish)
        if self._ticket is not None:
            self._ticket.disable()
        else:
            self._w.host.probe_entry(_R.R1)
            asm.store(_R.R1, ProbeField.DISABLED, 1, Size.W)
        self._entries.write_end(SCRATCH, at, _R.R8)
