"""
Decoder of a ring's entries: records, ends of probepoints, and signals. Process names are cut at the NUL.

A piece of the ring is copied unchanged, with headers and discarded entries (``bpf_objects``). Long runs of records of
one size are packed without a loop over the records.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections import deque
from typing import IO, TYPE_CHECKING, NamedTuple

from dprobes.bpf.map_layouts import ENTRY_HEAD, KIND_SHIFT, NAME_SIZE, PROBE_MAX, TICKETS_SHIFT, Entry
from dprobes.engines.ebpf.kernel.bpf_objects import wait
from dprobes.engines.ebpf.read.held_records import SETTLING, Ended
from dprobes.engines.ring_spans import HEADER_SIZE, entries_in, sizes_in, spans_in
from dprobes.record.log_record import Item, header_struct
from dprobes.record.record_rows import numbers_in, repeated
from dprobes.record.record_table import RecordTable, in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dprobes.engines.ebpf.kernel.bpf_objects import RingBuffer
    from dprobes.engines.ebpf.read.held_records import HeldRecords
    from dprobes.engines.ebpf.read.user_stacks import UserStacks
    from dprobes.engines.engine_interface import RecordBatch
    from dprobes.engines.ring_spans import Span
    from dprobes.record.record_rows import PackedRows

__all__ = ["Overflow", "RecordStream", "Spool"]

_HEAD_SIZE = ENTRY_HEAD.size
_TRACE = int(Entry.TRACE)  # enum members are slow to look up
_OF_TABLES = (int(Entry.TALLY), int(Entry.UNTALLY))
_NAME_FLAG_BYTE, _NAME_FLAG = 1, Item.PROCESS_NAME >> 8
_TID_AT, _TID_SIZE = HEADER_SIZE + 4, 4
_MIXED_MIN = 4096
"""Minimum number of bytes of entries of various sizes for which packing is tried."""
_ENDED = struct.Struct("=II")
_SIGNAL = struct.Struct("=QII")


class EntryReader:
    """
    Decoder of pieces of the ring, which adds their contents to ``held``. ``stacks`` unwinds call stacks.

    ``bank_size``, a power of two, is the distance between the two entries of a probepoint in the probe table. A ring
    entry has the index of one of these.
    """

    def __init__(self, held: HeldRecords, bank_size: int, stacks: UserStacks | None = None) -> None:
        self._held = held
        self._stacks = stacks
        self._probe_mask = bank_size - 1
        self._name_places: dict[int, int] = {}

    def read(self, data: bytes, stamp: float) -> None:
        """Decode ``data``, whole entries of the BPF ring buffer, which were there at the monotonic time ``stamp``."""
        for span in spans_in(data):
            is_read = self._read_packed(data, span, stamp) if span.stride else self._read_mixed(data, span, stamp)
            if not is_read:
                self._read_each(data, span, stamp)

    def _read_packed(self, data: bytes, span: Span, stamp: float) -> bool:
        """
        Decode entries of the same length as packed records.

        They must all be records of probepoints, and none a stack trace; otherwise decode none and return False.
        ``span`` is their place in ``data``, ``stamp`` as in ``read``.
        """
        if self._stacks is not None:
            return False
        table = data[span.start : span.stop]
        if (found := self._packed(table, span.stride)) is None:
            return False
        records, tids = found
        self._held.add_packed(RecordTable.of_rows(records), tids, stamp)
        return True

    def _packed(self, table: bytes, stride: int) -> tuple[PackedRows, list[int] | int] | None:
        """
        Return entries of ``stride`` bytes as packed records, and their threads as ``_tids`` does.

        None: the entries in ``table`` are not all of the same kind.
        """
        from dprobes.engines.packed_entries import packed_entries  # not at a start, before there are records

        count = len(table) // stride
        records = packed_entries(table, stride)
        if records is None:
            return None
        probes = records.probes()
        if (probes if isinstance(probes, int) else max(probes)) > self._probe_mask:
            records = records.renumbered(lambda probe: probe & self._probe_mask)
            probes = records.probes()
        return records, self._tids(table, stride, count, probes)

    def _read_mixed(self, data: bytes, span: Span, stamp: float) -> bool:
        """
        Decode entries of a few lengths as packed records.

        The entries of each length must be records of one kind; otherwise decode none and return False. ``span`` is
        their place in ``data``, ``stamp`` as in ``read``.
        """
        if self._stacks is not None or span.stop - span.start < _MIXED_MIN:
            return False
        found = sizes_in(data, span.start, span.stop)
        if found is None:
            return False
        groups, order = found
        parts, threads = [], []
        for stride, places in groups:
            one = self._packed(b"".join([data[at : at + stride] for at in places]), stride)
            if one is None:
                return False
            parts.append(one[0])
            threads.append(one[1])
        tids = threads[0]
        if len(parts) > 1:
            spread = [repeated(tid, len(part)) for part, tid in zip(parts, threads, strict=True)]
            tids = list(in_order(order, spread)) if any(threads) else 0
        self._held.add_packed(RecordTable(parts, order), tids, stamp)
        return True

    def _tids(self, table: bytes, stride: int, count: int, probes: list[int] | int) -> list[int] | int:
        """
        Return the thread id of each record that a fault of its instruction makes invalid, and 0 for other records.

        ``table`` has ``count`` entries of ``stride`` bytes. ``probes`` has the probepoint of each record, or is one for
        all. The result is a single number if all thread ids would be equal.
        """
        uncertain = self._held.uncertain
        if isinstance(probes, int):
            if probes not in uncertain:
                return 0
        elif not any(probe in uncertain for probe in set(probes)):
            return 0
        planes = [table[at::stride] for at in range(_TID_AT, _TID_AT + _TID_SIZE)]
        if isinstance(probes, int) and all(plane == plane[:1] * count for plane in planes):
            return int.from_bytes(table[_TID_AT : _TID_AT + _TID_SIZE], sys.byteorder)
        values = bytearray(_TID_SIZE * count)
        for place, plane in enumerate(planes):
            values[place::_TID_SIZE] = plane
        tids = numbers_in(values, _TID_SIZE)
        if isinstance(probes, int):
            return tids
        return [tid if probe in uncertain else 0 for probe, tid in zip(probes, tids, strict=True)]

    def _read_each(self, data: bytes, span: Span, stamp: float) -> None:
        held, unpack, uncertain, probe_mask = self._held, ENTRY_HEAD.unpack_from, self._held.uncertain, self._probe_mask
        stacks = self._stacks
        records: list[tuple[int, bytes]] = []
        tids: list[int] = []
        for position, stop in entries_in(data, span.start, span.stop):
            first, tid = unpack(data, position)
            start = position + _HEAD_SIZE
            kind = first >> KIND_SHIFT
            if kind <= _TRACE:
                probe = first & probe_mask
                is_named = data[start + _NAME_FLAG_BYTE] & _NAME_FLAG
                record = self._canonical(data, start, stop) if is_named else data[start:stop]
                if stacks:
                    record = stacks.completed(record)
                if probe not in uncertain:
                    tid = 0
                elif kind == _TRACE:
                    held.add(records, tids, stamp)
                    records, tids = [], []
                    held.add([(probe, record)], [tid], stamp, is_trace=True)
                    continue
                records.append((probe, record))
                tids.append(tid)
                continue
            if kind in _OF_TABLES:
                if stacks is not None:
                    stacks.change(data, start, stop, is_removal=kind == Entry.UNTALLY)
                continue
            if kind == Entry.SNAPSHOT:
                if stacks is not None:
                    stacks.take(data, start, stop)
                continue
            held.add(records, tids, stamp)
            records, tids = [], []
            if kind == Entry.SIGNAL:
                ip, signal, _ = _SIGNAL.unpack_from(data, start)
                held.drop(tid, ip, has_tickets=signal >> TICKETS_SHIFT > 0)
            elif kind == Entry.ENDED:
                reason, pid = _ENDED.unpack_from(data, start)
                held.add_end(Ended(first & probe_mask, reason, pid, tid))
        held.add(records, tids, stamp)

    def _canonical(self, data: bytes, start: int, stop: int) -> bytes:
        """Return a record with the process name cut after its NUL. In the ring, the name is padded with zeros."""
        flags = int.from_bytes(data[start : start + 4], "little")
        place = self._name_places.get(flags)
        if place is None:
            place = self._name_places[flags] = header_struct(flags, "little").size
        name = start + place
        return data[start : data.index(0, name) + 1] + data[name + NAME_SIZE : stop]


class Overflow:
    """
    FIFO of up to ``limit`` bytes of undecoded data in a temporary file (TMPDIR).

    The data is copied once, from the ring's memory to the file. It does not increase the memory of this process.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._file: IO[bytes] | None = None
        self._start = self._end = 0

    def write(self, data: memoryview | bytes) -> bool:
        """Append data. Return False, and append nothing, if there is no room."""
        if self._end + len(data) > self._limit:
            return False
        try:
            if self._file is None:
                import tempfile

                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by close
            view, written = memoryview(data), 0
            while written < len(data):
                written += os.pwrite(self._file.fileno(), view[written:], self._end + written)
        except OSError:
            return False
        self._end += len(data)
        return True

    def read(self, size: int) -> bytes:
        """Remove and return the first ``size`` bytes, which must have been written."""
        assert self._file is not None, "nothing has been written"
        data = os.pread(self._file.fileno(), size, self._start)
        self._start += size
        if self._start == self._end:
            self._start = self._end = 0
            os.ftruncate(self._file.fileno(), 0)
        return data

    def close(self) -> None:
        """Close the file that takes the entries for which memory had no room."""
        if self._file is not None:
            self._file.close()
            self._file = None


_MEMORY = 8 << 20
_OVERFLOW = 1 << 30
"""Maximum number of bytes of undecoded data in the temporary file, in addition to those in memory."""


class _Piece(NamedTuple):
    """
    Piece of the ring, in memory or in the overflow file.

    ``data`` is empty for a piece in the file, which has ``size`` bytes. ``stamp`` is the monotonic time in seconds, and
    ``drain`` the number of the drain, at which the piece was copied from the ring.
    """

    data: bytes
    size: int
    stamp: float
    drain: int


class Spool:
    """
    Buffer of data from the ring: undecoded pieces in memory or in a file, then records in ``held``.

    A piece is copied once, so the ring is emptied a hundred times faster than records are formatted. Pieces beyond
    ``_MEMORY`` bytes are written to the file. When the file is full, they are kept in memory, up to ``limit`` bytes.
    ``bank_size`` and ``stacks`` are those of an ``EntryReader``.
    """

    def __init__(
        self, held: HeldRecords, limit: int, bank_size: int = PROBE_MAX, stacks: UserStacks | None = None
    ) -> None:
        self._held = held
        self._reader = EntryReader(held, bank_size, stacks)
        self._limit = limit
        self._pieces: deque[_Piece] = deque()
        self._overflow = Overflow(_OVERFLOW)
        self._size = 0
        self._drains = 0
        self._drained = float("-inf")

    @property
    def is_full(self) -> bool:
        """True if ``limit`` bytes are in memory: the caller must add no more data."""
        return self._size >= self._limit

    @property
    def is_empty(self) -> bool:
        """True if no data and no records are left, held-back ones included."""
        return not self._pieces and not self._held

    @property
    def is_holding(self) -> bool:
        """True if only held-back records are left, which time alone will release."""
        return bool(self._held) and not self._pieces

    def add(self, data: memoryview | bytes, now: float, *, is_all: bool = True) -> None:
        """
        Add a copy of ``data``, the contents of the ring at the monotonic time ``now``. It may be empty.

        If ``is_all`` is False, the ring may have contained more.
        """
        self._drained = now
        self._drains += is_all
        size = len(data)
        if not size:
            return
        is_kept = self._size + size <= _MEMORY or not self._overflow.write(data)
        kept = bytes(data) if is_kept else b""
        self._pieces.append(_Piece(kept, size, now, self._drains))
        self._size += len(kept)

    def take(self) -> Iterator[RecordBatch | Ended | None]:
        """
        Decode the pieces, and iterate over the items that are not held back.

        Yield None after a piece whose items are all held back, so that the caller can do other work.
        """
        while self._pieces:
            piece = self._pieces.popleft()
            self._size -= len(piece.data)
            self._reader.read(piece.data or self._overflow.read(piece.size), piece.stamp)
            # Data that was added meanwhile may contain signals: times and drains after the piece's do not count.
            certain = self._held.take(piece.stamp, piece.drain, self._drains)
            yield from certain or (None,)
        yield from self._held.take(self._drained, self._drains, self._drains)

    def close(self) -> None:
        """Discard the data that has not been taken."""
        self._overflow.close()


# If the ring is full, a record is lost and counted. So emptying the ring has priority over releasing records. While
# records arrive, the ring is polled every few milliseconds. A handler wakes this process only if no record has arrived
# for a while, because a wake-up takes ten times as long as writing a record.


_SPOOL_SIZE = 64 << 20
"""Maximum number of bytes of undecoded data in memory."""

_PIECE = 1 << 20
"""Approximate number of bytes taken from the ring at once. Decoding them takes a few milliseconds."""

_TURN = 0.1
"""Maximum number of seconds for which one turn releases records, before other work is done."""

_BUSY_TIME = 0.05
"""Seconds after the last record during which the ring is polled."""

_BUSY_SLEEP = 0.005
"""Seconds between two polls of the ring: the records of this time fit into the ring."""


class RecordStream:
    """
    Stream of a run's records, read from its ring in turns.

    ``status`` has the 64-bit words of STATUS, one of which shows that the reader sleeps.
    """

    def __init__(
        self,
        ring: RingBuffer,
        status: memoryview,
        held: HeldRecords,
        bank_size: int,
        stacks: UserStacks | None = None,
    ) -> None:
        self._ring = ring
        self._status = status
        self._spool = Spool(held, _SPOOL_SIZE, bank_size, stacks)
        self._taking: Iterator[RecordBatch | Ended | None] | None = None
        self._last_record = float("-inf")
        self._room = min(_PIECE // 4, ring.size // 16)
        """Number of bytes in the ring at which it is emptied while records are released."""

    @property
    def is_quiet(self) -> bool:
        """True if no data is left in the ring and no record is to be released."""
        return self._spool.is_empty and not self._ring.pending

    def _take(self) -> bool:
        """Move the contents of the ring to the spool; return True if there were any."""
        ring, spool = self._ring, self._spool
        for number in range(max(1, ring.size // _PIECE)):
            if spool.is_full:
                return True
            with ring.window(_PIECE) as window:
                size = len(window)
                is_all = size < _PIECE
                spool.add(window, time.monotonic(), is_all=is_all)
            ring.advance(size)
            if is_all:
                return bool(number or size)
        return True

    def turn(self, is_stopping: Callable[[], bool]) -> Iterator[RecordBatch | Ended]:
        """
        Iterate over arrived items, for a limited time or until ``is_stopping`` returns true.

        Empty the ring meanwhile.
        """
        if self._take():
            self._last_record = time.monotonic()
        until = time.monotonic() + _TURN
        if self._taking is None:
            self._taking = self._spool.take()
        for each in self._taking:
            if isinstance(each, Ended):
                yield each
                continue
            if each is not None:
                yield each
            if self._ring.pending >= self._room:
                self._take()
            if time.monotonic() > until or is_stopping():
                return  # the rest follows in the next turn, even if nothing was yielded: changes of tables never are
        self._taking = None

    def pause(self) -> bool:
        """
        Sleep briefly and return True if records have arrived recently.

        Else return False: the caller uses ``wait``.
        """
        if self._taking is None:
            if self._spool.is_holding:
                time.sleep(SETTLING)
            elif time.monotonic() - self._last_record < _BUSY_TIME:
                time.sleep(_BUSY_SLEEP)
            else:
                return False
        return True

    def wait(self, timeout: float, others: Iterable[int]) -> None:
        """Sleep until a record arrives or a descriptor of ``others`` is readable, for up to ``timeout`` seconds."""
        if wait(self._ring, self._status, timeout, others):
            self._last_record = time.monotonic()

    def rest(self) -> Iterator[RecordBatch | Ended | None]:
        """
        Iterate over all remaining items. Call this when no handler can run any more.

        Yield None after a piece whose items are all held back, so that the caller can do other work.
        """
        yield from self._taking or ()
        while self._take() and self._ring.pending:
            yield from self._spool.take()
        while True:
            yield from self._spool.take()
            if not self._spool.is_holding:
                return
            time.sleep(SETTLING)
            self._take()

    def close(self) -> None:
        """Discard the records that have not been released."""
        self._spool.close()
