"""
Perfetto traces as a log target.

Each thread has a track. A call is a slice on it where the program probes the function's entry and its return; all else
is an instant. What the record says is in debug annotations. A row of a keyed table is a counter below the track of the
program, several where its value has several numbers.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from dprobes.errors import FormatError, SinkError
from dprobes.formatters.addressfields import function_of
from dprobes.formatters.addressnames import AddressSymboliser
from dprobes.formatters.templates.program import ProgramTemplates
from dprobes.lazydataclass import dataclass
from dprobes.record.clock import wall_offset
from dprobes.record.codec import decode_record
from dprobes.record.layout import LogRecord
from dprobes.sinks.perfetto import messages
from dprobes.sinks.perfetto.annotations import annotations_of, header_of
from dprobes.sinks.perfetto.calls import CallStack
from dprobes.sinks.perfetto.messages import EventType, Packets
from dprobes.sinks.perfetto.packetfile import PerfettoFile
from dprobes.sinks.perfetto.tracks import Tracks
from dprobes.sinks.typedvalues import ArgumentReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.keyed.contents import TableContents
    from dprobes.keyed.rows import ShownRow
    from dprobes.record.origin import RecordSource
    from dprobes.record.probeinfo import Place
    from dprobes.sinks.interface import Batch, Sink, SinkOptions

__all__ = ["PerfettoSink", "open"]

_THREADS_MAX = 1 << 16
"""Threads of a program whose calls are followed at the same time."""


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001, ARG001 - the name and arguments of all sinks
    """Open the file that is named."""
    if not argument:
        raise SinkError("log target 'perfetto' needs a path: perfetto:FILE")
    return PerfettoSink(argument)


_COUNTERS_MAX = 1000
"""Rows of a table that have counters: those with the greatest values. Viewers show a track for each."""


def _numbers_of(row: ShownRow) -> Iterator[tuple[str, float]]:
    """Iterate over the numbers of a value; the only one has no name."""
    for name, value in (row.value | row.value.get("estimates", {})).items():
        if isinstance(value, int | float):
            yield "" if name == "value" else name, value


@dataclass(slots=True)
class _Program:
    source: RecordSource
    templates: ProgramTemplates
    symboliser: AddressSymboliser
    readers: dict[tuple[int, int, int], ArgumentReader]
    """By major code, minor code and word size."""
    calls: dict[tuple[int, int], CallStack]
    """By process and thread."""


class PerfettoSink:
    """Append records to a file as events."""

    def __init__(self, path: str) -> None:
        self._file = PerfettoFile(path)
        self._packets = Packets(secrets.randbits(31) | 1)
        self._tracks = Tracks(self._packets)
        self._programs: dict[int, _Program] = {}
        self._wall_offset: int | None = None
        self._lost = 0

    def create_event(self, source: RecordSource) -> None:
        """Know a program; what its templates say of records holds from now on."""
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
        """Append what keyed tables hold now as values of counters."""
        from dprobes.formatters.tablenames import names_for
        from dprobes.keyed.rows import shown_rows

        names = names_for(source, [each.table for each in contents])
        now = time.monotonic_ns()
        out: list[bytes] = []
        if self._wall_offset is None:
            out.append(self._clocks(wall_offset()))
        for each in contents:
            for row in shown_rows(each, names, _COUNTERS_MAX):
                for name, value in _numbers_of(row):
                    track = self._tracks.of_counter(out, source, f"{row.title} {name}".rstrip())
                    out.append(self._packets.event(now, messages.counter(track, value)))
        self._file.append(b"".join(out))

    def destroy_event(self, source: RecordSource) -> None:
        """Forget a program, and say what was lost of its end; calls that have not returned have no end."""
        program = self._programs.pop(source.number, None)
        if program is not None and self._lost:
            out: list[bytes] = []
            self._say_lost(out, program, LogRecord(time=time.monotonic_ns()))
            self._file.append(b"".join(out))

    def flush(self) -> None:
        """Do nothing: what is written is visible."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _clocks(self, wall_offset: int) -> bytes:
        is_first, self._wall_offset = self._wall_offset is None, wall_offset
        now, boottime = time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return self._packets.clocks(now, max(now + wall_offset, 0), boottime, is_first=is_first)

    def _say_lost(self, out: list[bytes], program: _Program, record: LogRecord) -> None:
        assert record.time is not None
        count, self._lost = self._lost, 0
        track = self._tracks.of_program(out, program.source)
        said = [messages.unsigned("count", count)]
        event = messages.event(EventType.INSTANT, track, "dprobes", f"{count} records lost", said)
        out.append(self._packets.loss(record.time, event))

    def _add(self, out: list[bytes], program: _Program, place: Place, record: LogRecord) -> None:
        """Add the packets of a record."""
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
                unseen = messages.event(EventType.SLICE_END, track, "", "")
                out += [self._packets.event(record.time, unseen)] * (ended - place.at_return)
        if place.at_return:
            if kind is EventType.SLICE_END:
                annotations = [messages.dictionary("return", annotations)]
            else:
                name = f"{name} (return)"
        out.append(self._packets.event(record.time, messages.event(kind, track, category, name, annotations)))

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
