"""
Perfetto traces as a log target.

Each thread has a track. A call is a slice on it if the program probes the function's entry and its return. Other
records are instants. The record's contents are debug annotations. A row of a keyed table is a counter below the track
of the program. It is several counters if its value consists of several numbers.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import time
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import FormatError, SinkError, reason_of
from dprobes.escapes import escaped
from dprobes.formatters.address_fields import function_of
from dprobes.formatters.address_names import AddressSymboliser
from dprobes.formatters.templates.data_extraction import FieldKind
from dprobes.formatters.templates.template_collection import ProgramTemplates
from dprobes.record.log_record import LogRecord, decode_record
from dprobes.record.record_origin import boot_uuid, wall_offset
from dprobes.sinks.perfetto import perfetto_messages
from dprobes.sinks.perfetto.perfetto_messages import (
    EventType,
    Packets,
    counter_track,
    named_track,
    process_track,
    thread_track,
    trace_uuid,
)
from dprobes.sinks.structured_records import ArgumentReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.formatters.templates.data_extraction import Field
    from dprobes.keyed.table_layout import TableContents
    from dprobes.keyed.table_text import ShownRow
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.sinks import Batch, Sink, SinkOptions
    from dprobes.sinks.structured_records import ArgumentValue, Shape

__all__ = ["PerfettoSink"]

# The contents of a record as debug annotations: its data by their names, and the items of its header together.

_UNICODE_MAX = 0x10FFFF

_HEADER = (
    ("major", perfetto_messages.unsigned),
    ("minor", perfetto_messages.unsigned),
    ("cpu", perfetto_messages.unsigned),
    ("uid", perfetto_messages.unsigned),
    ("cs", perfetto_messages.pointer),
    ("ip", perfetto_messages.pointer),
    ("ss", perfetto_messages.pointer),
    ("sp", perfetto_messages.pointer),
)
"""The items of the header that are not part of the event's time and track."""


def header_of(record: LogRecord, function: str = "") -> bytes:
    """Return the items of a record's header under one name, with ``function`` if it is not empty."""
    entries = [_entry(index, value) for index, value in enumerate(_items(record)) if value is not None]
    if function:
        entries.append(perfetto_messages.entry(perfetto_messages.string("function", escaped(function))))
    return perfetto_messages.dictionary_of("record", entries)


_items = attrgetter(*(name for name, _ in _HEADER))


@lru_cache(maxsize=1 << 14)
def _entry(index: int, value: int) -> bytes:
    """Return the annotation of a header item, cached: most items have few values."""
    name, make = _HEADER[index]
    return perfetto_messages.entry(make(name, value))


def annotations_of(shape: Shape, values: Sequence[ArgumentValue]) -> list[bytes]:
    """Return one annotation for each value in the data of a record."""
    return [_annotation(field, value) for field, value in zip(shape.fields, values, strict=True)]


def _annotation(field: Field, value: ArgumentValue) -> bytes:
    match value:
        case int():
            return _number(field.name, field.kind, value)
        case str():
            return perfetto_messages.string(field.name, value)
        case bytes():
            return perfetto_messages.string(field.name, value.hex(" "))
    if field.kind is FieldKind.CHARACTER:
        return perfetto_messages.string(
            field.name, "".join(_character(code) for code in value if isinstance(code, int))
        )
    values = [perfetto_messages.string("", e) if isinstance(e, str) else _number("", field.kind, e) for e in value]
    return perfetto_messages.array(field.name, values)


def _number(name: str, kind: FieldKind, value: int) -> bytes:
    match kind:
        case FieldKind.SIGNED:
            return perfetto_messages.integer(name, value)
        case FieldKind.ADDRESS:
            return perfetto_messages.pointer(name, value)
        case FieldKind.CHARACTER:
            return perfetto_messages.string(name, _character(value))
    return perfetto_messages.unsigned(name, value)


def _character(code: int) -> str:
    return chr(code) if code <= _UNICODE_MAX else f"<{code:#x}>"


# The match of returns with calls: the open calls of a thread, if a program probes both entries and returns. A stack
# grows down. So a call has ended if its return address is below the current stack pointer: its return was missed
# because a record was lost, or because ``longjmp`` skipped it. If its return address is at the stack pointer when a
# function is entered, that may be a tail call, and both return together.

_SAME_STACK = 8 << 20
"""Stack pointers that differ by this number of bytes are on different stacks, as with coroutines, and not compared."""


class _Call(NamedTuple):
    module: str
    symbol: str
    sp: int | None


class CallStack:
    """The calls of one thread that have not returned yet."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._returned: int | None = None
        """The stack pointer after the last return, if no function was entered since."""

    def enter(self, place: Place, record: LogRecord) -> int:
        """
        Add the call at whose entry ``record`` was logged.

        Return the number of earlier calls that, by their stack pointers, have ended without a record of their return.
        """
        ended = 0
        while self._calls and any(_is_above(sp, self._calls[-1].sp) for sp in (record.sp, self._returned)):
            self._calls.pop()
            ended += 1
        self._returned = None
        self._calls.append(_Call(place.module, place.symbol, record.sp))
        return ended

    def leave(self, place: Place, record: LogRecord) -> int | None:
        """
        Remove the call at whose return ``record`` was logged, and all calls that it has made.

        Return the number of removed calls, or None if the entry of the call was not seen.
        """
        self._returned = record.sp
        index = self._index_of(place, record)
        if index is None:
            return None
        ended = len(self._calls) - index
        del self._calls[index:]
        return ended

    def _index_of(self, place: Place, record: LogRecord) -> int | None:
        """
        Return the index of the call that returns, or None if there is none.

        It is the call at the record's stack pointer, or else the last call of the function.
        """
        found = None
        for index in range(len(self._calls) - 1, -1, -1):
            module, symbol, sp = self._calls[index]
            if symbol == place.symbol and module == place.module:
                if sp is None or record.sp is None or sp + record.word_size == record.sp:
                    return index
                found = index if found is None else found
        return found


def _is_above(sp: int | None, other: int | None) -> bool:
    return sp is not None and other is not None and 0 < sp - other < _SAME_STACK


# The tracks of a trace: one for each thread, below that of its process, and one for each program, above its counters. A
# track's descriptor is written before its first event, and again when its process or thread was renamed.

_KNOWN_MAX = 1 << 16
"""Maximum number of tracks whose descriptors are remembered. Beyond it, they are written again."""

_MASK = (1 << 64) - 1


class Tracks:
    """An allocator of Perfetto tracks, which also encodes their descriptors."""

    def __init__(self, packets: Packets) -> None:
        self._packets = packets
        # Track numbers must be unique among all writers of a trace.
        self._first = secrets.randbits(64)
        self._described: dict[int, str | None] = {}

    def of_record(self, out: list[bytes], source: RecordSource, record: LogRecord) -> int:
        """Return the UUID of the track of a record's thread, process or program; append new descriptors to ``out``."""
        pid, tid, name = record.pid, record.tid, record.process_name
        if pid is None:
            return self.of_program(out, source)
        process = (self._first + (pid << 32)) & _MASK
        if process not in self._described or (pid == tid and self._is_new(process, name)):
            self._describe(out, process, name, process_track(process, pid, name))
        if tid is None:
            return process
        thread = (process + 1 + tid) & _MASK
        if self._is_new(thread, name):
            self._describe(out, thread, name, thread_track(thread, process, pid, tid, name))
        return thread

    def of_program(self, out: list[bytes], source: RecordSource) -> int:
        """Return the UUID of a program's track, for records without a pid; a new descriptor is appended to ``out``."""
        track = (self._first - 1 - source.number) & _MASK
        if self._is_new(track, source.name):
            self._describe(out, track, source.name, named_track(track, f"dprobes: {source.name}"))
        return track

    def of_counter(self, out: list[bytes], source: RecordSource, name: str) -> int:
        """
        Return the UUID of the track for a number in a program's keyed tables; ``name`` is its name.

        New descriptors are appended to ``out``.
        """
        parent = self.of_program(out, source)
        # Derived from a hash: the same in all traces of a writer, and, with high probability at 64 bits, no thread's
        # track.
        digest = blake2b(f"{source.number} {name}".encode("utf-8", "backslashreplace"), digest_size=8).digest()
        track = (self._first ^ int.from_bytes(digest, "little")) & _MASK
        if self._is_new(track, name):
            self._describe(out, track, name, counter_track(track, parent, name))
        return track

    def _is_new(self, track: int, name: str | None) -> bool:
        return self._described.get(track, ...) != name

    def _describe(self, out: list[bytes], track: int, name: str | None, descriptor: bytes) -> None:
        if len(self._described) >= _KNOWN_MAX:
            self._described.clear()
        self._described[track] = name
        out.append(self._packets.track(descriptor))


# A trace file, to which packets are appended. It begins with a packet with the boot id, since CLOCK_MONOTONIC starts
# anew at each boot. The incomplete last packet of a killed writer is truncated when the file is opened again.

_PACKET = 0x0A
"""The key of a packet: field 1, wire type 2 (with a length)."""

_LENGTH_MAX = 5
"""Maximum size of an encoded length in bytes: lengths have 32 bits."""


class PerfettoFile:
    """Locked file to which packets are appended. Methods raise ``SinkError``."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise SinkError(f"'{path}' cannot be written: {reason_of(error)}") from error
        try:
            self._size = self._begin()
        except BaseException:
            os.close(self._file)
            raise

    def append(self, packets: bytes) -> None:
        """Append encoded TracePackets, all of them or none; raise ``SinkError`` if that fails."""
        written = 0
        try:
            while written < len(packets):
                written += os.pwrite(self._file, memoryview(packets)[written:], self._size + written)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise self._error(error) from error
        self._size += written

    def close(self) -> None:
        """Close the trace file."""
        try:
            os.close(self._file)
        except OSError as error:
            raise self._error(error) from error

    def _begin(self) -> int:
        """
        Lock the file, and return the offset at which writing continues.

        An empty file gets its first packet. An incomplete packet at the end is removed. Raise ``SinkError`` if the file
        is not a trace, or is a trace of another boot.
        """
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise SinkError(f"'{self._path}' is not a regular file, as a Perfetto trace must be")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SinkError(f"'{self._path}' is being written by another process") from None
            start, size = trace_uuid(boot_uuid()), os.fstat(self._file).st_size
            if size < len(start) and os.pread(self._file, size, 0) == start[:size]:
                self._size = 0
                os.ftruncate(self._file, 0)
                self.append(start)
                return len(start)
            if os.pread(self._file, len(start), 0) != start:
                hint = "a trace cannot be continued after a restart of the machine, nor one of another program"
                raise SinkError(f"'{self._path}' exists already, and is not a trace that can be continued", hint=hint)
            with mmap.mmap(self._file, size, access=mmap.ACCESS_READ) as data:
                end = _end_of_packets(data, len(start))
            if end < size:
                os.ftruncate(self._file, end)
        except OSError as error:
            raise self._error(error) from error
        return end

    def _error(self, error: OSError) -> SinkError:
        return SinkError(f"'{self._path}' cannot be written: {reason_of(error)}")


def _end_of_packets(data: mmap.mmap, position: int) -> int:
    """Return the offset after the last complete packet; ``position`` is the offset of the first one."""
    size = len(data)
    while position + 1 < size and data[position] == _PACKET:
        length = 0
        for index in range(_LENGTH_MAX):
            at = position + 1 + index
            if at >= size:
                return position
            length |= (data[at] & 0x7F) << 7 * index
            if data[at] < 0x80:
                break
        else:
            return position
        end = at + 1 + length
        if end > size:
            return position
        position = end
    return position


_THREADS_MAX = 1 << 16
"""Maximum number of threads of a program whose calls are tracked at the same time."""


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001, ARG001 - the name and arguments of all sinks
    """Open the file in the argument; raise ``SinkError`` if that fails."""
    if not argument:
        raise SinkError("log target 'perfetto' needs a path: perfetto:FILE")
    return PerfettoSink(argument)


_COUNTERS_MAX = 1000
"""Maximum number of rows of a table with counters, those with the greatest values: viewers show a track for each."""


def _numbers_of(row: ShownRow) -> Iterator[tuple[str, float]]:
    """Iterate over the names and numbers in the value of a row; a single number has an empty name."""
    for name, value in (row.value | row.value.get("estimates", {})).items():
        if isinstance(value, int | float):
            yield "" if name == "value" else name, value


@dataclass(slots=True)
class _Program:
    source: RecordSource
    templates: ProgramTemplates
    symboliser: AddressSymboliser
    readers: dict[tuple[int, int, int], ArgumentReader]
    """Argument readers by major code, minor code and word size."""
    calls: dict[tuple[int, int], CallStack]
    """Call stacks by process and thread."""


class PerfettoSink:
    """A sink that appends records to a Perfetto trace as slices and instant events."""

    def __init__(self, path: str) -> None:
        self._file = PerfettoFile(path)
        self._packets = Packets(secrets.randbits(31) | 1)
        self._tracks = Tracks(self._packets)
        self._programs: dict[int, _Program] = {}
        self._wall_offset: int | None = None
        self._lost = 0

    def create_event(self, source: RecordSource) -> None:
        """Register a program; its current templates apply to records from now on."""
        known = self._programs.get(source.number)
        if known is None:
            templates, symboliser = ProgramTemplates.of_source(source), AddressSymboliser(source, live=True)
            self._programs[source.number] = _Program(source, templates, symboliser, {}, {})
        elif (known.source.templates, known.source.derived) != (source.templates, source.derived):
            known.templates, known.readers = ProgramTemplates.of_source(source), {}
            known.source = source
        self._programs[source.number].symboliser.know(source)

    def log_events(self, batch: Batch) -> None:
        """Append the records of a batch, all of them or none."""
        self._lost += batch.lost
        if not batch.records:
            return
        program = self._programs[batch.source.number]
        out: list[bytes] = []
        if batch.wall_offset != self._wall_offset:
            out.append(self._clocks(batch.wall_offset))
        for encoded, place in zip(batch.records, batch.places, strict=True):
            try:
                record = decode_record(encoded)
            except FormatError:
                record = LogRecord(data=encoded)
            if record.time is None:
                record = record._replace(time=time.monotonic_ns())
            if self._lost:
                self._say_lost(out, program, record)
            self._add(out, program, place, record)
        self._file.append(b"".join(out))

    def log_tables(self, source: RecordSource, contents: Sequence[TableContents]) -> None:
        """Append the current contents of keyed tables as counter values."""
        from dprobes.formatters.table_addresses import names_for
        from dprobes.keyed.table_text import shown_rows

        names = names_for(source, [each.table for each in contents])
        now = time.monotonic_ns()
        out: list[bytes] = []
        if self._wall_offset is None:
            out.append(self._clocks(wall_offset()))
        for each in contents:
            for row in shown_rows(each, names, _COUNTERS_MAX):
                for name, value in _numbers_of(row):
                    track = self._tracks.of_counter(out, source, f"{row.title} {name}".rstrip())
                    out.append(self._packets.event(now, perfetto_messages.counter(track, value)))
        self._file.append(b"".join(out))

    def destroy_event(self, source: RecordSource) -> None:
        """
        Drop the state of a program, and write the number of records lost at its end.

        Calls that have not returned remain slices without an end.
        """
        program = self._programs.pop(source.number, None)
        if program is not None and self._lost:
            out: list[bytes] = []
            self._say_lost(out, program, LogRecord(time=time.monotonic_ns()))
            self._file.append(b"".join(out))

    def flush(self) -> None:
        """Do nothing: written packets are visible at once."""

    def close(self) -> None:
        """Close the trace file."""
        self._file.close()

    def _clocks(self, wall_offset: int) -> bytes:
        is_first, self._wall_offset = self._wall_offset is None, wall_offset
        now, boottime = time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return self._packets.clocks(now, max(now + wall_offset, 0), boottime, is_first=is_first)

    def _say_lost(self, out: list[bytes], program: _Program, record: LogRecord) -> None:
        assert record.time is not None
        count, self._lost = self._lost, 0
        track = self._tracks.of_program(out, program.source)
        said = [perfetto_messages.unsigned("count", count)]
        event = perfetto_messages.event(EventType.INSTANT, track, "dprobes", f"{count} records lost", said)
        out.append(self._packets.loss(record.time, event))

    def _add(self, out: list[bytes], program: _Program, place: Place, record: LogRecord) -> None:
        """Append the encoded packets of a record to ``out``: new track descriptors, and its event or slice."""
        assert record.time is not None
        track = self._tracks.of_record(out, program.source, record)
        shape, values = self._reader(program, record).read(record, place)
        function = "" if place.routine else function_of(record, place, program.symboliser)
        annotations = [*annotations_of(shape, values), header_of(record, function)]
        name, category = place.function or place.symbol, place.module.rpartition("/")[2]
        kind = EventType.INSTANT
        if record.is_stack_trace:
            name = f"{name}: stack trace"
        elif place.is_paired and record.pid is not None and record.tid is not None:
            calls = self._calls(program, record.pid, record.tid)
            ended = calls.leave(place, record) if place.at_return else calls.enter(place, record)
            if ended is not None:
                kind = EventType.SLICE_END if place.at_return else EventType.SLICE_BEGIN
                unseen = perfetto_messages.event(EventType.SLICE_END, track, "", "")
                out += [self._packets.event(record.time, unseen)] * (ended - place.at_return)
        if place.at_return:
            if kind is EventType.SLICE_END:
                annotations = [perfetto_messages.dictionary("return", annotations)]
            else:
                name = f"{name} (return)"
        out.append(self._packets.event(record.time, perfetto_messages.event(kind, track, category, name, annotations)))

    @staticmethod
    def _reader(program: _Program, record: LogRecord) -> ArgumentReader:
        key = (record.major or 0, record.minor or 0, record.word_size)
        reader = program.readers.get(key)
        if reader is None:
            template = program.templates.find(key[0], key[1])
            reader = program.readers[key] = ArgumentReader(template, record.word_size, program.symboliser)
        return reader

    @staticmethod
    def _calls(program: _Program, pid: int, tid: int) -> CallStack:
        calls = program.calls.get((pid, tid))
        if calls is None:
            if len(program.calls) >= _THREADS_MAX:
                del program.calls[next(iter(program.calls))]
            calls = program.calls[pid, tid] = CallStack()
        return calls
