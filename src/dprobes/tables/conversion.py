"""
From a trace file to tables: the records of a program with one major and minor code become the rows of one.

Rows are given away in pieces of a bounded size, so that a file of any length can be taken through. Knows no Parquet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from dprobes.errors import FormatError
from dprobes.escapes import escaped
from dprobes.formatters.templates.fields import Fault, FieldKind, decode_fields
from dprobes.formatters.templates.program import ProgramTemplates
from dprobes.lazydataclass import dataclass
from dprobes.record.codec import decode_record
from dprobes.record.items import split_items
from dprobes.record.layout import LogRecord
from dprobes.sinks.fixedlayout import fixed_layout
from dprobes.tables.schema import HEADER_COLUMNS, Partition, field_columns, field_type, table_schema
from dprobes.trace.content import LostRecords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa

    from dprobes.formatters.templates import Template
    from dprobes.formatters.templates.fields import Decoded, Field
    from dprobes.trace.content import TraceProgram
    from dprobes.trace.packedblock import Block

__all__ = ["Piece", "pieces_of"]

_ROWS = 1 << 17
"""Rows that are held at most, of all tables together."""

_BYTES = 64 << 20
"""Bytes of data that are held at most."""

_TIME_MAX = (1 << 63) - 1
_UNICODE_MAX = 0x10FFFF
_UNSIGNED_MAX = (1 << 64) - 1
_PLACE_COLUMNS = ("module", "symbol", "function", "placed", "at_return")
_RECORD_COLUMNS = {name: "time" if name == "monotonic" else name for name in HEADER_COLUMNS} | {
    "stack_trace": "is_stack_trace"
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Hold rows of a table; ``desc`` is what its template says it is about."""

    partition: Partition
    rows: pa.Table
    desc: str


def pieces_of(
    found: Iterable[Block | LostRecords], on_lost: Callable[[str, int], None] | None = None
) -> Iterator[Piece]:
    """
    Iterate over the tables of what is read from a trace file, piece by piece; raise ``FormatError`` at damage.

    Records that were lost are counted by the next one of their program. ``on_lost`` is told of a program, and how many
    of its records were lost after the last one.
    """
    programs: dict[int, _Program] = {}
    lost: dict[str, int] = {}
    count = size = 0
    for each in found:
        known = programs.get(id(each.program))
        if known is None or known.source is not each.program.source:
            known = programs[id(each.program)] = _Program(each.program, known)
        if isinstance(each, LostRecords):
            lost[known.name] = lost.get(known.name, 0) + each.count
            continue
        lost_before = lost.pop(known.name, 0)
        for record in each:
            known.add(_decoded(record.record), record.probe, each.wall_offset, lost_before)
            lost_before = 0
            count += 1
            size += len(record.record)
            if count >= _ROWS or size >= _BYTES:
                count = size = 0
                for program in programs.values():
                    yield from program.take()
        if lost_before:
            lost[known.name] = lost_before
    for program in programs.values():
        yield from program.take()
    if on_lost is not None:
        for name, number in lost.items():
            on_lost(name, number)


def _decoded(record: bytes) -> LogRecord:
    """Return a record; of bytes that are none, one that has them as data and nothing else."""
    try:
        return decode_record(record)
    except FormatError:
        return LogRecord(data=record)


@dataclass(slots=True)
class _Rows:
    """Hold records of one table as they were read; ``lost`` maps rows to how many were lost before them."""

    records: list[LogRecord] = field(default_factory=list)
    probes: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)


class _Program:
    """Collect the records of a program, as a trace file has described it until now."""

    def __init__(self, program: TraceProgram, before: _Program | None) -> None:
        self.name = _clean([program.name])[0] or ""
        self.source = program.source
        self._program = program
        self._templates = ProgramTemplates.of_source(program.source)
        self._before = before  # described otherwise, and with rows of its own
        self._rows: dict[tuple[int | None, int | None], _Rows] = {}

    def add(self, record: LogRecord, probe: int, wall_offset: int, lost: int) -> None:
        key = record.major, record.minor
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = _Rows()
        if lost:
            rows.lost[len(rows.records)] = min(lost, _UNSIGNED_MAX)
        rows.records.append(record)
        rows.probes.append(probe)
        rows.offsets.append(wall_offset)

    def take(self) -> Iterator[Piece]:
        if self._before is not None:
            before, self._before = self._before, None
            yield from before.take()
        taken, self._rows = self._rows, {}
        for (major, minor), rows in taken.items():
            template = self._templates.find(major or 0, minor or 0)
            desc = "" if template is None else template.desc
            yield Piece(Partition(self.name, major, minor), self._table(rows, template), desc)

    def _table(self, rows: _Rows, template: Template | None) -> pa.Table:
        import pyarrow as pa

        schema = table_schema(template)
        columns = self._header(rows)
        if template is None:
            columns["items"] = pa.array([_items(record) for record in rows.records], schema.field("items").type)
        else:
            columns |= _fields(template, rows.records)
        return pa.table([columns[name] for name in schema.names], schema=schema)

    def _header(self, rows: _Rows) -> dict[str, pa.Array]:
        import pyarrow as pa

        by_field: dict[str, Sequence[Any]] = dict(zip(LogRecord._fields, zip(*rows.records, strict=True), strict=True))
        by_field["process_name"] = _clean(by_field["process_name"])
        columns = {}
        for name, kind in HEADER_COLUMNS.items():
            if (values := by_field.get(_RECORD_COLUMNS[name])) is not None and name != "time":
                columns[name] = pa.array(values, pa.type_for_alias(kind))
        times = [
            None if time is None or not -_TIME_MAX <= time + offset <= _TIME_MAX else time + offset
            for time, offset in zip(by_field["time"], rows.offsets, strict=True)
        ]
        columns["time"] = pa.array(times, pa.timestamp("ns"))
        lost = pa.nulls(len(times), pa.uint64())
        if rows.lost:
            lost = pa.array([rows.lost.get(row) for row in range(len(times))], pa.uint64())
        return columns | self._places(rows.probes) | {"lost_before": lost}

    def _places(self, probes: Sequence[int]) -> dict[str, pa.Array]:
        """Return the columns that say where the probepoints are; each place is looked up once."""
        import pyarrow as pa

        numbers = {probe: number for number, probe in enumerate(dict.fromkeys(probes))}
        places = [self._program.place(probe) for probe in numbers]
        indices = pa.array([numbers[probe] for probe in probes], pa.int32())
        values: list[list[Any]] = [
            _clean([self.source.module] * len(places)),
            _clean([place.where or None for place in places]),
            _clean([place.routine or None for place in places]),
            [None if place.placed is None else _unsigned(place.placed) for place in places],
            [place.at_return for place in places],
        ]
        columns = {}
        for name, shown in zip(_PLACE_COLUMNS, values, strict=True):
            columns[name] = pa.array(shown, pa.type_for_alias(HEADER_COLUMNS[name])).take(indices)
        return columns


def _unsigned(number: int) -> int | None:
    """Return a number of a file, which may say anything, if a column can hold it."""
    return number if 0 <= number <= _UNSIGNED_MAX else None


def _clean(strings: Iterable[str | None]) -> list[str | None]:
    """Return names as all formats have them: with escapes for what cannot be printed."""
    strings = list(strings)
    clean = {text: text if text is None else escaped(text) for text in set(strings)}
    return [clean[text] for text in strings]


def _items(record: LogRecord) -> list[dict[str, str]] | None:
    """Return the items of data that describes itself."""
    if record.is_stack_trace:
        return None
    found = split_items(record.data, record.word_size, record.byte_order)
    return None if found is None else [{"type": item.kind, "text": item.text} for item in found]


def _fields(template: Template, records: Sequence[LogRecord]) -> dict[str, pa.Array]:
    """Return the columns of a template: its fields, what is wrong with them, and what is left of the data."""
    import pyarrow as pa

    columns = field_columns(template)
    values, problems, rests = _fast(template, records) or _slow(template, records)
    found = {
        name: pa.array(_shown(described, column), field_type(described))
        for (name, described), column in zip(columns, values, strict=True)
    }  # fmt: skip
    schema = table_schema(template)
    for name, column in (("problems", problems), ("rest", rests)):
        found[name] = pa.nulls(len(records), schema.field(name).type)
        if any(column):
            found[name] = pa.array(column, schema.field(name).type)
    return found


def _shown(described: Field, column: Sequence[Any]) -> Sequence[Any]:
    """Return the values of a column; characters are text."""
    if described.kind is not FieldKind.CHARACTER:
        return column
    return [None if v is None else _characters(v if isinstance(v, tuple) else (v,)) for v in column]


def _characters(codes: tuple[int, ...]) -> str:
    text = "".join(chr(code) if code <= _UNICODE_MAX else f"<no character: {code:#x}>" for code in codes)
    return text.encode("utf-8", "backslashreplace").decode()


_Columns = tuple[list[Sequence[Any]], list[Any], list[bytes | None]]
"""The values of fields, what is wrong with them, and what is left of the data; for each record."""


def _fast(template: Template, records: Sequence[LogRecord]) -> _Columns | None:
    """Return the columns if the template is one structure, and all records are of its size."""
    shapes = Counter((r.word_size, r.byte_order, r.is_stack_trace, len(r.data)) for r in records)
    if len(shapes) != 1:
        return None
    ((word_size, byte_order, is_stack_trace, size),) = shapes
    layout = fixed_layout(template, word_size, byte_order)
    if layout is None or is_stack_trace or layout.size != size or not size:
        return None
    values: list[Sequence[Any]] = list(zip(*layout.iter_unpack(b"".join(r.data for r in records)), strict=True))
    return values, [], []


def _slow(template: Template, records: Sequence[LogRecord]) -> _Columns:
    names = [name for name, _ in field_columns(template)]
    rows: list[tuple[Any, ...]] = []
    problems: list[Any] = []
    rests: list[bytes | None] = []
    for record in records:
        if record.is_stack_trace:
            rows.append((None,) * len(names))
            problems.append(None)
            rests.append(None)
            continue
        decoded = decode_fields(template, record)
        faulty = _problems(names, decoded)
        rows.append(tuple(None if isinstance(v, Fault) else v for v in decoded.values) if faulty else decoded.values)
        problems.append(faulty)
        rests.append(decoded.rest or None)
    return list(zip(*rows, strict=True)) or [], problems, rests


def _problems(names: Sequence[str], decoded: Decoded) -> list[dict[str, Any]] | None:
    found: list[dict[str, Any]] = []
    for name, value in zip(names, decoded.values, strict=True):
        if value is None:
            found.append({"field": name, "problem": "missing", "address": None})
        elif isinstance(value, Fault):
            kind = "selector fault" if value.is_selector else "fault"
            found.append({"field": name, "problem": kind, "address": value.address})
    return found or None
