"""
From a trace file to tables: the records of a program with one major and minor code become the rows of one.

Rows are given away in pieces of a bounded size, so that a file of any length can be taken through. Knows no Parquet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dprobes.errors import FormatError
from dprobes.formatters.templates.data_columns import fixed_layout
from dprobes.formatters.templates.data_extraction import Fault, FieldKind, decode_fields
from dprobes.formatters.templates.template_collection import ProgramTemplates
from dprobes.record.log_items import UNSEEN
from dprobes.record.log_record import Item, LogRecord, decode_record
from dprobes.record.record_table import PackedRows
from dprobes.tables.arrow_columns import NameColumns, clean, packed_table, place_columns, plain_rows, plain_table
from dprobes.tables.table_schema import HEADER_COLUMNS, Partition, field_columns, field_type, table_schema
from dprobes.trace.packed_blocks import TableBlock
from dprobes.trace.trace_content import LostRecords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa

    from dprobes.formatters.templates.data_extraction import Decoded, Field
    from dprobes.formatters.templates.template_model import Template
    from dprobes.trace.packed_blocks import Block
    from dprobes.trace.record_columns import RaggedRows
    from dprobes.trace.trace_content import TraceProgram

__all__ = ["Piece", "pieces_of"]

_ROWS = 1 << 17
"""Rows that are held at most, of all tables together."""

_BYTES = 64 << 20
"""Bytes of data that are held at most."""

_FEW = 16
"""Fewer records of a kind are not worth a table of their own."""

_TIME_MAX = (1 << 63) - 1
_UNICODE_MAX = 0x10FFFF
_UNSIGNED_MAX = (1 << 64) - 1
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
        if isinstance(each, TableBlock) and len(each.records.parts) == 1 and each.records:
            count += len(each.records)
            size += each.records.row_bytes
            known.add_packed(each.records.parts[0], each.wall_offset, lost_before)
            if count >= _ROWS or size >= _BYTES:
                count = size = 0
                for program in programs.values():
                    yield from program.take()
            continue
        block = each.in_a_row() if isinstance(each, TableBlock) else each
        if (rows := plain_rows(block)) is not None:
            for part in rows:
                known.add_plain(part, lost_before)
                lost_before = 0
                count += len(part)
            size += len(block.body)
        else:
            for record in block:
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


_Key = tuple[int | None, int | None]
"""A major and a minor code."""


def _codes_of(records: PackedRows) -> list[_Key]:
    """Return the codes of each record."""
    majors, minors = (
        column if isinstance(column, list) else [column] * len(records)
        for column in (records.item(Item.MAJOR), records.item(Item.MINOR))
    )
    return list(zip(majors, minors, strict=True))


def _by_codes(records: PackedRows, lost: dict[int, int]) -> Iterator[tuple[_Key, PackedRows, dict[int, int]]]:
    """Iterate over the records with each major and minor code, with how many were lost before which of them."""
    majors, minors = records.item(Item.MAJOR), records.item(Item.MINOR)
    if not isinstance(majors, list) and not isinstance(minors, list):
        yield (majors, minors), records, lost
        return
    codes = _codes_of(records)
    for key in dict.fromkeys(codes):
        mine = {codes[:row].count(key): number for row, number in lost.items() if codes[row] == key}
        yield key, records.chosen([each == key for each in codes]), mine


class _Program:
    """Collect the records of a program, as a trace file has described it until now."""

    def __init__(self, program: TraceProgram, before: _Program | None) -> None:
        self.name = clean([program.name])[0] or ""
        self.source = program.source
        self._program = program
        self._names = NameColumns(program)
        self._templates = ProgramTemplates.of_source(program.source)
        self._before = before  # described otherwise, and with rows of its own
        self._rows: dict[_Key, _Rows] = {}
        self._waiting: list[PackedRows] = []
        self._waiting_offset = 0
        self._waiting_lost: dict[int, int] = {}
        self._tables: dict[_Key, list[pa.Table]] = {}
        """What comes before the rows of the same table."""

    def add(self, record: LogRecord, probe: int, wall_offset: int, lost: int) -> None:
        """Add a record."""
        self._convert()
        self._add(record, probe, wall_offset, lost)

    def _add(self, record: LogRecord, probe: int, wall_offset: int, lost: int) -> None:
        key = record.major, record.minor
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = _Rows()
        if lost:
            rows.lost[len(rows.records)] = min(lost, _UNSIGNED_MAX)
        rows.records.append(record)
        rows.probes.append(probe)
        rows.offsets.append(wall_offset)

    def add_packed(self, records: PackedRows, wall_offset: int, lost: int) -> None:
        """Add records, which are there; those of many blocks in a row are converted together."""
        waiting = self._waiting
        if waiting and (wall_offset != self._waiting_offset or not waiting[0].goes_with(records)):
            self._convert()
        if lost:
            self._waiting_lost[sum(map(len, self._waiting))] = min(lost, _UNSIGNED_MAX)
        self._waiting.append(records)
        self._waiting_offset = wall_offset

    def add_plain(self, rows: RaggedRows, lost: int) -> None:
        """Add records, column by column as far as that is possible."""
        self._convert()
        count = len(rows)
        majors, minors = rows.item(Item.MAJOR), rows.item(Item.MINOR)
        codes = [column if isinstance(column, list) else [column] * count for column in (majors, minors)]
        by_key: dict[_Key, list[int]] = {}
        for row, key in enumerate(zip(*codes, strict=True)):
            by_key.setdefault(key, []).append(row)
        for key, wanted in by_key.items():
            template = self._template(key)
            lost_before = {0: min(lost, _UNSIGNED_MAX)} if lost and wanted[0] == 0 else {}
            table = None
            if len(wanted) >= _FEW:
                table = plain_table(rows, wanted, self._program, self._names, template, lost_before)
            if table is not None:
                self._add_table(key, table)
                continue
            for row in wanted:
                probe, record = rows.pair(row)
                before = lost if row == 0 else 0
                self._add(_decoded(record), probe, rows.block.wall_offset, before)

    def _add_table(self, key: _Key, table: pa.Table) -> None:
        tables = self._tables.setdefault(key, [])
        if (rows := self._rows.pop(key, None)) is not None:
            tables.append(self._table(rows, self._template(key)))
        tables.append(table)

    def _convert(self) -> None:
        """Convert the packed records that wait, column by column as far as that is possible."""
        if not self._waiting:
            return
        records, wall_offset, lost = PackedRows.joined(self._waiting), self._waiting_offset, self._waiting_lost
        self._waiting, self._waiting_lost = [], {}
        for key, part, lost_before in _by_codes(records, lost):
            table = packed_table(part, self._program, self._names, self._template(key), wall_offset, lost_before)
            if table is None:
                for row, (probe, record) in enumerate(part):
                    self._add(_decoded(record), probe, wall_offset, lost_before.get(row, 0))
                continue
            self._add_table(key, table)

    def _template(self, key: _Key) -> Template | None:
        major, minor = key
        return self._templates.find(major or 0, minor or 0)

    def take(self) -> Iterator[Piece]:
        import pyarrow as pa

        if self._before is not None:
            before, self._before = self._before, None
            yield from before.take()
        self._convert()
        taken, self._rows = self._rows, {}
        tables, self._tables = self._tables, {}
        for key in dict.fromkeys((*tables, *taken)):
            template = self._template(key)
            parts = tables.get(key, [])
            if key in taken:
                parts.append(self._table(taken[key], template))
            rows = parts[0] if len(parts) == 1 else pa.concat_tables(parts)
            yield Piece(Partition(self.name, *key), rows, "" if template is None else template.desc)

    def _table(self, rows: _Rows, template: Template | None) -> pa.Table:
        import pyarrow as pa

        schema = table_schema(template)
        columns = self._header(rows)
        if template is None:
            columns["items"] = pa.array([_items(record) for record in rows.records], schema.field("items").type)
        else:
            columns |= _fields(template, rows, self._names)
        return pa.table([columns[name] for name in schema.names], schema=schema)

    def _header(self, rows: _Rows) -> dict[str, pa.Array]:
        import pyarrow as pa

        by_field: dict[str, Sequence[Any]] = dict(zip(LogRecord._fields, zip(*rows.records, strict=True), strict=True))
        by_field["process_name"] = clean(by_field["process_name"])
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
        columns |= place_columns(self._program, self.source.module, rows.probes)
        return columns | self._names.functions(rows.records, rows.probes) | {"lost_before": lost}


def _items(record: LogRecord) -> list[dict[str, str]] | None:
    """Return the items of data that describes itself."""
    return [{"type": item.kind, "text": item.text} for item in record.items()] or None


def _fields(template: Template, rows: _Rows, names: NameColumns) -> dict[str, pa.Array]:
    """Return the columns of a template: its fields and their names, what is wrong, and what is left of the data."""
    import pyarrow as pa

    records = rows.records
    columns = field_columns(template)
    values, problems, rests = _fast(template, records) or _slow(template, records)
    found = {
        name: pa.array(_shown(described, column), field_type(described))
        for (name, described), column in zip(columns, values, strict=True)
    }  # fmt: skip
    found |= names.of_values(template, records, rows.probes, values)
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
    if len(shapes) != 1 or any(r.is_cut for r in records):
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
        faulty = _problems(names, decoded, is_cut=record.is_cut)
        rows.append(tuple(None if isinstance(v, Fault) else v for v in decoded.values) if faulty else decoded.values)
        problems.append(faulty)
        rests.append(decoded.rest or None)
    return list(zip(*rows, strict=True)) or [], problems, rests


def _problems(names: Sequence[str], decoded: Decoded, *, is_cut: bool) -> list[dict[str, Any]] | None:
    found: list[dict[str, Any]] = []
    for name, value in zip(names, decoded.values, strict=True):
        if value is None:
            found.append({"field": name, "problem": "cut" if is_cut else "missing", "address": None})
        elif isinstance(value, Fault):
            kind = "selector fault" if value.is_selector else UNSEEN if value.is_unseen else "fault"
            address = None if value.is_unseen else value.address
            found.append({"field": name, "problem": kind, "address": address})
    if is_cut and None not in decoded.values:
        found.append({"field": None, "problem": "cut", "address": None})
    return found or None
