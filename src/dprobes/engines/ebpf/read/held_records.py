"""
Log on success: records that are held back until their instruction is known to have completed.

A record is uncertain if its instruction may fault. It becomes certain when its thread reaches another hit, or is found
beyond the instruction. A signal for the instruction drops it. Records after an uncertain one are held back, too, so
that records keep the order of the ring.

A million records may arrive in a second, but few signals. So records are packed, or plain pairs in a list, and their
thread ids are in another list. The last record of each thread is searched for only on demand.
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
    """Request of a handler, run by thread ``tid`` of process ``pid``, to remove a probepoint."""

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

    A part of the queue is a list or a record table. Dropping a packed record splits its part. ``first`` is the number
    of the first item, ``end`` the number after the last item.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._firsts: list[int] = []
        """Number of the first item of each part."""
        self.first = self.end = 0

    def __bool__(self) -> bool:
        return self.first < self.end

    def add(self, items: Iterable[HeldItem]) -> None:
        """Append items, records or ends of probepoints, with consecutive numbers."""
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
        """Return the probepoint of the record with a number. The item must be a record."""
        at = bisect_right(self._firsts, number) - 1
        item = self._parts[at][number - self._firsts[at]]
        assert isinstance(item, tuple), "this item is a record"
        return item[0]

    def drop(self, number: int) -> None:
        """Replace the record with the number ``number`` by None, because its instruction has faulted."""
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
"""Result of ``progress`` if the thread is beyond the instruction, or if that cannot be determined."""

_LONG_ENOUGH = 1_000_000
"""
Run time of a thread, in nanoseconds, after which it has certainly executed the instruction.

Executing an instruction out of line takes ten microseconds, but the run time includes times at which a virtual CPU is
stopped.
"""


def progress(tid: int, mark: int | None = None) -> int:
    """
    Return ``BEYOND``, or a mark (run time in nanoseconds) for the next call for the same hit.

    A signal follows a fault at once, but a thread may be preempted between the handler and the instruction. The first
    call has no mark; it must be made after the handler has ended. Thread ids are ids in the initial PID namespace.
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
    """Return the run time of a thread in nanoseconds, up to its last context switch or tick; None if unknown."""
    # Documentation/scheduler/sched-stats.rst: time on a CPU, time spent waiting for one, number of times it got one.
    try:
        with open(f"/proc/{tid}/schedstat", "rb") as file:
            run, waited, times = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return run if run or waited or times else None


SETTLING = 0.004
"""
Minimum number of seconds for which the last record of a thread is held back. The signal of a fault arrives before that,
unless the thread is preempted before the instruction: so the thread must be examined.
"""

HOLDING = 0.5
"""Seconds after which a record is released even if its thread has made no progress."""

_BATCH = 1024
"""Maximum number of records in a batch."""
_PACKED_BATCH = 4096
"""Maximum number of packed records in a batch. It is larger, because packed records are rarely read one by one."""

Progress = Callable[[int, int | None], int]
"""
Function that determines whether a thread is beyond the instruction of its last record, like ``progress``.

Its arguments are the thread's id, and its previous result for the same hit, or None. A result below 0 means that the
thread is beyond the instruction.
"""


class _Thread:
    """
    Thread and its last record, which arrived at the monotonic time ``stamp`` in seconds.

    ``mark`` is the last result of ``Progress``, and ``look`` the number of drains before that.
    """

    __slots__ = ("look", "mark", "stamp", "tid")

    def __init__(self, tid: int, stamp: float) -> None:
        self.tid = tid
        self.stamp = stamp
        self.mark: int | None = None
        self.look = 0


class HeldRecords:
    """
    Queue of records that are held back, and of the ends of probepoints between them.

    ``faulting`` has the probepoints whose record is dropped if the instruction faults, with the instruction's file
    offset. For probepoints in ``ticketed``, the kernel returns a hit's ticket after a fault. ``progress`` is called for
    a thread that has no new records for ``SETTLING`` seconds. If it is None, the thread's records are released after
    that time.
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
        """Number of items that are not records: ends and dropped records."""
        self._tids: list[int] = []
        """Thread ids of the last items, which are not in ``_last`` yet, or 0 for a certain item."""
        self._last: dict[int, int] = {}
        """Number of the last uncertain record of each thread."""
        self._earlier: dict[int, int] = {}
        """Number of the previous record of the same hit, by the number of a record: a hit may have several."""
        self._threads: dict[int, _Thread] = {}
        self._obstacle: _Thread | None = None
        """Thread of the uncertain record at which the last call of ``take`` stopped, or None."""
        self.faults: Counter[int] = Counter()
        """Number of hits that did not complete the instruction, keyed by probepoint."""
        self.dropped: Counter[int] = Counter()
        """Number of records that were dropped after faults, including stack traces, keyed by probepoint."""
        self.expect(faulting)

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def uncertain(self) -> Container[int]:
        """Probepoints whose records are uncertain. Their records must be added with their thread."""
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
        Add records that arrived at the time ``stamp``, as pairs of a probepoint's number and bytes.

        ``tids`` has the thread of each record, or 0 if no fault can make it invalid. With ``is_trace``, the records are
        stack traces, which follow the record of their hit.
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
        """
        Add packed records that arrived at the time ``stamp``. None may be a stack trace.

        ``tids`` is a thread id for each record, or one for all. It is 0 if no fault can make the record invalid.
        """
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
        """Add the end of a probepoint, to be released after the records that precede it."""
        self._items.add([ended])
        self._tids.append(0)
        self._others += 1

    def _find_last(self) -> None:
        """Update ``_last``, the last record of each thread, by ``_tids``, the threads of the newest records."""
        self._last.update(zip(self._tids, range(self._items.end - len(self._tids), self._items.end), strict=True))
        self._last.pop(0, None)
        self._tids.clear()

    def _join(self, number: int, probe: int, tid: int, *, is_trace: bool) -> None:
        """
        Link a record to the thread's previous record if both belong to one hit, so that a fault drops both.

        ``probe`` is the probepoint and ``tid`` the thread. With ``is_trace``, the record is a stack trace.
        """
        last = self._last.get(tid)
        if last is None or self._faulting[self._probe(last)] != self._faulting[probe]:
            return
        if is_trace or not any(each < self._items.first or self._probe(each) == probe for each in self._hit(last)):
            self._earlier[number] = last

    def _hit(self, number: int | None) -> Iterator[int]:
        """Iterate over the numbers of a hit's records down from ``number``. Some records may have been released."""
        while number is not None:
            yield number
            number = self._earlier.get(number)

    def _probe(self, number: int) -> int:
        return self._items.probe(number)

    def drop(self, tid: int, ip: int, *, has_tickets: bool) -> None:
        """
        Drop the last records of a thread after a signal, if they can belong to the instruction at ``ip``.

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

        All contents of the ring at the monotonic time ``now`` were added, up to the drain with the number ``parsed``.
        ``drains`` is the number of drains so far: later ones may contain signals.
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
        """Iterate over the records of ``items`` in batches, and over the ends of probepoints between them."""
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
        """Return True if the last record of a thread can be released. The arguments are those of ``take``."""
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
