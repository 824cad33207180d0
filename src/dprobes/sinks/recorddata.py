"""
The fields of records' data as filters of trace files name them, by columns wherever that is possible.

Names are those of ``--count``: fields of templates, be they written or derived from handlers, ``word0``, ``item0``.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from dprobes.diagnostics import did_you_mean
from dprobes.errors import FormatError
from dprobes.escapes import escaped
from dprobes.filters.tree import fail
from dprobes.formatters.addressnames import AddressSymboliser
from dprobes.formatters.fieldvalues import FieldValues, names_of
from dprobes.record.boot import boot_id
from dprobes.record.codec import decode_record
from dprobes.sinks.fieldcolumns import NoColumnError, columns_of_packed, columns_of_rows
from dprobes.trace.columns import PackedRows
from dprobes.trace.filter import FILTER_NAMES

if TYPE_CHECKING:
    from dprobes.filters.tree import Name
    from dprobes.record.probeinfo import Place
    from dprobes.rpn.numbertypes import NumberType
    from dprobes.sinks.fieldcolumns import FieldColumns
    from dprobes.trace.columns import Rows
    from dprobes.trace.content import TraceProgram
    from dprobes.trace.fieldfilter import DataColumn

__all__ = ["RecordData"]


class RecordData:
    """Find fields in records of trace files (``trace.fieldfilter.DataColumns``)."""

    def __init__(self) -> None:
        self._own = boot_id()
        self._values: dict[TraceProgram, tuple[object, FieldValues]] = {}
        self._names: dict[str, Name] = {}
        """The fields that filters name."""
        self._known: set[str] = set()
        """Those that records of some program may have."""
        self._there: dict[str, None] = {}
        """The fields that there are in programs that lack one of them."""

    def note(self, name: Name) -> None:
        """Know that a filter names a field."""
        self._names.setdefault(name.name, name)

    def see(self, rows: Rows) -> None:
        """Know the program of some records."""
        self._values_of(rows.block.program)

    def check(self) -> None:
        """Raise ``SourceError`` if there were records, and those of no program can have a field that was named."""
        for name in self._names.values() if self._values else ():
            if name.name not in self._known:
                known = [*FILTER_NAMES, *self._there]
                hint = did_you_mean(name.name, known) or f"there are {', '.join(known)}; strings are in quotes"
                fail(name.span, f"records have no field '{name.name}'", hint)

    def word_size(self, rows: Rows) -> int:
        """Return how many bytes a word of records has."""
        return rows.word_size

    def column(self, rows: Rows, name: Name, *, as_text: bool) -> DataColumn:
        """Return a column of numbers and strings as they are, or of the strings that are shown."""
        program = rows.block.program
        values = self._values_of(program)
        item = "name" if name.name == "comm" else name.name
        if item in FILTER_NAMES and (item != "function" or self._is_code(rows)):
            return _typed(rows.column(item), name.type)
        column: Any = None
        is_found = False
        if not values.is_named(item):  # names depend on the processes
            with contextlib.suppress(NoColumnError):
                column = self._columns(rows, values).values(item)
                is_found = True
        if not is_found:
            column = self._one_by_one(rows, values, item, as_text=as_text)
        return _typed(_plain(column), name.type)

    def _values_of(self, program: TraceProgram) -> FieldValues:
        source, values = self._values.get(program, (None, None))
        if values is None or source is not program.source:
            is_live = bool(self._own) and program.origin.boot_id == self._own
            symboliser = AddressSymboliser(program.source, live=is_live, carried=program.names)
            values = FieldValues(program.source, program.origin.host, symboliser)
            self._values[program] = program.source, values
            for name in self._names:
                try:
                    values.check(name)
                    self._known.add(name)
                except FormatError:
                    self._there |= {field: None for each in values.templates.all() for field in names_of(each, 8)}
        return values

    @staticmethod
    def _place(rows: Rows, probe: int) -> Place:
        program = rows.block.program
        return program.place(probe).in_module(program.source.module)

    def _is_code(self, rows: Rows) -> bool:
        probes = rows.probes()
        return all(self._place(rows, probe).routine for probe in ({probes} if isinstance(probes, int) else set(probes)))

    def _columns(self, rows: Rows, values: FieldValues) -> FieldColumns:
        def place(probe: int) -> Place:
            return self._place(rows, probe)

        if isinstance(rows, PackedRows):
            return columns_of_packed(rows.records, place, values)
        return columns_of_rows(rows, place, values)

    def _one_by_one(self, rows: Rows, values: FieldValues, name: str, *, as_text: bool) -> list[Any]:
        """Return the column of what has no place of its own in all records."""
        found: list[Any] = []
        is_named = as_text and (values.is_named(name) or name == "function")
        for row in range(len(rows)):
            each = rows.record(row)
            try:
                record = decode_record(each.record)
            except FormatError:
                found.append(None)
                continue
            place = self._place(rows, each.probe)
            value = values.find(record, place, name)
            found.append(values.text(record, place, name) if is_named and value is not None else value)
        return found


def _plain(column: Any) -> Any:
    """Return a column with numbers and strings alone; strings as they are shown."""
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
    """Return a column of which only the low bits count that a type says."""
    if known is None or column is None:
        return column  # type: ignore[no-any-return]
    mask, top = (1 << known.bits) - 1, 1 << known.bits - 1

    def typed(value: Any) -> Any:
        if not isinstance(value, int):
            return None
        low = value & mask
        return low - mask - 1 if known.is_signed and low >= top else low

    return [typed(value) for value in column] if isinstance(column, list) else typed(column)
