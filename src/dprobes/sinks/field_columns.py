"""
Fields of many records at once, for ``--count`` and ``--hist``, and for filters of trace files.

A field has a column if it is at the same offset in all records: items of the header, attributes of the probepoint and
the program, words of the data, and the fields of a template in data that consists of strings and numbers. Values are
those of ``FieldValues.find``.
"""

from __future__ import annotations

import contextlib
import enum
from functools import cached_property, partial
from itertools import compress
from typing import TYPE_CHECKING, Any

from dprobes.diagnostics import did_you_mean
from dprobes.errors import FormatError
from dprobes.escapes import escaped
from dprobes.filters.filter_language import fail
from dprobes.formatters.address_names import AddressSymboliser
from dprobes.formatters.field_values import HEADER_FIELDS, NUMBERED, PLACE_FIELDS, FieldValues, names_of
from dprobes.formatters.templates.data_columns import FieldPlace, RaggedData, field_places, steps_of, strings_at
from dprobes.record.log_record import Item, decode_record
from dprobes.record.record_rows import PackedRows, mapped, repeated
from dprobes.trace.trace_filter import FILTER_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dprobes.filters.filter_language import Name
    from dprobes.formatters.templates.template_model import Template
    from dprobes.record.record_origin import Place
    from dprobes.record.record_rows import Rows
    from dprobes.rpn.operands import NumberType
    from dprobes.trace.record_columns import BlockRows
    from dprobes.trace.trace_content import TraceProgram
    from dprobes.trace.trace_filter import DataColumn

__all__ = ["FieldColumns", "NoColumnError", "RecordData"]

Column = list[Any] | int | str | None
"""The values of all records, or the value that all share."""


_Codes = tuple[int, int]
"""A major and a minor code, 0 for a missing one."""


class NoColumnError(Exception):
    """A field without a column; records must be decoded one by one."""


class _Absent(enum.Enum):
    """The type of the value that represents the column of a field that no template has."""

    ABSENT = enum.auto()


class FieldColumns:
    """
    Columns of records of one program. ``place`` returns the place of a probepoint by its number.

    With ``mask``, only the records whose element is true are included.
    """

    def __init__(
        self, rows: Rows, place: Callable[[int], Place], fields: FieldValues, mask: Sequence[bool] | None = None
    ) -> None:
        self._rows = rows
        self._place = place
        self._fields = fields
        self._mask = mask
        self._probes = self._chosen(rows.probes())
        self.count = len(rows) if mask is None else sum(mask)

    def _chosen(self, column: Column) -> Any:
        if self._mask is None or not isinstance(column, list):
            return column
        return list(compress(column, self._mask))

    def of_place(self, text: Callable[[Place], str | None]) -> Column:
        """Return the column of an attribute of the probepoints, which ``text`` computes for a place."""
        column: Column = mapped(self._probes, lambda probe: text(self._place(probe)))
        return column[0] if isinstance(column, list) and len(set(column)) == 1 else column

    def _are_in_code(self) -> bool:
        probes = {self._probes} if isinstance(self._probes, int) else set(self._probes)
        return all(self._place(probe).is_code for probe in probes)

    def values(self, name: str) -> Column:
        """Return the column of a field; raise ``NoColumnError`` if there is none."""
        if self._fields.is_named(name):
            raise NoColumnError  # the name depends on the process
        if name in HEADER_FIELDS:
            return self._chosen(self._rows.column(name))  # type: ignore[no-any-return]
        if name == "function" and not self._are_in_code():
            raise NoColumnError  # each record has its own
        if name in PLACE_FIELDS:
            return self.of_place(lambda place: self._fields.of_place(place, name))
        if (found := self._of_data(name)) is not _Absent.ABSENT:
            return self._chosen(found)  # type: ignore[no-any-return]
        if name in ("word_size", "stack_trace"):
            return self._rows.column(name)
        return self._fields.of_program(name)

    # The fields of the data

    def _of_data(self, name: str) -> Column | _Absent:
        """Return the column of a template's field or a word of the data; ``_Absent`` if no record has this name."""
        found = {codes: self._of_codes(codes, wanted, name) for codes, wanted in self._by_codes.items()}
        there = {codes: column for codes, column in found.items() if column is not _Absent.ABSENT}
        if len(found) == 1 or not there:
            return next(iter(found.values()), _Absent.ABSENT)
        merged: list[Any] = [None] * len(self._rows)
        for codes, column in there.items():
            wanted = self._by_codes[codes]
            for row, value in zip(wanted, repeated(column, len(wanted)), strict=True):
                merged[row] = value
        return merged

    @cached_property
    def _by_codes(self) -> Mapping[_Codes, Sequence[int]]:
        """The numbers of the rows by their codes."""
        count = len(self._rows)
        majors, minors = (self._rows.item(code) or 0 for code in (Item.MAJOR, Item.MINOR))
        if isinstance(majors, int) and isinstance(minors, int):
            return {(majors, minors): range(count)}
        groups: dict[_Codes, list[int]] = {}
        for row, codes in enumerate(zip(repeated(majors, count), repeated(minors, count), strict=True)):
            groups.setdefault(codes, []).append(row)
        return groups

    def _of_codes(self, codes: _Codes, wanted: Sequence[int], name: str) -> Column | _Absent:
        """Return the column of the rows ``wanted``, which have these codes: from their planes, or record by record."""
        rows, word_size = self._rows, self._rows.shape.word_size
        template, is_derived = self._template_of(*codes)
        names = () if template is None else names_of(template, word_size)
        numbered = NUMBERED.match(name)
        if template is not None and name in names:
            if isinstance(rows, PackedRows) and (fixed := field_places(rows, template, word_size)) is not None:
                places, end = fixed
                place = places[names.index(name)]
                if is_derived and end != rows.data_size:  # a derived template must cover all of the data
                    return _Absent.ABSENT
                if place.start + place.size <= rows.data_size:
                    values = strings_at(rows, place) if place.is_text else _numbers_at(rows, place)
                    return _of_rows(values, wanted)
            if (steps := steps_of(template, word_size)) is None:
                raise NoColumnError
            find = partial(self._found, name)
            return self._ragged.of_template(steps, names.index(name), wanted, find, is_whole=is_derived)
        if numbered is None:
            return _Absent.ABSENT
        if numbered[1] != "word":
            raise NoColumnError
        start = int(numbered[2]) * word_size
        if not isinstance(rows, PackedRows):
            return self._ragged.numbers(start, word_size, wanted)
        if start + word_size > rows.data_size:
            return None
        return _of_rows(_numbers_at(rows, FieldPlace(start, word_size)), wanted)

    @cached_property
    def _ragged(self) -> RaggedData:
        return RaggedData(self._rows)

    def _found(self, name: str, row: int) -> Any:
        """Return the value of field ``name`` in the record with number ``row``, found by decoding the record."""
        probe, record = self._rows.pair(row)
        return self._fields.find(decode_record(record), self._place(probe), name)

    def _template_of(self, major: int, minor: int) -> tuple[Template | None, bool]:
        """
        Return the template of records with these codes, and True if it was derived from a handler.

        The template is None for stack traces, and if there is none.
        """
        if self._rows.column("stack_trace"):
            return None, False
        templates = self._fields.templates
        if (written := templates.written.find(major, minor)) is not None:
            return written, False
        return templates.derived(self._rows.shape.word_size, major, minor), True


def _of_rows(column: Column, wanted: Sequence[int]) -> Column:
    if isinstance(column, list) and len(wanted) != len(column):
        return [column[row] for row in wanted]
    return column


def _numbers_at(packed: PackedRows, place: FieldPlace) -> Column:
    """Return the numbers at ``place`` in the data of packed records; a single number if all records share it."""
    size = place.size
    column = packed.numbers(packed.shape.data + place.start, size, packed.shape.byte_order)
    if not place.is_signed:
        return column
    top, span = 1 << (8 * size - 1), 1 << 8 * size
    if isinstance(column, int):
        return column - span if column >= top else column
    return [value - span if value >= top else value for value in column]


# The fields of records' data in filters of trace files, as columns if possible.


class RecordData:
    """The fields of records of trace files (``trace.trace_filter.DataColumns``), with the names of ``--count``."""

    def __init__(self) -> None:
        self._values: dict[TraceProgram, tuple[object, FieldValues]] = {}
        self._names: dict[str, Name] = {}
        """The fields that filters name, by name."""
        self._known: set[str] = set()
        """The names of fields that records of some program may have."""
        self._there: dict[str, None] = {}
        """The fields of programs that lack a field of the filter, for the error message."""

    def note(self, name: Name) -> None:
        """Register the name of a field in a filter, for ``check``."""
        self._names.setdefault(name.name, name)

    def see(self, rows: BlockRows) -> None:
        """Register the program of these records, for ``check``."""
        self._values_of(rows.block.program)

    def check(self) -> None:
        """Raise ``SourceError`` for a field that no program's records can have, if records of any program were seen."""
        for name in self._names.values() if self._values else ():
            if name.name not in self._known:
                known = [*FILTER_NAMES, *self._there]
                hint = did_you_mean(name.name, known) or f"there are {', '.join(known)}; strings are in quotes"
                fail(name.span, f"records have no field '{name.name}'", hint)

    def column(self, rows: BlockRows, name: Name, *, as_text: bool) -> DataColumn:
        """Return a field's column: numbers and strings unchanged, or, with ``as_text``, the displayed strings."""
        program = rows.block.program
        values = self._values_of(program)
        item = "name" if name.name == "comm" else name.name
        if item in FILTER_NAMES and (item != "function" or _is_code(rows)):
            return _typed(rows.column(item), name.type)
        column: Any = None
        is_found = False
        if not values.is_named(item):  # names depend on the processes
            with contextlib.suppress(NoColumnError):
                column = FieldColumns(rows.rows, rows.place, values).values(item)
                is_found = True
        if not is_found:
            column = self._one_by_one(rows, values, item, as_text=as_text)
        return _typed(_plain(column), name.type)

    def _values_of(self, program: TraceProgram) -> FieldValues:
        source, values = self._values.get(program, (None, None))
        if values is None or source is not program.source:
            symboliser = AddressSymboliser(program.source, live=program.may_run, carried=program.names)
            values = FieldValues(program.source, program.origin.host, symboliser)
            self._values[program] = program.source, values
            for name in self._names:
                try:
                    values.check(name)
                    self._known.add(name)
                except FormatError:
                    self._there |= {field: None for each in values.templates.all() for field in names_of(each, 8)}
        return values

    def _one_by_one(self, rows: BlockRows, values: FieldValues, name: str, *, as_text: bool) -> list[Any]:
        """
        Return the values of a field whose offset differs between records: each record is decoded.

        With ``as_text`` the values are strings as displayed.
        """
        found: list[Any] = []
        is_named = as_text and (values.is_named(name) or name == "function")
        for row in range(len(rows)):
            each = rows.record(row)
            try:
                record = decode_record(each.record)
            except FormatError:
                found.append(None)
                continue
            place = rows.place(each.probe)
            value = values.find(record, place, name)
            found.append(values.text(record, place, name) if is_named and value is not None else value)
        return found


def _is_code(rows: BlockRows) -> bool:
    return all(rows.place(probe).routine for probe in rows.rows.probe_set())


def _plain(column: Any) -> Any:
    """Return a column in which values that are neither numbers nor strings are replaced by their displayed form."""
    if not isinstance(column, list):
        return _plain_value(column)
    if all(isinstance(value, int) for value in column[:1]) and set(map(type, column)) == {int}:
        return column
    return [_plain_value(value) for value in column]


def _plain_value(value: Any) -> int | str | None:
    match value:
        case int():
            return value
        case str():
            return escaped(value)
    return None


def _typed(column: Any, known: NumberType | None) -> DataColumn:
    """Return a column whose integers are truncated to the bits of type ``known``, or unchanged if that is None."""
    if known is None or column is None:
        return column  # type: ignore[no-any-return]
    mask, top = (1 << known.bits) - 1, 1 << known.bits - 1

    def typed(value: Any) -> Any:
        if not isinstance(value, int):
            return None
        low = value & mask
        return low - mask - 1 if known.is_signed and low >= top else low

    return [typed(value) for value in column] if isinstance(column, list) else typed(column)
