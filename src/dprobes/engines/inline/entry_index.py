"""
Index of the entries of several rings, which are copied to the client's memory, sorted by time.

::

    rings ─► buffer ─► lines, sorted within each part ─► merged lines ─► packed records
                                                              └─ later entries wait for the next reading

The routines in ``native.routines`` process single entries; Python code processes parts, groups and batches.
"""

from __future__ import annotations

import struct
import time
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.bpf_instructions import Helper
from dprobes.bpf.map_layouts import ENTRY_HEAD, Entry
from dprobes.engines.inline.shared_memory import Region, SharedHash, Words, own_function
from dprobes.errors import FormatError
from dprobes.native.routines.entry_planes import (
    PACKING_SIZE,
    PLACE_SIZE,
    Packing,
    copy_routine,
    difference_routine,
    order_routine,
    places_routine,
    planes_routine,
)
from dprobes.native.routines.entry_walk import (
    GROUP_SIZE,
    GROUPS_MAX,
    LINE_SIZE,
    NAMES,
    NOBODY_KNOWS,
    RECORD_PLACE,
    WALK_SIZE,
    RecordPlaces,
    Walk,
    WalkResult,
    insertion_routine,
    merge_routine,
    walk_routine,
)
from dprobes.native.routines.handler_ring import ENTRY_HEADER
from dprobes.native.routines.shared_hash_table import hash_routine
from dprobes.platform.linux.procfs import identity_of, program_of
from dprobes.record.record_rows import PROBE_SIZE, PackedRows
from dprobes.record.record_table import RecordTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.platform.linux.procfs import ThreadIdentity

__all__ = ["EntryBuffer", "EntryIndex", "EntryPacker", "Group", "Part", "ThreadNames", "thread_key"]

_ROW = struct.Struct("<16sII")
_LOOK_AGAIN = 10_000_000
"""Nanoseconds after which the names of threads are read again."""
_LOOKS_MAX = 32
"""Maximum number of threads whose names are read at a time."""
_SPACE = 1 << 16

_PID_LIMIT = 1 << 22
"""PID_MAX_LIMIT (include/linux/threads.h)."""
_LEARNT_MAX = 1024
"""Maximum number of unknown threads that one reading looks up."""


def thread_key(pid: int, tid: int) -> int:
    """Return the key of a thread in the table of names."""
    return pid << 32 | tid


class ThreadNames:
    """Table of the known threads; a walk writes the keys of the threads with records to the buffer ``seen``."""

    def __init__(self) -> None:
        self._region = Region(NAMES.size + _SPACE)
        self._region.place = self._region.own_address
        self._table = SharedHash(self._region, NAMES)
        self._nameless: set[int] = set()
        self._programs: dict[int, tuple[int, int] | None] = {}
        """The executables of processes, by process id: device and inode number of the file; None: unknown."""
        self._last: dict[int, bytes] = {}
        """The row of the last known thread of each process, for its threads that remain unknown."""
        self._met: set[int] = set()
        """Processes that have mapped memory for handlers, or had a record before."""
        self.awaits_tracer = True
        """True if messages of the tracer about threads may still arrive."""
        self._looked = 0
        self._learned = 0
        """The number of unknown threads in this reading."""
        self._due: list[int] = []
        self.seen = Words(NAMES.entries * 8)

    @property
    def table_address(self) -> int:
        """The address of the table."""
        return self._table.place.address

    def learn(self, key: int) -> None:
        """
        Add a thread that has written a record to the table, by a look-up in /proc, or mark it as unknown.

        The tracer reports a new process before its first record, but this process may not have read the message, and
        the other one may have called execve. So the first record of a process waits for the next reading.
        """
        pid, tid = key >> 32, key & 0xFFFF_FFFF
        identity = None
        self._learned += 1
        if pid >= _PID_LIMIT or self._learned > _LEARNT_MAX:
            pass  # no thread has such a number, or the number of new threads is implausible
        elif pid in self._programs or pid in self._met or not self.awaits_tracer:
            identity = identity_of(pid, tid)
        if len(self._met) < _PID_LIMIT >> 6:
            self._met.add(pid)
        if identity is None:
            self._nameless.add(key)
            self._set(key, _ROW.pack(b"", 0, NOBODY_KNOWS))
            return
        if pid not in self._programs:
            self._programs[pid] = program_of(pid)
        self._know(key, identity)

    def told(self, identity: ThreadIdentity) -> None:
        """Record the tracer's message about a new process, or about a thread that has ended."""
        if identity.program is not None:
            self._programs[identity.pid] = identity.program
        key = thread_key(identity.pid, identity.tid)
        self._nameless.discard(key)
        self._know(key, identity)

    def begin_program(self, pid: int) -> None:
        """Forget the threads of a process that has called execve."""
        self._programs.pop(pid, None)
        self._met.add(pid)
        for key in list(self._table):
            if int.from_bytes(key, "little") >> 32 == pid:
                self._table.discard(key)

    def settle(self) -> None:
        """Give each thread that is still unknown the name and user id of another thread of its process."""
        for key in self._nameless:
            self._set(key, self._last.get(key >> 32, _ROW.pack(b"", 0, 0)))
        self._nameless.clear()

    def look_again(self, seen_end: int) -> None:
        """
        Read the names of threads with records again.

        The keys of the last reading end at the address ``seen_end``.
        """
        for key in self._nameless:
            self._table.discard(_bytes(key))
        self._nameless.clear()
        self._learned = 0
        now = time.monotonic_ns()
        if now < self._looked + _LOOK_AGAIN:
            return
        self._looked = now
        if not self._due:
            self._due = list(self.seen.words[: max(0, seen_end - self.seen.address) // 8])
        due, self._due = self._due[:_LOOKS_MAX], self._due[_LOOKS_MAX:]
        for key in due:
            pid, tid = key >> 32, key & 0xFFFF_FFFF
            identity = identity_of(pid, tid)
            # A process that has called execve has another name, but earlier records may not have arrived yet.
            if identity is not None and (tid != pid or self._programs.get(pid) == program_of(pid)):
                self._know(key, identity)

    def _know(self, key: int, identity: ThreadIdentity) -> None:
        row = _ROW.pack(identity.name, identity.uid, 0)
        self._last[key >> 32] = row
        self._set(key, row)

    def _set(self, key: int, row: bytes) -> None:
        self._table[_bytes(key)] = row

    def close(self) -> None:
        """Unmap the memory of the table."""
        self.seen.close()
        self._region.close()


def _bytes(key: int) -> bytes:
    return key.to_bytes(8, "little")


_SLACK = 1 << 16
"""Number of bytes after a buffer, into which an invalid entry may reach."""

_WORD = 8
_NEVER = (1 << 63) - 1
"""A time that is later than all others."""


class Part(NamedTuple):
    """
    Piece of a ring in a buffer, from ``start`` to ``end``; ``ring`` is None if it was walked before.

    With ``has_more``, the ring had more entries, which are not in the buffer.
    """

    start: int
    end: int
    ring: int | None
    has_more: bool


class EntryBuffer:
    """Buffer of ``room`` bytes for copies of entries; ``parts`` are pieces of rings, the older ones of a ring first."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._words = Words(room + _SLACK)
        self.address = self._words.address
        self.memory = self._words.memory
        self.parts: list[Part] = []

    @property
    def end(self) -> int:
        """The number of bytes in use."""
        return self.parts[-1].end if self.parts else 0

    def add(self, size: int, ring: int | None = None, *, has_more: bool = False) -> None:
        """Record that ``size`` bytes of a ring were copied to the end of the buffer (``Part``)."""
        if size:
            self.parts.append(Part(self.end, self.end + size, ring, has_more))

    def clear(self) -> None:
        """Forget the copied entries; the buffer's memory stays allocated."""
        self.parts.clear()

    def close(self) -> None:
        """Release the memory."""
        self._words.close()


class Group(NamedTuple):
    """Group of ring entries: their kind, their length in bytes, and their number."""

    kind: int
    length: int
    entries: int


@lru_cache(16)
def _walk(places: RecordPlaces, *, again: bool) -> Callable[..., int]:
    calls = {Helper.MAP_LOOKUP_ELEM: hash_routine(Helper.MAP_LOOKUP_ELEM, NAMES)}
    return own_function(walk_routine(places, again=again), calls)


@lru_cache(1)
def _insert() -> Callable[..., int]:
    return own_function(insertion_routine())


@lru_cache(1)
def _merge() -> Callable[..., int]:
    return own_function(merge_routine())


@lru_cache(1)
def _copy() -> Callable[..., int]:
    return own_function(copy_routine())


class EntryIndex:
    """
    Index of the entries in a buffer of at most ``room`` bytes, whose records have the layout ``places``.

    ``counts`` has the number of records, a word, of each of at most ``probes`` probepoints. ``names`` is None if
    records have neither the name nor the user id of a thread.
    """

    def __init__(self, room: int, places: RecordPlaces, probes: int, names: ThreadNames | None) -> None:
        self._places = places
        self._names = names
        size = room + LINE_SIZE
        self._first, self._second = Words(size), Words(size)
        self._groups = Words(GROUP_SIZE * GROUPS_MAX)
        self._walk = Words(WALK_SIZE)
        self._counts = Words(_WORD * probes)
        self.counts = self._counts.words
        walk = self._walk.words
        walk[Walk.COUNTS // _WORD], walk[Walk.PROBES // _WORD] = self._counts.address, probes
        walk[Walk.LATEST // _WORD] = _NEVER
        self._probes_max = probes
        walk[Walk.GROUPS // _WORD] = self._groups.address
        if names is not None:
            walk[Walk.THREADS // _WORD] = names.table_address
        self.lines = self._first.address
        """The address of the sorted lines, of which there are ``count``."""
        self.count = 0
        self.bound: int | None = None
        """Time from which on rings may have records that are not in the buffer; None if they have none."""
        self.last: dict[int, int] = {}
        """The time of the last record of each ring."""
        self.damaged = 0
        """Number of parts with contents that are no entries."""

    @property
    def groups(self) -> list[Group]:
        """The groups of the entries."""
        words = self._groups.words
        end = (self._walk.words[Walk.GROUPS_END // _WORD] - self._groups.address) // _WORD
        return [Group(words[n] >> 32, words[n] & 0xFFFF_FFFF, words[n + 1]) for n in range(0, end, 2)]

    def walk(self, buffer: EntryBuffer) -> bool:
        """
        Walk over the parts of a buffer while there is room for their groups; return True if parts are left.

        Parts that were walked over are removed from the buffer.
        """
        walk = self._walk.words
        walk[Walk.LINE // _WORD] = self._first.address
        walk[Walk.GROUPS_END // _WORD] = self._groups.address
        walk[Walk.GROUP // _WORD] = walk[Walk.TIME // _WORD] = 0
        walk[Walk.BASE // _WORD] = buffer.address
        self.bound = None
        runs = [self._first.address]
        has_room = True
        while buffer.parts and has_room:
            part = buffer.parts[0]
            has_room = self._walk_part(buffer, part)
            line = walk[Walk.LINE // _WORD]
            if line > runs[-1]:
                _insert()(runs[-1], line)
                runs.append(line)
                if part.ring is not None and self._places.time is not None:
                    self._note_last(part.ring, line, has_more=part.has_more or not has_room)
            if has_room:
                del buffer.parts[0]
            else:
                buffer.parts[0] = part._replace(start=walk[Walk.AT // _WORD] - buffer.address)
        self.count = (runs[-1] - runs[0]) // LINE_SIZE
        self._merge_runs(runs)
        return not has_room

    def _note_last(self, ring: int, line: int, *, has_more: bool) -> None:
        """
        Record the time of the last entry of a ring, which is the entry before the index line at the address ``line``.

        With ``has_more``, the ring has later entries that were not read: only records up to this time are complete.
        """
        last = self._first.words[(line - self._first.address) // _WORD - 2]
        self.last[ring] = max(last, self.last.get(ring, 0))
        if has_more:
            self.bound = last if self.bound is None else min(self.bound, last)

    def _walk_part(self, buffer: EntryBuffer, part: Part) -> bool:
        """Add the entries of one part of a buffer to the index; return False if it has no room for more groups."""
        walk = self._walk.words
        walk[Walk.AT // _WORD], walk[Walk.END // _WORD] = buffer.address + part.start, buffer.address + part.end
        function = _walk(self._places, again=part.ring is None)
        while True:
            walk[Walk.FOUND // _WORD] = 0
            match function(self._walk.address):
                case WalkResult.THREAD:
                    assert self._names is not None
                    self._names.learn(walk[Walk.THREAD // _WORD])
                case WalkResult.GROUPS:
                    return False
                case result:
                    self.damaged += result == WalkResult.NONSENSE
                    return True

    def _merge_runs(self, runs: list[int]) -> None:
        """Merge runs of sorted lines in pairs until one is left; ``runs`` are their bounds."""
        place, other = self._first, self._second
        while len(runs) > 2:
            shift = other.address - place.address
            merged = [runs[0] + shift]
            for n in range(0, len(runs) - 1, 2):
                middle, end = runs[n + 1], runs[min(n + 2, len(runs) - 1)]
                _merge()(runs[n], middle, middle, end, runs[n] + shift)
                merged.append(end + shift)
            place, other, runs = other, place, merged
        self.lines = place.address

    @property
    def refused(self) -> int:
        """The number of entries skipped because no handler can have written them."""
        return int(self._walk.words[Walk.REFUSED // _WORD])

    def limit(self, probes: int) -> None:
        """Set the number of probepoints; entries with other numbers are skipped and counted as refused."""
        self._walk.words[Walk.PROBES // _WORD] = min(probes, self._probes_max)

    def begin(self, reading: int, seen: Words | None, latest: int = _NEVER) -> None:
        """
        Begin the reading with the number ``reading``; the walk writes the keys of threads with records to ``seen``.

        Records with a time after ``latest``, in nanoseconds, are refused.
        """
        walk = self._walk.words
        walk[Walk.LATEST // _WORD] = latest
        walk[Walk.READING // _WORD], walk[Walk.NAMELESS // _WORD] = reading, 0
        if seen is not None:
            walk[Walk.SEEN // _WORD] = seen.address
            walk[Walk.SEEN_END // _WORD] = seen.address + len(seen.memory)

    @property
    def seen_end(self) -> int:
        """The address after the last key of a thread."""
        return int(self._walk.words[Walk.SEEN // _WORD])

    @property
    def nameless(self) -> int:
        """Number of records in this reading whose thread is unknown."""
        return int(self._walk.words[Walk.NAMELESS // _WORD])

    def count_before(self, time: int) -> int:
        """Return the number of lines that are older than ``time``, CLOCK_MONOTONIC in nanoseconds."""
        words = (self._first if self.lines == self._first.address else self._second).words
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if words[2 * middle] < time:
                low = middle + 1
            else:
                high = middle
        return low

    def line(self, number: int) -> tuple[int, int]:
        """Return the offset of a line's entry in the buffer, and the number of its group."""
        words = (self._first if self.lines == self._first.address else self._second).words
        word = words[2 * number + 1]
        return word & 0xFFFF_FFFF, word >> 32

    def keep(self, buffer: EntryBuffer, first: int, other: EntryBuffer) -> None:
        """Copy the entries of the lines from number ``first`` on to the end of another buffer."""
        start, end = self.lines + first * LINE_SIZE, self.lines + self.count * LINE_SIZE
        place = other.address + other.end
        other.add(_copy()(start, end, buffer.address, place) - place)

    def close(self) -> None:
        """Release the memory."""
        for each in (self._first, self._second, self._groups, self._walk, self._counts):
            each.close()


_LENGTH_MAX = 1 << 16
"""Maximum length in bytes of entries that are packed; longer ones are read one by one: there cannot be many."""
_PROBE_BYTES = 3
"""Size in bytes of a probepoint's number in an entry; the fourth byte is the kind."""


@lru_cache(1)
def _functions() -> tuple[Callable[..., int], ...]:
    routines = places_routine(), order_routine(), difference_routine(), planes_routine()
    return tuple(own_function(routine) for routine in routines)


class EntryPacker:
    """Packer of the entries in a buffer of at most ``room`` bytes."""

    def __init__(self, room: int) -> None:
        self._places = Words(room // 2 + PLACE_SIZE)
        self._out = Words(4 * room + _WORD)
        self._packing = Words(PACKING_SIZE)

    def packed(self, index: EntryIndex, buffer: EntryBuffer, count: int) -> RecordTable | None:
        """Return the records of the first ``count`` lines; None if an entry is no record, or cannot be packed."""
        _, order, _, _ = _functions()
        end = index.lines + count * LINE_SIZE
        parts: list[PackedRows] = []
        numbers = bytearray(256)
        for number, group in enumerate(index.groups):
            size = self._list(index.lines, end, number)
            if not size:
                continue
            numbers[number] = len(parts)
            try:
                if group.kind > Entry.TRACE or not ENTRY_HEAD.size < group.length <= _LENGTH_MAX:
                    return None
                parts.append(self._part(group, buffer, size))
            except FormatError:
                return None
        if len(parts) == 1:
            return RecordTable.of_rows(parts[0])
        order(index.lines, end, self._out.address)
        return RecordTable(parts, self._out.memory[:count].translate(numbers))

    def _list(self, lines: int, end: int, group: int) -> int:
        """
        Write the offsets of the entries of a group, in the index lines from ``lines`` to ``end``, to ``_places``.

        Return their number.
        """
        places, _, _, _ = _functions()
        return (places(lines, end, group, self._places.address) - self._places.address) // PLACE_SIZE

    def _part(self, group: Group, buffer: EntryBuffer, count: int) -> PackedRows:
        _, _, differ, put_together = _functions()
        memory, words = buffer.memory, self._packing.words
        first = int.from_bytes(self._places.memory[:PLACE_SIZE], "little")
        behind = ENTRY_HEADER + group.length
        size = -(-behind // _WORD) * _WORD
        self._out.memory[:size] = bytes(size)
        values = (
            (Packing.PLACES, self._places.address),
            (Packing.PLACES_END, self._places.address + count * PLACE_SIZE),
            (Packing.BASE, buffer.address),
            (Packing.FIRST, buffer.address + first),
            (Packing.DIFFERENCES, self._out.address),
            (Packing.DIFFERENCES_END, self._out.address + size),
            (Packing.COUNT, count),
        )
        for word, value in values:
            words[word // _WORD] = value
        differ(self._packing.address)
        differences = self._out.memory[:behind]
        rows = (*range(ENTRY_HEADER, ENTRY_HEADER + _PROBE_BYTES), *range(RECORD_PLACE, behind))
        which = [at for at in rows if differences[at]]
        listed = b"".join([at.to_bytes(PLACE_SIZE, "little") for at in which])
        at = -(-len(listed) // _WORD) * _WORD
        self._out.memory[: len(listed)] = listed
        words[Packing.WHICH // _WORD] = self._out.address
        words[Packing.WHICH_END // _WORD] = self._out.address + len(listed)
        words[Packing.OUT // _WORD] = self._out.address + at
        if which:
            put_together(self._packing.address)
        planes = {}
        for place in which:
            planes[_row_place(place)] = self._out.memory[at : at + count]
            at += count
        row = memory[first + ENTRY_HEADER : first + ENTRY_HEADER + _PROBE_BYTES] + b"\0"
        return PackedRows(count, row + memory[first + RECORD_PLACE : first + behind], planes)

    def close(self) -> None:
        """Release the memory."""
        for each in (self._places, self._out, self._packing):
            each.close()


def _row_place(place: int) -> int:
    """Return the offset, in a row of packed records, of the byte at the offset ``place`` of an entry."""
    return place - ENTRY_HEADER if place < ENTRY_HEADER + PROBE_SIZE else place - RECORD_PLACE + PROBE_SIZE
