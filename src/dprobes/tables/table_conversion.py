"""
Conversion of a trace file to tables. A table contains the records of a program with one major and minor code.

Rows are yielded in pieces of bounded size, so that files of any length can be converted. This module is independent of
Parquet.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from dprobes.errors import FormatError
from dprobes.formatters.templates.template_collection import ProgramTemplates
from dprobes.record.log_record import Item, decode_record
from dprobes.record.record_table import RecordTable
from dprobes.tables.arrow_columns import NameColumns, clean, rows_table, sparse
from dprobes.tables.table_schema import Partition
from dprobes.trace.packed_blocks import TableBlock
from dprobes.trace.record_columns import RaggedRows, ragged_rows_of
from dprobes.trace.trace_content import LostRecords, RecordBlock
from dprobes.trace.trace_frames import RECORD_HEAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from dprobes.formatters.templates.template_model import Template
    from dprobes.record.record_rows import Rows
    from dprobes.trace.packed_blocks import Block
    from dprobes.trace.trace_content import TraceProgram

__all__ = ["Piece", "pieces_of"]

_ROWS = 1 << 17
"""Maximum number of buffered rows, of all tables together."""

_BYTES = 64 << 20
"""Maximum number of buffered bytes of data."""

_UNSIGNED_MAX = (1 << 64) - 1

_NO_ITEMS = int(Item.WIDE).to_bytes(4, "little")
"""The flag word of a record that consists of data only."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a table; ``desc`` is the description in its template, ``probe`` the name of the probe in its set."""

    partition: Partition
    rows: pa.Table
    desc: str
    probe: str = ""


def pieces_of(
    found: Iterable[Block | LostRecords], on_lost: Callable[[str, int], None] | None = None
) -> Iterator[Piece]:
    """
    Iterate over the tables of a trace file's records, each for some of them; raise ``FormatError`` at damage.

    Lost records are counted in the next row of their program. ``on_lost`` is called with the name of a program and the
    number of its records that were lost after the last one.
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
        lost_before = lost.get(known.name, 0)
        if isinstance(each, TableBlock):
            rows = len(each.records)
            size += each.records.row_bytes
            known.add_table(each, lost_before)
        else:
            rows = known.add_rows(each, lost_before)
            size += len(each.body)
        count += rows
        if rows:
            lost.pop(known.name, None)
        if count >= _ROWS or size >= _BYTES:
            count = size = 0
            for program in programs.values():
                yield from program.take()
    for program in programs.values():
        yield from program.take()
    if on_lost is not None:
        for name, number in lost.items():
            on_lost(name, number)


_Key = tuple[int | None, int | None]
"""A major and a minor code."""


_Group = tuple["Rows", "Sequence[int]"]
"""Records of one flag word, and their positions in the block."""


def _by_codes(rows: Rows, numbers: Sequence[int]) -> Iterator[tuple[_Key, _Group]]:
    """
    Iterate over groups of records with the same major and minor code.

    ``numbers`` has the positions of the rows in their block. Each group has the positions of its records.
    """
    majors, minors = rows.item(Item.MAJOR), rows.item(Item.MINOR)
    if not isinstance(majors, list) and not isinstance(minors, list):
        yield (majors, minors), (rows, numbers)
        return
    groups: dict[_Key, list[int]] = {}
    spread = (each if isinstance(each, list) else [each] * len(rows) for each in (majors, minors))
    for row, key in enumerate(zip(*spread, strict=True)):
        groups.setdefault(key, []).append(row)
    for key, wanted in groups.items():
        chosen = rows if len(wanted) == len(rows) else rows.chosen(wanted)
        yield key, (chosen, [numbers[row] for row in wanted])


def _ragged_groups(block: RecordBlock) -> Iterator[tuple[RaggedRows, Sequence[int]]]:
    """Iterate over groups of adjacent records by flag word, with their positions in the block."""
    by_flags: dict[object, list[tuple[RaggedRows, range]]] = {}
    first = 0
    for rows in ragged_rows_of(block):
        by_flags.setdefault(rows.shape, []).append((rows, range(first, first + len(rows))))
        first += len(rows)
    for runs in by_flags.values():
        if len(runs) == 1:
            yield runs[0]
            continue
        starts = [start for rows, _ in runs for start in rows.starts]
        ends = [end for rows, _ in runs for end in rows.ends]
        shape = runs[0][0].shape
        numbers = [number for _, those in runs for number in those]
        yield RaggedRows(block, starts, ends, shape.flags, shape.byte_order), numbers


def _sound(block: RecordBlock) -> RecordBlock:
    """Return a block in which damaged records are replaced by records that consist of data only."""
    parts = []
    for each in block:
        record = each.record
        try:
            decode_record(record)
        except FormatError:
            record = _NO_ITEMS + record
        parts += [RECORD_HEAD.pack(each.probe, len(record)), record]
    return RecordBlock(block.program, b"".join(parts), 0, block.wall_offset, block.written, block.position)


class _Program:
    """The tables of a program, according to its description in the trace file so far."""

    def __init__(self, program: TraceProgram, before: _Program | None) -> None:
        self.name = clean([program.name])[0] or ""
        self.source = program.source
        self._names = NameColumns(program)
        self._templates = ProgramTemplates.of_source(program.source)
        self._before = before  # the rows from before the description changed
        self._waiting: list[RecordTable] = []
        self._waiting_offset = 0
        self._waiting_lost: dict[int, int] = {}
        self._tables: dict[_Key, list[pa.Table]] = {}

    def add_table(self, block: TableBlock, lost: int) -> None:
        """
        Add packed records. Those of consecutive blocks are converted together.

        ``lost`` is the number of records lost before the first one.
        """
        if not block.records:
            return
        if block.wall_offset != self._waiting_offset:
            self._convert()
        if lost:
            self._waiting_lost[sum(map(len, self._waiting))] = min(lost, _UNSIGNED_MAX)
        self._waiting.append(block.records)
        self._waiting_offset = block.wall_offset

    def add_rows(self, block: RecordBlock, lost: int) -> int:
        """
        Add the records of a block, with any flag words; return their number.

        ``lost`` is the number of records lost before the first one.
        """
        self._convert()
        try:
            groups = list(_ragged_groups(block))
            for rows, _ in groups:
                rows.data_bounds()
        except FormatError:
            groups = list(_ragged_groups(_sound(block)))
        self._add(groups, block.wall_offset, {0: min(lost, _UNSIGNED_MAX)} if lost else {})
        return sum(len(rows) for rows, _ in groups)

    def _convert(self) -> None:
        """Convert the packed records that were added and not converted yet."""
        waiting, self._waiting = self._waiting, []
        lost, self._waiting_lost = self._waiting_lost, {}
        first = 0
        for table in RecordTable.joined(waiting):
            numbers: list[Sequence[int]] = [range(len(table))]
            if len(table.parts) > 1:
                by_part: list[list[int]] = [[] for _ in table.parts]
                for row, part in enumerate(table.order):
                    by_part[part].append(row)
                numbers = [*by_part]
            mine = {row - first: count for row, count in lost.items() if first <= row < first + len(table)}
            self._add(zip(table.parts, numbers, strict=True), self._waiting_offset, mine)
            first += len(table)

    def _add(self, groups: Iterable[tuple[Rows, Sequence[int]]], wall_offset: int, lost: Mapping[int, int]) -> None:
        """
        Convert groups of records with one flag word each, and append them to the tables of their codes.

        Each group has the positions of its records in the block. ``lost`` maps positions to the number of records lost
        before them.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        by_key: dict[_Key, list[_Group]] = {}
        for rows, numbers in groups:
            for key, group in _by_codes(rows, numbers):
                by_key.setdefault(key, []).append(group)
        for key, mine in by_key.items():
            template = self._template(key)
            parts = [rows_table(rows, self._names, template, wall_offset) for rows, _ in mine]
            table = parts[0]
            order = list(chain.from_iterable(numbers for _, numbers in mine)) if lost or len(parts) > 1 else []
            if len(parts) > 1:
                table = pa.concat_tables(parts).take(pc.sort_indices(pa.array(order, pa.int64())))
            order.sort()
            if before := {bisect_left(order, number): count for number, count in lost.items() if number in order}:
                at = table.schema.get_field_index("lost_before")
                table = table.set_column(at, table.schema.field(at), sparse(before, len(order)))
            self._tables.setdefault(key, []).append(table)

    def _template(self, key: _Key) -> Template | None:
        major, minor = key
        return self._templates.find(major or 0, minor or 0)

    def take(self) -> Iterator[Piece]:
        """Iterate over the buffered rows of all tables, and remove them."""
        import pyarrow as pa

        if self._before is not None:
            before, self._before = self._before, None
            yield from before.take()
        self._convert()
        tables, self._tables = self._tables, {}
        for key, parts in tables.items():
            template = self._template(key)
            rows = parts[0] if len(parts) == 1 else pa.concat_tables(parts)
            desc, probe = ("", "") if template is None else (template.desc, template.probe)
            yield Piece(Partition(self.name, *key), rows, desc, probe)
