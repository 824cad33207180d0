"""
The bytes of a ring buffer as what happened: records in their canonical form, ends of probepoints, ends of processes.

A record whose instruction may fault is held back until its thread is known to be beyond that: if the thread gets a
signal for the instruction, the record is dropped ("log on success"). What comes behind it waits with it, so that the
order is that of the ring. As long as no signal has come they wait light (``waiting``) and come out in batches; where
one has, each is looked at. Nothing here talks to the kernel.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.layout import KIND_SHIFT, NAME_SIZE, PROBE_MAX, TICKETS_SHIFT, Entry
from dprobes.engines.ebpf.read.heldrecords import Thread, Waiting
from dprobes.engines.ebpf.read.overflow import Overflow
from dprobes.engines.interface import RecordBatch, RecordEvent
from dprobes.record.layout import Item, header_struct
from dprobes.target.processmaps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

__all__ = ["HOLDING", "SETTLING", "Ended", "Happening", "Left", "Progress", "Spool"]

SETTLING = 0.004
"""
Seconds that the last record of a thread is held back at least. The signal follows it as fast as the instruction can
fault, which takes longer only if the thread has to give way to others right there: then somebody has to look.
"""

HOLDING = 0.5
"""Seconds after which a record is given out even if its thread stands where it stood."""

_BREATH = 1024
"""So many entries are held back in a row before ``take`` says so, and so many records are a batch at most."""

_MEMORY = 8 << 20
_OVERFLOW = 1 << 30
"""Bytes that are kept in memory, and beyond that in a file, before anybody has looked at them."""

_DISCARDED = 1 << 30
_HEADER_SIZE = 8
_HEADS = struct.Struct("=IIII")  # the ring's header (length and flags, page offset), then the entry's
_RECORD, _TRACE = int(Entry.RECORD), int(Entry.TRACE)  # enum members are slow to look up
_NAME_FLAG_BYTE, _NAME_FLAG = 1, Item.PROCESS_NAME >> 8
_ENDED = struct.Struct("=II")
_SIGNAL = struct.Struct("=QII")
_PROCESS = struct.Struct("=I")


@dataclass(frozen=True, slots=True)
class Ended:
    """Say that a probepoint is to be taken away, because of a hit in thread ``tid`` of process ``pid``."""

    probe: int
    reason: int
    """The operand of ``exit``, or ``layout.LIMIT`` or ``layout.REMOVE``."""
    pid: int
    tid: int


@dataclass(frozen=True, slots=True)
class Left:
    """Say that a process has left the scope."""

    pid: int


Happening = RecordEvent | RecordBatch | Ended | Left


class _Chunk(NamedTuple):
    """A piece of the ring: its bytes, or how many of them are in the overflow, and when and in which drain it came."""

    data: bytes
    size: int
    stamp: float
    drain: int


class _Held:
    """
    A record that may still be dropped; ``happening`` is None once it is dropped or given out.

    ``earlier`` is another record of the same hit: several probepoints may be at one instruction.
    """

    __slots__ = ("earlier", "happening", "is_certain", "look", "mark", "place", "stamp", "tid")

    def __init__(self, happening: RecordEvent, stamp: float, tid: int, place: int, earlier: _Held | None) -> None:
        self.happening: RecordEvent | None = happening
        self.stamp = stamp
        self.tid = tid
        self.place = place
        self.earlier = earlier
        self.is_certain = False
        self.mark: int | None = None
        self.look = 0

    def of_hit(self) -> Iterator[_Held]:
        """Iterate over the records of the hit up to this one, the last first."""
        held: _Held | None = self
        while held is not None:
            yield held
            held = held.earlier


Progress = Callable[[int, int | None], int]
"""
Look where a thread is. It gets the thread's id and what it returned of the same hit before, or None.

A result below 0 means that the thread is beyond the instruction of its last record.
"""


class Spool:
    """
    Take over what the ring held, and give it out in order.

    ``faulting`` maps the probepoints whose record is to be dropped when their instruction faults to the file offset of
    that instruction. ``limit`` is how many bytes are kept in memory before ``is_full``, where no file can take more.
    ``bank_size``, a power of two, is the distance of the entries that a probepoint has in the probe table; entries of
    the ring name one of them. ``progress`` is asked of a thread from which nothing has come for ``SETTLING`` seconds;
    without it they are enough. Of those in ``ticketed`` the kernel says whether the instruction of a hit faulted.
    """

    def __init__(
        self,
        faulting: dict[int, int],
        limit: int,
        bank_size: int = PROBE_MAX,
        progress: Progress | None = None,
        ticketed: Collection[int] = (),
    ) -> None:
        self._faulting = faulting
        self._ticketed = ticketed
        self._limit = limit
        self._progress = progress
        self._probe_mask = bank_size - 1
        self._chunks: deque[_Chunk] = deque()
        self._overflow = Overflow(_OVERFLOW)
        self._drains = self._parsed = 0
        self._size = 0
        self._signals = self._parsed_signals = 0
        self._is_simple = _have_own_places(faulting)
        self._waiting: Waiting[tuple[int, bytes] | Ended | Left] = Waiting(
            lambda thread: self._has_settled(thread, self._drained)
        )
        self._held: deque[_Held | Happening] = deque()
        self._last: dict[int, _Held] = {}
        self._name_places: dict[int, int] = {}
        self._drained = float("-inf")
        self.faults: dict[int, int] = {}
        """How many hits of each probepoint did not complete the instruction."""
        self.dropped: dict[int, int] = {}
        """How many records of each probepoint were not given out for that reason, stack traces included."""

    def expect(self, faulting: Mapping[int, int]) -> None:
        """Take up more probepoints whose records are to be dropped when their instruction faults."""
        self._faulting.update(faulting)
        self._is_simple = _have_own_places(self._faulting)

    @property
    def is_full(self) -> bool:
        """Whether no more should be added now."""
        return self._size >= self._limit

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to give out, not even something that is held back."""
        return not self._chunks and not self._held and not self._waiting

    @property
    def is_holding(self) -> bool:
        """Whether something is held back, and will be given out when time has passed."""
        return bool(self._held or self._waiting) and not self._chunks

    def add(self, data: bytes, now: float, signals: int, *, is_all: bool = True) -> None:
        """
        Take a copy of what the ring held at the time ``now``; empty data say that there was nothing.

        ``signals`` is how many SIGNAL entries have come so far: at least those that are in the data up to now. Without
        ``is_all`` the ring may have held more.
        """
        self._drained = now
        self._signals = signals
        self._drains += is_all
        if not data:
            return
        size = len(data)
        if self._size + size > _MEMORY and self._overflow.write(data):
            data = b""
        self._chunks.append(_Chunk(data, size, now, self._drains))
        self._size += len(data)

    def _drop_first(self, chunk: _Chunk) -> None:
        self._chunks.popleft()
        self._size -= len(chunk.data)

    def close(self) -> None:
        """Give up what has not been taken."""
        self._overflow.close()

    def take(self, *, everything: bool = False) -> Iterator[Happening | None]:
        """
        Iterate over what need not be held back; with ``everything`` nothing is, because nothing will follow.

        None comes now and then while much is looked at that is held back: others may want to do something meanwhile.
        """
        while self._chunks:
            chunk = self._chunks[0]
            data, stamp, self._parsed = chunk.data or self._overflow.read(chunk.size), chunk.stamp, chunk.drain
            if self._is_simple and self._signals == self._parsed_signals and self._wait_light(data, stamp):
                self._drop_first(chunk)
                certain = self._waiting.take_certain()
                yield from self._batches(certain)
                if not certain:
                    yield None
                continue
            self._hold_what_waits()
            for number, happening in enumerate(self._parse(data, stamp), 1):
                if self._held or isinstance(happening, _Held):
                    self._held.append(happening)
                    if not number % _BREATH:
                        yield None
                else:
                    yield happening
            self._drop_first(chunk)
            # Only now: what has just been parsed may have dropped some of it.
            yield from self._release(stamp)
        self._parsed = self._drains
        if everything:
            self._hold_what_waits()
        yield from self._batches(self._waiting.take_certain())
        yield from self._release(float("inf") if everything else self._drained)

    def _wait_light(self, data: bytes, stamp: float) -> bool:
        """Let records wait light, there being no signals; return False if some need more care."""
        unpack, faulting, probe_mask = _HEADS.unpack_from, self._faulting, self._probe_mask
        items: list[tuple[int, bytes] | Ended | Left] = []
        tids: list[int] = []
        position, end = 0, len(data)
        while position < end:
            length, _, first, tid = unpack(data, position)
            start = position + 16
            stop = position + 8 + (length & ~_DISCARDED)
            position = stop + 7 & ~7
            if length & _DISCARDED:
                continue
            kind = first >> KIND_SHIFT
            if kind == _RECORD:
                probe = first & probe_mask
                record = data[start:stop]
                if record[_NAME_FLAG_BYTE] & _NAME_FLAG:
                    record = self._canonical(record)
                items.append((probe, record))
                tids.append(tid if probe in faulting else 0)
            elif kind == _TRACE:
                return False
            elif (other := self._other(data, start, first, tid)) is not None:
                items.append(other)
                tids.append(0)
        for held in self._held:
            self._wait_again(held)
        self._held.clear()
        self._last.clear()
        self._waiting.add(items, tids, stamp)
        return True

    def _wait_again(self, held: _Held | Happening) -> None:
        """Let wait light what was held back on its own."""
        if isinstance(held, _Held):
            if held.happening is not None:
                self._waiting.add([held.happening], [held.tid], held.stamp)
        elif not isinstance(held, RecordBatch):  # batches are never held back
            self._waiting.add([held], [0], self._drained)

    def _hold_what_waits(self) -> None:
        """Hold everything that waits on its own."""
        for item, tid, stamp in self._waiting.take_all():
            if isinstance(item, Ended | Left):
                self._held.append(item)
            elif tid:
                self._held.append(self._hold(RecordEvent(*item), stamp, tid, is_trace=False))
            else:
                self._held.append(RecordEvent(*item))

    def _batches(self, items: Sequence[tuple[int, bytes] | Ended | Left]) -> Iterator[Happening]:
        """Iterate over items, the records in batches."""
        records: list[tuple[int, bytes]] = []
        for item in items:
            if isinstance(item, Ended | Left):
                if records:
                    yield RecordBatch(records)
                    records = []
                yield item
                continue
            records.append(item)
            if len(records) == _BREATH:
                yield RecordBatch(records)
                records = []
        if records:
            yield RecordBatch(records)

    def _release(self, now: float) -> Iterator[Happening]:
        """Give out what was held back, up to the first record that is too young to be certain."""
        held = self._held
        while held:
            first = held[0]
            if not isinstance(first, _Held):
                held.popleft()
                yield first
                continue
            if not first.is_certain and first.happening is not None and not self._has_settled(first, now):
                return
            held.popleft()
            happening, first.happening = first.happening, None
            if happening is not None:
                yield happening
        self._last.clear()

    def _has_settled(self, held: _Held | Thread, now: float) -> bool:
        """Return whether a record can be given out: its thread is beyond the instruction."""
        if held.stamp + HOLDING <= now:
            return True
        if held.stamp + SETTLING > now:
            return False
        if self._progress is None:
            return True
        if held.mark is None or held.mark >= 0:
            held.mark = self._progress(held.tid, held.mark)
            held.look = self._drains
            return False
        # The signal may have come into the ring just before that look.
        return self._parsed > held.look

    def _parse(self, data: bytes, stamp: float) -> Iterator[Happening | _Held]:
        unpack, faulting, probe_mask = _HEADS.unpack_from, self._faulting, self._probe_mask
        position, end = 0, len(data)
        while position < end:
            length, _, first, tid = unpack(data, position)
            start = position + _HEADS.size
            stop = position + _HEADER_SIZE + (length & ~_DISCARDED)
            position = stop + 7 & ~7
            if length & _DISCARDED:
                continue
            kind, probe = first >> KIND_SHIFT, first & probe_mask
            if kind in (Entry.RECORD, Entry.TRACE):
                event = RecordEvent(probe, self._canonical(data[start:stop]))
                if probe not in faulting:
                    yield event
                    continue
                yield self._hold(event, stamp, tid, is_trace=kind == Entry.TRACE)
            elif kind == Entry.SIGNAL:
                self._parsed_signals += 1
                self._drop(tid, *_SIGNAL.unpack_from(data, start))
            elif (other := self._other(data, start, first, tid)) is not None:
                yield other

    def _other(self, data: bytes, start: int, first: int, tid: int) -> Ended | Left | None:
        """Return what an entry says that is neither a record nor a signal."""
        match first >> KIND_SHIFT:
            case Entry.ENDED:
                reason, pid = _ENDED.unpack_from(data, start)
                return Ended(first & self._probe_mask, reason, pid, tid)
            case Entry.PROCESS:
                return Left(*_PROCESS.unpack_from(data, start))
        return None

    def _hold(self, event: RecordEvent, stamp: float, tid: int, *, is_trace: bool) -> _Held:
        """Hold a record back, together with those of the same hit."""
        place = self._faulting[event.probe]
        last = self._last.get(tid)
        if last is not None and not (last.place == place and (is_trace or not _is_among(event.probe, last))):
            # The thread has come to another hit.
            last.is_certain = True
            while last.earlier is not None:
                last = last.earlier
                last.is_certain = True
            last = None
        held = self._last[tid] = _Held(event, stamp, tid, place, last)
        return held

    def _drop(self, tid: int, ip: int, signal: int, _code: int) -> None:
        """Drop the last records of a thread if the instruction at ``ip`` can be that of their probepoints."""
        last = self._last.pop(tid, None)
        if last is None:
            return
        # Where the file is in the process is not known, but it is mapped by whole pages.
        if (last.place - ip) % PAGE_SIZE or not (signal >> TICKETS_SHIFT or self._may_be_of(last)):
            for held in last.of_hit():
                held.is_certain = True
            return
        faulted = set()
        for held in last.of_hit():
            if held.happening is not None:
                probe = held.happening.probe
                faulted.add(probe)
                self.dropped[probe] = self.dropped.get(probe, 0) + 1
                held.happening = None
        for probe in faulted:
            self.faults[probe] = self.faults.get(probe, 0) + 1

    def _may_be_of(self, last: _Held) -> bool:
        """Return whether a fault for which no ticket came back can be that of a thread's last records."""
        return any(held.happening is None or held.happening.probe not in self._ticketed for held in last.of_hit())

    def _canonical(self, record: bytes) -> bytes:
        """Return a record with the process name as long as it is, instead of with zeros behind it."""
        flags = int.from_bytes(record[:4], "little")
        place = self._name_places.get(flags)
        if place is None:
            place = header_struct(flags, "little").size if flags & Item.PROCESS_NAME else 0
            self._name_places[flags] = place
        if not place:
            return record
        end = record.index(0, place) + 1
        return record[:end] + record[place + NAME_SIZE :]


def _have_own_places(faulting: Mapping[int, int]) -> bool:
    """Return whether no two probepoints are at one instruction, where a thread's last hit may have several records."""
    return len(set(faulting.values())) == len(faulting)


def _is_among(probe: int, last: _Held) -> bool:
    """Return whether a hit has a record of a probepoint already; one that has been given out counts as such."""
    held: _Held | None = last
    while held is not None:
        if held.happening is None or held.happening.probe == probe:
            return True
        held = held.earlier
    return False
