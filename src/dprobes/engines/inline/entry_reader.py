"""
Reader of the rings' entries: records in their canonical form, and ends of probepoints.

The records of all rings are returned in the order of their time, packed if possible. Entries that are later than the
start of a reading are kept for the next one. By then all earlier entries have arrived, except those of preempted
threads.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import time
from functools import lru_cache
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
from dprobes.engines.inline.entry_index import EntryBuffer, EntryIndex, EntryPacker, ThreadNames
from dprobes.engines.inline.shared_memory import own_function
from dprobes.engines.ring_spans import complete_end, entries_in
from dprobes.errors import FormatError
from dprobes.native.generated_code import MapPlace, MapShape
from dprobes.native.routines.entry_walk import RECORD_PLACE, RecordPlaces, complete_routine
from dprobes.native.routines.handler_ring import BUSY, CONSUMER, DATA, DISCARDED, ENTRY_HEADER, PRODUCER, RingShape
from dprobes.platform.linux.thread_stack import COLUMNS_OF
from dprobes.record.log_record import Item, decode_record, header_struct
from dprobes.record.record_rows import PROBE_SIZE, RowShape
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.instruction_set import ITEM_PREFIX_SIZE, USER_FRAMES_MAX, Token
from dprobes.rpn.keyed_tables import KeyKind
from dprobes.rpn.program_needs import takes_user_stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from dprobes.engines.inline.shared_memory import Region
    from dprobes.engines.inline.shared_state import SharedStore
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.process_images import ProcessImages

__all__ = ["RingReader", "SharedRing", "SharedRings", "StackEntries", "record_places"]

_AT_ONCE, _AT_ONCE_MIN = 4 << 20, 64 << 10
"""Maximum number of bytes read at once from all rings together, and the minimum for each."""


_WORD_MAX = (1 << 64) - 1


@lru_cache(1)
def _complete() -> Callable[..., int]:
    return own_function(complete_routine())


class SharedRing:
    """
    Reader of one ring.

    Probed processes can write anything into the ring. If no handler can have written the contents, they are discarded,
    and the ring is reset.
    """

    def __init__(self, memory: memoryview, size: int, number: int = 0) -> None:
        self.size = size
        self._number = number
        self._consumer = memory[CONSUMER : CONSUMER + 8].cast("Q")
        self._producer = memory[PRODUCER : PRODUCER + 8].cast("Q")
        self._data = memory[DATA : DATA + size]
        self._lengths = self._data.cast("I")
        first = ctypes.c_char.from_buffer(self._data)
        self._address = ctypes.addressof(first)
        del first
        self._position: int = self._consumer[0] & ~7
        """The reader's position; its copy in shared memory is only written, for handlers."""
        self._left = 0
        self.skipped = 0
        """The number of entries skipped because their writers had abandoned them."""
        self.damaged = 0
        """The number of resets of the ring."""

    @property
    def stalled_at(self) -> int | None:
        """The position of the first entry if it is incomplete, and delays all entries after it; else None."""
        if not self.pending:
            return None
        length = self._lengths[(self._position & self.size - 1) >> 2]
        return self._position if not length or length & BUSY else None

    @property
    def end(self) -> int:
        """The position after the last entry."""
        return self._position + self.pending

    def leave(self, end: int) -> None:
        """Record that the writers of incomplete entries before the position ``end`` have abandoned them."""
        self._left = max(self._left, end)

    @property
    def pending(self) -> int:
        """The number of bytes to be read, incomplete entries included."""
        pending: int = self._producer[0] - self._position
        if 0 <= pending <= self.size and not pending & 7:
            return pending
        self._begin_anew()
        return 0

    def _begin_anew(self) -> None:
        """Discard the whole contents, which are invalid, and reset the ring."""
        self.damaged += 1
        ctypes.memset(self._address, 0, self.size)
        self._consumer[0] = self._producer[0] = self._position & _WORD_MAX

    def window(self) -> memoryview:
        """
        Return a view of the complete entries before the first incomplete one, or up to the end of the ring's memory.

        ``advance`` frees their room.
        """
        pending = self.pending
        start = self._position & self.size - 1
        end = min(self.size, start + pending)
        return self._data[start : complete_end(self._lengths, start, end, is_cleared=True)]

    def advance(self, size: int) -> None:
        """Clear and free the room of the first ``size`` bytes of ``window``."""
        place = self._position & self.size - 1
        ctypes.memset(self._address + place, 0, size)
        self._go_on(size)

    def _go_on(self, size: int) -> None:
        self._position += size
        self._consumer[0] = self._position & _WORD_MAX

    def move(self, buffer: EntryBuffer, limit: int) -> bool:
        """
        Move complete entries to a buffer: about ``limit`` bytes, but at least one entry if the buffer has room.

        Return False if there are entries, but the first one is incomplete.
        """
        self._skip_left()
        pending = self.pending
        for is_second in (False, True):  # up to the end of the ring's memory, and from its beginning on
            place = self._position & self.size - 1
            room = min(self.size - place, pending, max(limit, self._first_size(place)), buffer.room - buffer.end)
            if room <= 0:
                return True
            start = self._address + place
            size = _complete()(start, start + room) - start
            if not size:
                if self._reaches_too_far(place, pending):
                    self._begin_anew()
                return is_second
            ctypes.memmove(buffer.address + buffer.end, start, size)
            ctypes.memset(start, 0, size)
            self._go_on(size)
            limit -= size
            pending -= size
            buffer.add(size, self._number, has_more=pending > 0)
            if limit <= 0 or place + size < self.size:
                break
        return True

    def _reaches_too_far(self, place: int, pending: int) -> bool:
        """Return True if the entry at ``place`` is marked as complete, but exceeds the ring or the pending bytes."""
        length = self._lengths[place >> 2]
        return 0 < length < BUSY and self._first_size(place) > min(self.size - place, pending)

    def _first_size(self, place: int) -> int:
        """Return the size in bytes of the entry at a place of the ring, with its header."""
        return (self._lengths[place >> 2] & ~(BUSY | DISCARDED)) + ENTRY_HEADER + 7 & ~7

    def skip(self, before: int | None = None) -> bool:
        """
        Skip the first entry if it is incomplete; return True if it was skipped.

        Only valid if its writer has abandoned it. If ``before`` is not None, the entry is skipped only if it is before
        that position.
        """
        pending = self.pending
        place = self._position & self.size - 1
        left = pending if before is None else min(pending, before - self._position)
        if left <= 0:
            return False
        end = min(self.size, place + left)
        length = self._lengths[place >> 2]
        if length & BUSY:
            behind = place + ((length & ~(BUSY | DISCARDED)) + ENTRY_HEADER + 7 & ~7)
        elif length:
            return False
        else:  # nothing has been written, and the next entry begins with a length
            behind = place + ENTRY_HEADER
            while behind < end and not self._lengths[behind >> 2]:
                behind += ENTRY_HEADER
        self.advance(min(behind, end) - place)
        return True

    def pieces(self) -> Iterator[bytes]:
        """Iterate over complete entries, unchanged and many at a time, and free their room."""
        while size := len(window := self.window()):
            piece = bytes(window)
            window.release()
            self.advance(size)
            yield piece
        if self._skip_left():
            yield from self.pieces()

    def _skip_left(self) -> bool:
        """Skip incomplete entries that their writers have abandoned; return whether there were any."""
        before = self.skipped
        while self.skip(self._left):
            self.skipped += 1
        return self.skipped > before

    def drain(self) -> list[bytes]:
        """Return the data of all complete entries, and free their room."""
        return [piece[start:stop] for piece in self.pieces() for start, stop in entries_in(piece)]

    def close(self) -> None:
        """Release the memory views of the ring."""
        for view in (self._lengths, self._data, self._producer, self._consumer):
            view.release()


class SharedRings:
    """Rings of all CPUs, to which handlers in the probed processes write entries."""

    def __init__(self, region: Region, shape: RingShape) -> None:
        self.shape = shape
        self._region = region
        self._offset = region.take(shape.rings * shape.stride, DATA)
        with memoryview(region.mapping) as whole:
            starts = range(self._offset, self._offset + shape.rings * shape.stride, shape.stride)
            self.rings = [
                SharedRing(whole[start : start + shape.stride], shape.size, number)
                for number, start in enumerate(starts)
            ]

    @property
    def size(self) -> int:
        """The size in bytes of all rings."""
        return self.shape.rings * self.shape.size

    @property
    def place(self) -> MapPlace:
        """The place of the rings in the probed process."""
        return MapPlace(self._region.place + self._offset, MapShape.RINGS)

    def drain(self) -> list[bytes]:
        """Return the data of all complete entries, ring by ring, and free their room."""
        return [entry for ring in self.rings for entry in ring.drain()]

    def pieces(self) -> list[bytes]:
        """Return complete entries, unchanged and many at a time, and free their room."""
        return [piece for ring in self.rings for piece in ring.pieces()]

    def rest(self) -> tuple[list[bytes], int]:
        """
        Return all entries as ``pieces`` does, and the number of incomplete entries, which are skipped.

        Only valid when all writers have ended.
        """
        pieces, skipped = self.pieces(), 0
        for ring in self.rings:
            while ring.skip():
                skipped += 1
                pieces += ring.pieces()
        return pieces, skipped

    def move(self, buffer: EntryBuffer, without: Collection[int] = ()) -> set[int]:
        """
        Move complete entries to a buffer, from each ring at most as many as fit into a CPU's cache.

        Rings whose numbers are in ``without`` are omitted. Return the numbers of the rings whose first entry is
        incomplete.
        """
        limit = max(_AT_ONCE // len(self.rings), _AT_ONCE_MIN)
        rings = [(number, ring) for number, ring in enumerate(self.rings) if number not in without]
        return {number for number, ring in rings if not ring.move(buffer, limit)}

    def move_rest(self, buffer: EntryBuffer) -> int:
        """Move all entries as ``rest`` returns them; return the number of incomplete entries."""
        skipped = 0
        for ring in self.rings:
            end = ring.end  # a handler that still writes must not make this an endless loop
            ring.move(buffer, ring.size)
            while buffer.end < buffer.room and ring.skip(end):
                skipped += 1
                ring.move(buffer, ring.size)
        return skipped

    def drain_rest(self) -> tuple[list[bytes], int]:
        """Return the data of the entries that ``rest`` returns, and the number of incomplete entries."""
        pieces, skipped = self.rest()
        return [piece[start:stop] for piece in pieces for start, stop in entries_in(piece)], skipped

    @property
    def damaged(self) -> int:
        """The number of resets of rings because of contents that no handler writes."""
        return sum(ring.damaged for ring in self.rings)

    def close(self) -> None:
        """Release the views."""
        for ring in self.rings:
            ring.close()


_WORD = 8
_REGISTERS_SIZE = _WORD * SNAPSHOT_REGISTERS
_PLACES = tuple(REGISTER_OFFSETS[name] for name in COLUMNS_OF[8].names)
_REGISTER = struct.Struct("=Q")


class StackEntries:
    """
    Unwinder for the call stacks in entries of a program; those that are keys go into its ``tables``.

    Each copy of a stack is unwound when its entry is read. That takes longer than all other work for a record.
    """

    def __init__(self, tables: Sequence[SharedStore], images: ProcessImages | None = None) -> None:
        self._tables = tables
        self._copies = CopiedStacks(images)

    @classmethod
    def of(
        cls, program: Program, tables: Sequence[SharedStore], images: ProcessImages | None = None
    ) -> StackEntries | None:
        """Return the unwinder for a program; None if the program takes no user stacks."""
        return cls(tables, images) if takes_user_stacks(program) else None

    def record(self, data: bytes, canonical: Callable[[bytes], bytes]) -> bytes:
        """Return the record of a STACKED entry; ``canonical`` converts a record from the form that handlers write."""
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
        """Tally the number of a TALLY entry in its table; raise ``FormatError`` if the entry is malformed."""
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
        """Return the frames of the stack whose copy is at the end of an entry."""
        _, _, size, copied = _copy_of(data)
        first = -(-size // _WORD) * _WORD
        start = first + _REGISTERS_SIZE
        registers = {column: int(_REGISTER.unpack_from(data, first + place)[0]) for column, place in enumerate(_PLACES)}
        return self._copies.follow(pid, 8, registers, data[start : start + copied], frames)

    def close(self) -> None:
        """Release the resources for all processes."""
        self._copies.close()


def _copy_of(data: bytes) -> tuple[int, int, int, int]:
    """Return the trailer of an entry; raise ``FormatError`` if its offsets and sizes exceed the entry."""
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
"""Divisor of the rings' size: if a reading has moved more than this part, the next one follows at once."""

_STUCK = 0.1
"""Maximum number of seconds to wait for a thread that does not complete its entry."""
_NEVER = 1 << 63

_HORIZON = 10_000_000
"""Nanoseconds for which records wait for earlier ones of interrupted threads, unless the rate is very high."""
_CALM = 0.1
"""Seconds after a busy reading until the rate counts as low again."""

_AHEAD = 1_000_000_000
"""Nanoseconds by which the clock of handlers may be ahead of CLOCK_MONOTONIC."""

_PATIENCE = 20
"""Number of readings for which the records of a thread wait for the tracer's message about the thread."""


def record_places(items: Item) -> RecordPlaces:
    """Return the offsets, in records with the header items ``items``, of those that the routines use."""
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
    Reader of entries, at most ``room`` bytes in a reading.

    ``stacks`` unwinds call stacks; None if there are none. ``ended`` collects the probepoints that have ended, with
    their new states; ``counts`` has the number of records of each probepoint.
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
        """True if the last reading moved so many entries that the next one must follow at once."""
        self._waits = 0
        self._waiting: dict[int, tuple[int, float]] = {}
        """The rings whose first entry is incomplete: a lower bound of its time, and the time when this was seen."""
        self._ahead: set[int] = set()
        """The rings from which more has been read than from others."""
        self._calm_from = 0.0
        """The time (monotonic, in seconds) from which on the rate of records counts as low."""
        self._before = 0
        """The time at which the last reading began, in nanoseconds."""
        self.settled: int | None = 0
        """Monotonic time in nanoseconds; all earlier records were returned. None: all records were."""
        self.ended: list[tuple[int, ProbeState]] = []
        self._name_places: dict[int, int] = {}
        self._refused = 0
        self._ending: Collection[int] = range(probes)
        """The probepoints that handlers may end."""

    @property
    def counts(self) -> Sequence[int]:
        """The number of records of each probepoint."""
        return self._index.counts

    @property
    def damaged(self) -> int:
        """The number of pieces of rings with contents that are no entries."""
        return self._index.damaged

    @property
    def refused(self) -> int:
        """The number of entries that no handler can have written."""
        return self._index.refused + self._refused

    def limit(self, probes: int, ending: Collection[int]) -> None:
        """
        Set the number of probepoints, and the numbers of those whose handlers may end them.

        ``ending`` are these: by ``maxhits``, ``remove`` or ``exit``.
        """
        self._index.limit(probes)
        self._ending = ending

    @property
    def horizon(self) -> int:
        """
        Nanoseconds for which records should be held back, because earlier ones may still arrive.

        A thread may be interrupted between reading the clock for its record and reserving room for the record.
        """
        return 0 if time.monotonic() < self._calm_from else _HORIZON

    def read(self, move: Callable[[EntryBuffer, Collection[int]], set[int]], before: int | None) -> list[Batch]:
        """
        Return the records in rings, each with its probepoint; ``move`` moves their entries to a buffer.

        Records at or after the time ``before``, in nanoseconds, may be kept for the next reading; None: this is the
        last reading. The second argument of ``move`` is the set of rings from which more was read than from others.
        ``move`` returns the rings whose first entry is incomplete; records that may be later than such an entry are
        kept, too.
        """
        buffer, other = self._buffers
        kept = buffer.end
        waiting = move(buffer, self._ahead)
        self.is_busy = bool(self._ahead) or buffer.end - kept > self._room // _BUSY
        if before is not None:
            before, self._before = min(before, self._bound(waiting, kept)), before
        self._ahead = set()
        if not buffer.parts:
            self.settled = before
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
        if not index.nameless:  # otherwise records may be waiting for a name
            self.settled = before if before is None or index.bound is None else min(before, index.bound)
        if (bound := index.bound) is not None:
            self._ahead = {ring for ring, last in index.last.items() if last > bound}
            self.is_busy = True
        if self.is_busy:
            self._calm_from = time.monotonic() + _CALM
        return batches

    def _bound(self, waiting: set[int], kept: int) -> int:
        """
        Return the time, CLOCK_MONOTONIC in nanoseconds, from which on rings may have records that cannot be read yet.

        ``waiting`` are the rings whose first entry is incomplete. If ``kept`` bytes of former readings exceed the room
        for a reading, they are not waited for.
        """
        now = time.monotonic()
        self._waiting = {
            # The ring's outstanding records are younger than its last record, and than a reading that found it empty.
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
        """
        Return all records of ``buffer``; threads that are still unknown get the name of another one of their process.

        ``before`` is as in ``read``; records that must be kept are moved to ``other``.
        """
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
        """Return a record with its process name cut after the NUL; in the ring it is padded with zeros."""
        (flags,) = _FLAGS.unpack_from(record)
        if not flags & _NAMED:
            return record
        place = self._name_places.get(flags)
        if place is None:
            place = self._name_places[flags] = header_struct(flags, "little").size
        end = record.find(0, place, place + NAME_SIZE)
        if end < 0:  # of an unknown thread: no name was written over the earlier bytes
            end, record = place, record[:place] + b"\0" + record[place + 1 :]
        return record[: end + 1] + record[place + NAME_SIZE :]

    def close(self) -> None:
        """Release the memory."""
        for each in (*self._buffers, self._packer, self._index):
            each.close()
        if self._stacks is not None:
            self._stacks.close()
        if self.names is not None:
            self.names.close()
