"""
The entries of rings as what they say: records in their canonical form, and ends of probepoints.

They come in the order of their time, whichever rings they are from, and packed as they stand there. What is younger
than a reading is kept for the next one: by then all that is older has come, but for what a thread writes that does not
run.
"""

from __future__ import annotations

import struct
import sys
import time
from typing import TYPE_CHECKING

from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.bpf.map_layouts import (
    ENTRY_HEAD,
    KIND_SHIFT,
    LIMIT,
    NAME_SIZE,
    SNAPSHOT_REGISTERS,
    STACK_COPY,
    TALLY,
    Entry,
)
from dprobes.engines.copied_stacks import CopiedStacks
from dprobes.engines.inline.hits.entry_index import EntryBuffer, EntryIndex, EntryPacker
from dprobes.engines.inline.hits.thread_names import ThreadNames
from dprobes.errors import FormatError
from dprobes.native.routines.entry_walk import RECORD_PLACE, RecordPlaces
from dprobes.native.routines.handler_ring import ENTRY_HEADER
from dprobes.platform.linux.thread_stack import COLUMNS_OF
from dprobes.record.log_record import Item, decode_record, header_struct
from dprobes.record.record_table import PROBE_SIZE, RowShape
from dprobes.resolve.probe_state import ProbeState
from dprobes.rpn.instruction_set import ITEM_PREFIX_SIZE, USER_FRAMES_MAX, Token
from dprobes.rpn.keyed_tables import KeyKind
from dprobes.rpn.program_needs import takes_user_stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from dprobes.engines.inline.memory.shared_state import SharedStore
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.process_images import ProcessImages

__all__ = ["RingReader", "StackEntries", "record_places"]

# The entries of rings that have a copy of the program's stack in them, with the call stacks in their places.
#
# Copies are followed as soon as they are read, one by one: that takes longer than all else that is done for a record.


_WORD = 8
_REGISTERS_SIZE = _WORD * SNAPSHOT_REGISTERS
_PLACES = tuple(REGISTER_OFFSETS[name] for name in COLUMNS_OF[8].names)
_REGISTER = struct.Struct("=Q")


class StackEntries:
    """What follows the stacks of a program whose handlers take some, and takes them into its ``tables`` as keys."""

    def __init__(self, tables: Sequence[SharedStore], images: ProcessImages | None = None) -> None:
        self._tables = tables
        self._copies = CopiedStacks(images)

    @classmethod
    def of(
        cls, program: Program, tables: Sequence[SharedStore], images: ProcessImages | None = None
    ) -> StackEntries | None:
        """Return it for a program; None if that takes no stacks."""
        return cls(tables, images) if takes_user_stacks(program) else None

    def record(self, data: bytes, canonical: Callable[[bytes], bytes]) -> bytes:
        """Return the record of a STACKED entry; ``canonical`` is its form for records as handlers write them."""
        pid, last, size, _ = _copy_of(data)
        record = canonical(data[ENTRY_HEAD.size : size])
        log = decode_record(record).data
        head, stack = len(record) - len(log), self._stack(pid, data)
        before = len(log) + 1
        while 0 < last < before and last <= len(log) - ITEM_PREFIX_SIZE - _WORD and log[last - 1] == Token.USER_STACK:
            position = last - 1
            start = position + ITEM_PREFIX_SIZE
            room = int.from_bytes(log[position + 1 : start], sys.byteorder)
            last = int.from_bytes(log[start : start + _WORD], sys.byteorder)
            kept = stack[:room]
            words = b"".join(word.to_bytes(_WORD, sys.byteorder) for word in kept)
            prefix = bytes([Token.USER_STACK]) + len(kept).to_bytes(2, sys.byteorder)
            log = log[:position] + prefix + words + log[start + room * _WORD :]
            before = position + 1
        return record[:head] + log

    def tally(self, data: bytes) -> None:
        """Take the number of a TALLY entry into its table."""
        pid, _, size, _ = _copy_of(data)
        if size < ENTRY_HEAD.size + TALLY.size:
            raise FormatError(f"a key ends at {size} in an entry", offset=size)
        number, _, value = TALLY.unpack_from(data, ENTRY_HEAD.size)
        if number >= len(self._tables):
            raise FormatError(f"there is no table {number}", offset=ENTRY_HEAD.size)
        store = self._tables[number]
        key = bytearray(data[ENTRY_HEAD.size + TALLY.size : size])
        if len(key) != store.table.key_size or not store.table.has_user_stack:
            raise FormatError(f"a key of {len(key)} bytes for table {number}", offset=ENTRY_HEAD.size)
        frames = max(part.size for part in store.table.keys if part.kind is KeyKind.USER_STACK)
        stack = self._stack(pid, data, frames)
        position = 0
        for part in store.table.keys:
            if part.kind is KeyKind.USER_STACK:
                words = b"".join(frame.to_bytes(_WORD, sys.byteorder) for frame in stack[: part.size])
                key[position + _WORD : position + part.bytes] = words.ljust(part.bytes - _WORD, b"\0")
            position += part.bytes
        store.tally(bytes(key), value)

    def _stack(self, pid: int, data: bytes, frames: int = USER_FRAMES_MAX) -> tuple[int, ...]:
        """Follow the stack whose copy is at the end of an entry."""
        _, _, size, copied = _copy_of(data)
        first = -(-size // _WORD) * _WORD
        start = first + _REGISTERS_SIZE
        registers = {column: int(_REGISTER.unpack_from(data, first + place)[0]) for column, place in enumerate(_PLACES)}
        return self._copies.follow(pid, 8, registers, data[start : start + copied], frames)

    def close(self) -> None:
        """Let go of all processes."""
        self._copies.close()


def _copy_of(data: bytes) -> tuple[int, int, int, int]:
    """Return what the end of an entry says; raise ``FormatError`` if the parts that it names are not in the entry."""
    end = len(data) - STACK_COPY.size
    if end < ENTRY_HEAD.size:
        raise FormatError(f"an entry with a copy of a stack has {len(data)} bytes", offset=0)
    pid, last, size, copied = STACK_COPY.unpack_from(data, end)
    needed = -(-size // _WORD) * _WORD + _REGISTERS_SIZE + copied
    if size < ENTRY_HEAD.size or needed > end:
        raise FormatError(f"an entry of {len(data)} bytes names {needed} bytes of registers and stack", offset=end)
    return pid, last, size, copied


if TYPE_CHECKING:
    Batch = Sequence[tuple[int, bytes]]

_PROBE = (1 << KIND_SHIFT) - 1
_NAMED = int(Item.PROCESS_NAME)
_FLAGS = struct.Struct("<I")

_BUSY = 32
"""Which part of the room must have been filled in a reading for the next one to follow at once."""

_STUCK = 0.1
"""Seconds after which nobody waits any more for a thread that does not complete its entry."""
_NEVER = 1 << 63

_HORIZON = 10_000_000
"""Nanoseconds for which records wait for older ones of threads that are interrupted, unless there are very many."""
_CALM = 0.1
"""Seconds after which there are not very many any more."""

_AHEAD = 1_000_000_000
"""Nanoseconds by which the clock of handlers may be ahead of ours."""

_PATIENCE = 20
"""How many readings the records of a thread wait for what the tracer tells of it."""


def record_places(items: Item) -> RecordPlaces:
    """Return where records with these items have what is to be found in them."""
    flags = int(items | Item.MAJOR | Item.MINOR | Item.WIDE)
    shape = RowShape.of(flags, "little")
    time, uid = shape.place(Item.TIME), shape.place(Item.UID)
    return RecordPlaces(
        None if time is None else time[0] - PROBE_SIZE,
        None if uid is None else uid[0] - PROBE_SIZE,
        None if shape.name is None else shape.name - PROBE_SIZE,
        flags,
        shape.data - PROBE_SIZE,
    )


class RingReader:
    """
    A reader of entries, of ``room`` bytes in a reading at most.

    ``stacks`` follows call stacks. ``ended`` collects the probepoints that have had their last hit, and what they are
    since then; ``counts`` the records of each.
    """

    def __init__(self, items: Item, room: int, probes: int, stacks: StackEntries | None = None) -> None:
        self._stacks = stacks
        places = record_places(items)
        self.names = None if places.process is None else ThreadNames()
        self._index = EntryIndex(2 * room, places, probes, self.names)
        self._packer = EntryPacker(2 * room)
        self._buffers = EntryBuffer(2 * room), EntryBuffer(2 * room)
        self._room = room
        self._reading = 0
        self.is_busy = False
        """Whether so much has come in the last reading that there is more already."""
        self._waits = 0
        self._waiting: dict[int, tuple[int, float]] = {}
        """The rings that wait for a thread to complete an entry: for what records from when on, and since when."""
        self._ahead: set[int] = set()
        """The rings of which more has been read than of others."""
        self._calm_from = 0.0
        """From when on there are not very many records any more."""
        self._before = 0
        """When the last reading began."""
        self.ended: list[tuple[int, ProbeState]] = []
        self._name_places: dict[int, int] = {}
        self._refused = 0
        self._ending: Collection[int] = range(probes)
        """The probepoints that may have a last hit."""

    @property
    def counts(self) -> Sequence[int]:
        """How many records there were of each probepoint."""
        return self._index.counts

    @property
    def damaged(self) -> int:
        """How many pieces of rings had something in them that is no entry."""
        return self._index.damaged

    @property
    def refused(self) -> int:
        """How many entries are no work of a handler."""
        return self._index.refused + self._refused

    def limit(self, probes: int, ending: Collection[int]) -> None:
        """Take notice of how many probepoints there are, and which of them may have a last hit."""
        self._index.limit(probes)
        self._ending = ending

    @property
    def horizon(self) -> int:
        """
        Nanoseconds for which records should wait for others.

        A thread may be interrupted between asking for the time of its record and writing that.
        """
        return 0 if time.monotonic() < self._calm_from else _HORIZON

    def read(self, move: Callable[[EntryBuffer, Collection[int]], set[int]], before: int | None) -> list[Batch]:
        """
        Return the records in rings, each with its probepoint; ``move`` moves their entries to a buffer.

        Those that are not older than ``before`` may be kept for the next time; None means that there is none. ``move``
        is told which rings have given more already than others, and returns those whose entries wait for one that is
        not complete: what is younger than what is still to come is kept as well.
        """
        buffer, other = self._buffers
        kept = buffer.end
        waiting = move(buffer, self._ahead)
        self.is_busy = bool(self._ahead) or buffer.end - kept > self._room // _BUSY
        if before is not None:
            before, self._before = min(before, self._bound(waiting, kept)), before
        self._ahead = set()
        if not buffer.parts:
            return []
        self._buffers = other, buffer
        index, names = self._index, self.names
        if names is not None:
            names.awaits_tracer = before is not None
            names.look_again(index.seen_end)
        self._reading += 1
        latest = time.monotonic_ns() + _AHEAD
        index.begin(self._reading, None if names is None else names.seen, latest)
        batches: list[Batch] = []
        while buffer.parts:
            index.walk(buffer)
            batches += self._batches(buffer, other, before)
        self._waits = self._waits + 1 if index.nameless else 0
        buffer.clear()
        if (bound := index.bound) is not None:
            self._ahead = {ring for ring, last in index.last.items() if last > bound}
            self.is_busy = True
        if self.is_busy:
            self._calm_from = time.monotonic() + _CALM
        return batches

    def _bound(self, waiting: set[int], kept: int) -> int:
        """Return the time from which on rings may have records that cannot be read yet."""
        now = time.monotonic()
        self._waiting = {
            # What it has left is younger than what came of it before, and than a reading that found it empty.
            ring: self._waiting.get(ring) or (max(self._index.last.get(ring, 0), self._before), now)
            for ring in waiting
        }
        bounds = [self._index.last[ring] + 1 for ring in self._ahead]
        if kept <= self._room:
            bounds += [bound for bound, since in self._waiting.values() if now < since + _STUCK]
        return min(bounds, default=_NEVER)

    def _batches(self, buffer: EntryBuffer, other: EntryBuffer, before: int | None) -> list[Batch]:
        index = self._index
        count = index.count
        if before is not None and index.bound is not None:
            before = min(before, index.bound)
        if before is not None:
            count = index.count_before(before)
        if index.nameless:
            assert self.names is not None
            if before is None or self._waits == _PATIENCE:
                return self._settled(buffer, other, before)
            count = 0
        if count < index.count:
            index.keep(buffer, count, other)
        if not count:
            return []
        packed = self._packer.packed(index, buffer, count)
        if packed is not None:
            return [packed]
        records = [each for number in range(count) for each in self._records(buffer, *index.line(number))]
        return [records] if records else []

    def _settled(self, buffer: EntryBuffer, other: EntryBuffer, before: int | None) -> list[Batch]:
        """Have records of which nobody knows the thread be called as others of their process."""
        index = self._index
        assert self.names is not None
        self.names.settle()
        scratch = EntryBuffer(buffer.room)
        index.keep(buffer, 0, scratch)
        index.begin(self._reading, None)
        index.walk(scratch)
        self._waits = 0
        batches = self._batches(scratch, other, before)
        scratch.close()
        return batches

    def _records(self, buffer: EntryBuffer, at: int, _group: int) -> Iterator[tuple[int, bytes]]:
        memory = buffer.memory
        length = int.from_bytes(memory[at : at + 4], "little")
        word, _ = ENTRY_HEAD.unpack_from(memory, at + ENTRY_HEADER)
        kind, probe = word >> KIND_SHIFT, word & _PROBE
        if kind in (Entry.RECORD, Entry.TRACE):
            yield probe, self._canonical(memory[at + RECORD_PLACE : at + ENTRY_HEADER + length])
        elif kind in (Entry.STACKED, Entry.TALLY):
            data, stacks = memory[at + ENTRY_HEADER : at + ENTRY_HEADER + length], self._stacks
            try:
                if stacks is None:
                    self._refused += 1
                elif kind == Entry.TALLY:
                    stacks.tally(data)
                else:
                    yield probe, stacks.record(data, self._canonical)
            except FormatError:
                self._refused += 1
        elif kind == Entry.ENDED and probe in self._ending:
            (reason,) = _FLAGS.unpack_from(memory, at + RECORD_PLACE)
            self.ended.append((probe, ProbeState.DISABLED if reason == LIMIT else ProbeState.REMOVED))
        else:
            self._refused += 1

    def _canonical(self, record: bytes) -> bytes:
        """Return a record with the process name as long as it is, instead of with zeros behind it."""
        (flags,) = _FLAGS.unpack_from(record)
        if not flags & _NAMED:
            return record
        place = self._name_places.get(flags)
        if place is None:
            place = self._name_places[flags] = header_struct(flags, "little").size
        end = record.find(0, place, place + NAME_SIZE)
        if end < 0:  # of nobody: no name was written over what stood there
            end, record = place, record[:place] + b"\0" + record[place + 1 :]
        return record[: end + 1] + record[place + NAME_SIZE :]

    def close(self) -> None:
        """Give the memory up."""
        for each in (*self._buffers, self._packer, self._index):
            each.close()
        if self._stacks is not None:
            self._stacks.close()
        if self.names is not None:
            self.names.close()
