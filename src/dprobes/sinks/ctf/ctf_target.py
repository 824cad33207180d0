"""
CTF traces as a log target.

The directory of the log target contains one trace for each time that the target was opened. A step of the wall clock
begins another trace, because the clock of a trace has one offset. Readers open the directory, and merge all its traces.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dprobes.errors import FormatError, SinkError, reason_of
from dprobes.escapes import escaped
from dprobes.formatters.address_fields import function_of
from dprobes.formatters.address_names import AddressSymboliser
from dprobes.formatters.templates.data_extraction import Field, FieldKind
from dprobes.formatters.templates.template_collection import ProgramTemplates
from dprobes.keyed.table_text import shown_rows
from dprobes.record.log_record import LogRecord, decode_record
from dprobes.record.record_origin import wall_offset
from dprobes.sinks.ctf.ctf_metadata import HeaderItems
from dprobes.sinks.ctf.ctf_trace import Trace
from dprobes.sinks.structured_records import ArgumentReader, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.keyed.table_layout import Names, TableContents
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.sinks import Batch, Sink, SinkOptions
    from dprobes.sinks.ctf.ctf_metadata import EventClass
    from dprobes.sinks.ctf.ctf_trace import Events
    from dprobes.sinks.structured_records import ArgumentValue

__all__ = ["CtfSink", "table_events"]

# Rows of keyed tables as events. An event has the parts of the key, ``key0``, as strings, and the numbers of the value:
# ``value``, or ``count``, ``sum``, ``min``, ``max``. A stored string or call stack is a string, ``value``. A histogram
# has ``bucket_lows`` and ``bucket_counts`` of its nonempty buckets. Values that can be computed from these are omitted,
# so that all numbers are integers.

_NO_RECORD = LogRecord()
_LEAST = -(1 << 63)
_NOTHING = "?"
"""Substitute for an empty string: readers show an earlier string instead."""


def table_events(trace: Trace, contents: Sequence[TableContents], names: Names, time: int) -> Events:
    """
    Return an event for each row of keyed tables, and add new event classes to ``trace``.

    ``time`` is the time of all events: CLOCK_MONOTONIC in nanoseconds. ``names`` has the names of addresses in keys.
    """
    header = HeaderItems(_NO_RECORD)
    events: Events = []
    for each in contents:
        for row in shown_rows(each, names):
            fields = [*_of_key(row.keys), *_of_value(row.value)]
            shape = Shape(tuple(field for field, _ in fields))
            event_class = trace.add_class(f"table:{each.table.name}", header, shape, has_cpu=False)
            events.append((time, event_class.encode(time, _NO_RECORD, [value for _, value in fields])))
    return events


def _of_key(keys: Sequence[str]) -> Iterator[tuple[Field, ArgumentValue]]:
    for number, key in enumerate(keys):
        yield Field(f"key{number}", FieldKind.STRING, 0, 10, is_array=False), escaped(key) or _NOTHING


def _of_value(value: dict[str, Any]) -> Iterator[tuple[Field, ArgumentValue]]:
    for name, number in value.items():
        if isinstance(number, int):
            yield _number(name), number
        elif name == "value":
            kept = "; ".join(number) if isinstance(number, list) else str(number)
            yield Field(name, FieldKind.STRING, 0, 10, is_array=False), escaped(kept) or _NOTHING
    if (buckets := value.get("buckets")) is not None:
        yield _number("bucket_lows", is_array=True), tuple(_LEAST if low is None else low for low, _, _ in buckets)
        yield _number("bucket_counts", is_array=True), tuple(count for _, _, count in buckets)


def _number(name: str, *, is_array: bool = False) -> Field:
    return Field(name, FieldKind.SIGNED, 8, 10, is_array=is_array)


_DIRECTORY = "ctf"
"""The default name of the directory of traces."""

_UNKNOWN = "?"
"""The function of a hit in unknown code; readers show an earlier string for an empty one."""


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001 - the name that all sinks have
    """Return the sink for the directory ``argument``, by default ``ctf``; raise ``SinkError`` if it cannot be used."""
    directory = Path(argument) if argument else (options.directory or Path.cwd()) / _DIRECTORY
    return CtfSink(directory)


@dataclass(slots=True)
class _Program:
    source: RecordSource
    templates: ProgramTemplates
    symboliser: AddressSymboliser


@dataclass(frozen=True, slots=True)
class _Kind:
    """The common properties of records of one place that have the same codes and items."""

    name: str
    header: HeaderItems
    reader: ArgumentReader
    classes: dict[Shape, EventClass]


class CtfSink:
    """A sink that writes records to the trace of the current wall-clock offset, created with the first record."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._trace: Trace | None = None
        self._programs: dict[int, _Program] = {}
        self._places: dict[Place, int] = {}
        self._kinds: dict[tuple[int, int, bytes, int | None, int | None], _Kind] = {}
        """Record kinds by program, place, flag word, and major and minor code."""
        self._lost = 0
        """Number of records that were lost before the next packet."""
        try:
            directory.mkdir(exist_ok=True)
            if (directory / "metadata").exists():
                hint = "name the directory that is to hold traces"
                raise SinkError(f"'{directory}' is a trace itself, which cannot be continued", hint=hint)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError(0, "permission denied")
        except OSError as error:
            raise self._error(error) from error

    def create_event(self, source: RecordSource) -> None:
        """Register a program; its current templates apply to records from now on."""
        known = self._programs.get(source.number)
        if known is None or (known.source.templates, known.source.derived) != (source.templates, source.derived):
            self._forget_kinds(source.number)
            symboliser = AddressSymboliser(source, live=True)
            known = self._programs[source.number] = _Program(source, ProgramTemplates.of_source(source), symboliser)
        known.source = source
        known.symboliser.know(source)
        if self._trace is not None:
            self._trace.describe(source)

    def log_events(self, batch: Batch) -> None:
        """Write the records of a batch, all of them or none."""
        lost = self._lost + batch.lost
        if batch.records:
            try:
                self._write(batch, lost)
            except OSError as error:
                if self._trace is not None:
                    self._trace.remove_if_empty()
                raise self._error(error) from error
            lost = 0
        self._lost = lost

    def log_tables(self, source: RecordSource, contents: Sequence[TableContents]) -> None:
        """Write an event for each row of a program's keyed tables, with the current time."""
        from dprobes.formatters.table_addresses import names_for

        names = names_for(source, [each.table for each in contents])
        try:
            trace = self._trace or self._new_trace(wall_offset())
            if events := table_events(trace, contents, names, time.monotonic_ns()):
                trace.write({None: events}, self._lost)
                self._lost = 0
        except OSError as error:
            if self._trace is not None:
                self._trace.remove_if_empty()
            raise self._error(error) from error

    def destroy_event(self, source: RecordSource) -> None:
        """Drop the state of a program after its last record; its description remains in the trace."""
        self._programs.pop(source.number, None)
        self._forget_kinds(source.number)

    def flush(self) -> None:
        """Do nothing: written packets are visible at once."""

    def close(self) -> None:
        """Do nothing: a trace is complete at any time."""

    def _write(self, batch: Batch, lost: int) -> None:
        trace = self._trace
        if trace is None or trace.wall_offset != batch.wall_offset:
            trace = self._new_trace(batch.wall_offset)
        number, kinds = batch.source.number, self._kinds
        symboliser = self._programs[number].symboliser
        places: dict[int, int] = {}  # by identity: a batch repeats few places many times
        events: dict[int | None, Events] = {}
        for encoded, place in zip(batch.records, batch.places, strict=True):
            try:
                record = decode_record(encoded)
            except FormatError:
                record = LogRecord(data=encoded)
            where = places.get(id(place))
            if where is None:
                where = places[id(place)] = self._places.setdefault(place, len(self._places))
            key = (number, where, encoded[:4], record.major, record.minor)
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = self._new_kind(batch.source, place, record)
            shape, values = kind.reader.read(record, place)
            event_class = kind.classes.get(shape)
            if event_class is None:
                has_cpu = record.cpu is not None
                event_class = kind.classes[shape] = trace.add_class(kind.name, kind.header, shape, has_cpu=has_cpu)
            when = time.monotonic_ns() if record.time is None else record.time
            function = function_of(record, place, symboliser) or _UNKNOWN if kind.header.has_function else ""
            event = (when, event_class.encode(when, record, values, function))
            try:
                events[record.cpu].append(event)
            except KeyError:
                events[record.cpu] = [event]
        trace.write(events, lost)

    def _new_trace(self, offset: int) -> Trace:
        self._kinds.clear()
        trace = self._trace = Trace(self._directory, offset)
        for program in self._programs.values():
            trace.describe(program.source)
        return trace

    def _new_kind(self, source: RecordSource, place: Place, record: LogRecord) -> _Kind:
        program = self._programs[source.number]
        template = program.templates.find(record.major or 0, record.minor or 0)
        header = HeaderItems(record, has_function=not place.routine and record.ip is not None)
        return _Kind(_name_of(place), header, ArgumentReader(template, record.word_size, program.symboliser), {})

    def _forget_kinds(self, number: int) -> None:
        self._kinds = {key: kind for key, kind in self._kinds.items() if key[0] != number}

    def _error(self, error: OSError) -> SinkError:
        return SinkError(f"'{self._directory}' cannot be written: {reason_of(error)}")


def _name_of(place: Place) -> str:
    """Return the name of the CTF events for the records of a probepoint."""
    module = place.module.rpartition("/")[2]
    return f"{module}:{place.symbol}:return" if place.at_return else f"{module}:{place.symbol}"
