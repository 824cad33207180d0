"""
Log on success: records that are held back until their instruction is known to have completed.

A record whose instruction may fault is uncertain at first. It becomes certain when its thread reaches another hit, or
is found beyond the instruction; a signal for the instruction drops it. Records after an uncertain one are held back as
well, so that the order remains that of the ring.

A million records may arrive in a second, but few signals. So records are packed, or bare pairs in a list, and their
thread ids are in another list. The last record of each thread is searched for only on demand. This module does not
access the kernel.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

from dprobes.engines.engine_interface import RecordBatch
from dprobes.platform.linux.procfs import system_call_of
from dprobes.record.record_table import RecordTable
from dprobes.target.process_maps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence

__all__ = ["BEYOND", "HOLDING", "SETTLING", "Ended", "HeldQueue", "HeldRecords", "Progress", "progress"]


class Ended(NamedTuple):
    """A probepoint that is to be removed, because of a hit in thread ``tid`` of process ``pid``."""

    probe: int
    reason: int
    """Operand of ``exit``, or ``LIMIT`` or ``REMOVE`` of ``bpf.map_layouts``."""
    pid: int
    tid: int


HeldItem = tuple[int, bytes] | Ended | None
"""A probepoint and its record, the end of a probepoint, or None for a dropped record."""

Part = list[HeldItem] | RecordTable


class HeldQueue:
    """
    Queue of held records, single or packed, and of the items between them, numbered in ascending order.

    A part of the queue is a list or packed records. Dropping a packed record splits its part. ``first`` is the number
    of the first item, ``end`` the number after the last one.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._firsts: list[int] = []
        """Number of the first item of each part."""
        self.first = self.end = 0

    def __bool__(self) -> bool:
        return self.first < self.end

    def add(self, items: Iterable[HeldItem]) -> None:
        """Append single items."""
        if not self._parts or not isinstance(part := self._parts[-1], list):
            part = []
            self._begin(part)
        before = len(part)
        part += items
        self.end += len(part) - before

    def add_packed(self, records: RecordTable) -> None:
        """Append packed records."""
        self._begin(records)
        self.end += len(records)

    def _begin(self, part: Part) -> None:
        self._parts.append(part)
        self._firsts.append(self.end)

    def probe(self, number: int) -> int:
        """Return the probepoint of a record."""
        at = bisect_right(self._firsts, number) - 1
        item = self._parts[at][number - self._firsts[at]]
        assert isinstance(item, tuple), "this item is a record"
        return item[0]

    def drop(self, number: int) -> None:
        """Drop a record."""
        at = bisect_right(self._firsts, number) - 1
        part, first = self._parts[at], self._firsts[at]
        place = number - first
        if isinstance(part, list):
            part[place] = None
            return
        pieces: tuple[tuple[Part, int], ...] = (
            (part[:place], first), ([None], number), (part[place + 1 :], number + 1)
        )  # fmt: skip
        kept = [(piece, start) for piece, start in pieces if piece]
        self._parts[at : at + 1] = [piece for piece, _ in kept]
        self._firsts[at : at + 1] = [start for _, start in kept]

    def take(self, end: int) -> list[Part]:
        """Remove the items before the number ``end``, and return them in parts."""
        taken: list[Part] = []
        while self._parts and self._firsts[0] < end:
            part, count = self._parts[0], end - self._firsts[0]
            if count >= len(part):
                taken.append(self._parts.pop(0))
                self._firsts.pop(0)
                continue
            taken.append(part[:count])
            self._parts[0] = part[count:]
            self._firsts[0] = end
        self.first = end
        return taken


BEYOND = -1
"""Result of ``progress`` if the thread is beyond the instruction, or its position cannot be determined."""

_LONG_ENOUGH = 1_000_000
"""
Nanoseconds of run time within which an instruction is certain to be executed. Out of line it takes ten microseconds,
but in a virtual machine time may pass while the CPU does nothing.
"""


def progress(tid: int, mark: int | None = None) -> int:
    """
    Return ``BEYOND``, or a mark to pass when the same thread is examined again.

    A signal follows a fault at once. But on a busy machine the thread may be preempted for long between the handler and
    the instruction. The first call must come later than the handler. Thread ids are those of the initial PID namespace.
    """
    number = system_call_of(tid)
    if number is not None and number >= 0:
        return BEYOND
    run = _run_time(tid)
    if run is None:
        return BEYOND
    # A thread that sleeps outside of system calls may sleep in the page fault of this instruction.
    if mark is None or number is not None:
        return run
    return BEYOND if run - mark >= _LONG_ENOUGH else mark


def _run_time(tid: int) -> int | None:
    """Return the nanoseconds that a thread has run, up to its last stop or clock tick; None if unknown."""
    # Documentation/scheduler/sched-stats.rst: time on a CPU, time spent waiting for one, number of times it got one.
    try:
        with open(f"/proc/{tid}/schedstat", "rb") as file:
            run, waited, times = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return run if run or waited or times else None


SETTLING = 0.004
"""
Minimum number of seconds for which the last record of a thread is held back. The signal follows as soon as the
instruction can fault. That takes longer only if the thread is preempted there: then the thread must be examined.
"""

HOLDING = 0.5
"""Seconds after which a record is released even if its thread has not moved."""

_BATCH = 1024
"""Maximum number of records in a batch."""
_PACKED_BATCH = 4096
"""Maximum number of packed records in a batch; it is larger as they are rarely read one by one."""

Progress = Callable[[int, int | None], int]
"""
Function that determines whether a thread has moved on. Its arguments are the thread's id and its previous result for
the same hit, or None.

A result below 0 means that the thread is beyond the instruction of its last record.
"""


class _Thread:
    """
    A thread since its last record, which arrived at the time ``stamp``.

    ``mark`` is the last result of ``Progress``, and ``look`` the number of the last drain before that.
    """

    __slots__ = ("look", "mark", "stamp", "tid")

    def __init__(self, tid: int, stamp: float) -> None:
        self.tid = tid
        self.stamp = stamp
        self.mark: int | None = None
        self.look = 0


class HeldRecords:
    """
    Records that were read but not released yet, and ends of probepoints between them.

    ``faulting`` maps the probepoints whose record is dropped when their instruction faults to the file offset of that
    instruction. For those in ``ticketed``, the kernel returns a hit's ticket if its instruction faulted. A thread from
    which nothing has arrived for ``SETTLING`` seconds is examined by ``progress``; without it, that time suffices.
    """

    def __init__(
        self, faulting: Mapping[int, int], ticketed: Collection[int] = (), progress: Progress | None = None
    ) -> None:
        self._faulting: dict[int, int] = {}
        self._shared: set[int] = set()
        self._ticketed = ticketed
        self._progress = progress
        self._items = HeldQueue()
        self._others = 0
        """Number of items that are not records."""
        self._tids: list[int] = []
        """Thread ids of the last items, those that ``_last`` does not contain yet; 0 if the item is certain."""
        self._last: dict[int, int] = {}
        """Number of each thread's uncertain record, the last one if the hit has several."""
        self._earlier: dict[int, int] = {}
        """Number of the previous record of the same hit: several probepoints may be at one instruction."""
        self._threads: dict[int, _Thread] = {}
        self._obstacle: _Thread | None = None
        """Thread of the first item, if that was uncertain at the last call of ``take``."""
        self.faults: Counter[int] = Counter()
        """Number of hits that did not complete the instruction, keyed by probepoint."""
        self.dropped: Counter[int] = Counter()
        """Number of records that were dropped for that reason, including stack traces, keyed by probepoint."""
        self.expect(faulting)

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def uncertain(self) -> Container[int]:
        """Probepoints whose records must be added with their thread."""
        return self._faulting

    def expect(self, faulting: Mapping[int, int]) -> None:
        """Add probepoints whose records are dropped when their instruction faults."""
        self._faulting.update(faulting)
        count = Counter(self._faulting.values())
        self._shared = {probe for probe, offset in self._faulting.items() if count[offset] > 1}

    def add(
        self, records: Sequence[tuple[int, bytes]], tids: Sequence[int], stamp: float, *, is_trace: bool = False
    ) -> None:
        """
        Add records that arrived at the time ``stamp``, each with its thread, or 0 if it is certain.

        With ``is_trace`` they are stack traces, which follow the record of their hit.
        """
        threads = {tid: _Thread(tid, stamp) for tid in set(tids)}
        self._threads |= threads
        if self._obstacle is not None and self._obstacle.tid in threads:
            self._obstacle = None
        if not is_trace and not self._shared:
            self._items.add(records)
            self._tids += tids
            return
        self._find_last()
        first = self._items.end
        self._items.add(records)
        for number, ((probe, _), tid) in enumerate(zip(records, tids, strict=True), first):
            if tid:
                self._join(number, probe, tid, is_trace=is_trace)
                self._last[tid] = number

    def add_packed(self, records: RecordTable, tids: Sequence[int] | int, stamp: float) -> None:
        """Add packed records, no stack traces; ``tids`` is one per record or one for all, and 0 if certain."""
        if self._shared:
            self.add(list(records), [tids] * len(records) if isinstance(tids, int) else tids, stamp)
            return
        self._find_last()
        first = self._items.end
        self._items.add_packed(records)
        end = self._items.end
        last = {tids: end - 1} if isinstance(tids, int) else dict(zip(tids, range(first, end), strict=True))
        last.pop(0, None)
        self._last |= last
        self._threads |= {tid: _Thread(tid, stamp) for tid in last}
        if self._obstacle is not None and self._obstacle.tid in last:
            self._obstacle = None

    def add_end(self, ended: Ended) -> None:
        """Add the end of a probepoint."""
        self._items.add([ended])
        self._tids.append(0)
        self._others += 1

    def _find_last(self) -> None:
        """Update ``_last`` from ``_tids``."""
        self._last.update(zip(self._tids, range(self._items.end - len(self._tids), self._items.end), strict=True))
        self._last.pop(0, None)
        self._tids.clear()

    def _join(self, number: int, probe: int, tid: int, *, is_trace: bool) -> None:
        """Link a record to the last one of its thread if both are of the same hit."""
        last = self._last.get(tid)
        if last is None or self._faulting[self._probe(last)] != self._faulting[probe]:
            return
        if is_trace or not any(each < self._items.first or self._probe(each) == probe for each in self._hit(last)):
            self._earlier[number] = last

    def _hit(self, number: int | None) -> Iterator[int]:
        """Iterate over the records of a hit up to this one, the last first; some may have been released."""
        while number is not None:
            yield number
            number = self._earlier.get(number)

    def _probe(self, number: int) -> int:
        return self._items.probe(number)

    def drop(self, tid: int, ip: int, *, has_tickets: bool) -> None:
        """
        Drop the last records of a thread because of a signal, if the instruction at ``ip`` can be that of their hit.

        ``has_tickets`` is True if the kernel returned tickets of the hit.
        """
        self._find_last()
        last = self._last.pop(tid, None)
        if last is None:
            return
        if self._obstacle is not None and self._obstacle.tid == tid:
            self._obstacle = None
        hit = list(self._hit(last))
        # The file's address in the process is unknown, but the file is mapped in whole pages.
        if (self._faulting[self._probe(last)] - ip) % PAGE_SIZE:
            return
        held = [number for number in hit if number >= self._items.first]
        probes = [self._probe(number) for number in held]
        if not has_tickets and len(held) == len(hit) and all(probe in self._ticketed for probe in probes):
            return
        for number in held:
            self._items.drop(number)
        self._others += len(held)
        self.dropped.update(probes)
        self.faults.update(set(probes))

    def take(self, now: float, parsed: int, drains: int) -> list[RecordBatch | Ended]:
        """
        Remove and return the items before the first record that is still uncertain.

        The ring was read up to its contents at the time ``now``, by the drain number ``parsed``. ``drains`` is the
        number of drains so far, whose signals may still arrive.
        """
        if self._obstacle is not None and not self._has_settled(self._obstacle, now, parsed, drains):
            return []
        self._obstacle = None
        self._find_last()
        end = self._items.end
        for number, tid in sorted((min(self._hit(last)), tid) for tid, last in self._last.items()):
            thread = self._threads[tid]
            if not self._has_settled(thread, now, parsed, drains):
                self._obstacle, end = thread, number
                break
        parts = self._items.take(end)
        if not parts:
            return []
        self._last = {tid: last for tid, last in self._last.items() if last >= end}
        self._earlier = {number: earlier for number, earlier in self._earlier.items() if number >= end}
        self._threads = {tid: self._threads[tid] for tid in self._last}
        return [batch for part in parts for batch in self._batches(part)]

    def _batches(self, items: Part) -> Iterator[RecordBatch | Ended]:
        """Iterate over items, with the records in batches."""
        if isinstance(items, RecordTable):
            for start in range(0, len(items), _PACKED_BATCH):
                yield RecordBatch(items[start : start + _PACKED_BATCH])
            return
        if not self._others:
            yield from _batches_of(items)
            return
        count = len(items)
        left = [item for item in items if item is not None]
        start = 0
        for number, item in enumerate(left):
            if isinstance(item, Ended):
                yield from _batches_of(left[start:number])
                yield item
                start = number + 1
                count += 1
        self._others -= count - len(left)
        yield from _batches_of(left[start:])

    def _has_settled(self, thread: _Thread, now: float, parsed: int, drains: int) -> bool:
        """Return whether the last record of a thread can be released: the thread is beyond the instruction."""
        if thread.stamp + HOLDING <= now:
            return True
        if thread.stamp + SETTLING > now:
            return False
        if self._progress is None:
            return True
        if thread.mark is None or thread.mark >= 0:
            thread.mark = self._progress(thread.tid, thread.mark)
            thread.look = drains
            return False
        # The signal may have entered the ring just before the thread was examined.
        return parsed > thread.look


def _batches_of(items: Sequence[tuple[int, bytes] | Ended | None]) -> Iterator[RecordBatch]:
    records = cast("Sequence[tuple[int, bytes]]", items)
    for start in range(0, len(records), _BATCH):
        yield RecordBatch(records[start : start + _BATCH])
