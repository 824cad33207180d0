"""
The fields of many records at once, as ``--count`` and ``--hist`` want them.

There is a column wherever a field is at one place in all of the records: items of the header, what is known of the
probepoint and the program, words of the data, and numbers that a template takes from data of a fixed size. Values are
those of ``FieldValues.find``.
"""

from __future__ import annotations

import contextlib
import enum
from itertools import compress
from typing import TYPE_CHECKING, Any

from dprobes.diagnostics import did_you_mean
from dprobes.errors import FormatError
from dprobes.escapes import escaped
from dprobes.filters.filter_language import fail
from dprobes.formatters.address_names import AddressSymboliser
from dprobes.formatters.field_values import HEADER_FIELDS, NUMBERED, PLACE_FIELDS, FieldValues, names_of
from dprobes.formatters.templates.data_columns import RaggedData, field_places, steps_of, strings_at
from dprobes.record.boot_clock import boot_id
from dprobes.record.log_record import Item, decode_record
from dprobes.trace.record_columns import PackedRows, PlainRows
from dprobes.trace.trace_filter import FILTER_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.filters.filter_language import Name
    from dprobes.formatters.templates.template_model import Template
    from dprobes.record.packed_records import PackedRecords
    from dprobes.record.record_origin import Place
    from dprobes.rpn.operands import NumberType
    from dprobes.trace.record_columns import Rows
    from dprobes.trace.trace_content import TraceProgram
    from dprobes.trace.trace_filter import DataColumn

__all__ = ["FieldColumns", "NoColumnError", "RecordData", "Shown", "columns_of_packed", "columns_of_rows"]

Column = list[Any] | int | str | None
"""The values of all records, or one that they have in common."""


class NoColumnError(Exception):
    """Say that there is no column of a field: the records have to be looked at one by one."""


class Shown(str):
    """A text as it is shown, with escapes."""

    __slots__ = ()


class _Absent(enum.Enum):
    """Say that no template has a field of a name."""

    ABSENT = enum.auto()


class _RaggedPacked:
    """Packed records as rows with data of various layouts."""

    def __init__(self, packed: PackedRecords) -> None:
        self._packed = packed
        self.byte_order = packed.shape.byte_order

    def __len__(self) -> int:
        return len(self._packed)

    def pair(self, row: int) -> tuple[int, bytes]:
        """Return a record with its probepoint."""
        return self._packed[row]

    def data_bounds(self) -> tuple[bytes, list[int], list[int]]:
        """Return bytes, and where in them the data of each record starts and ends."""
        rows, size = self._packed.rows(), self._packed.row_size
        starts = range(self._packed.shape.data, len(rows) + 1, size)[: len(self._packed)]
        return rows, list(starts), list(range(size, len(rows) + 1, size))


def _pair(rows: PlainRows | _RaggedPacked, row: int) -> tuple[int, bytes]:
    if isinstance(rows, _RaggedPacked):
        return rows.pair(row)
    each = rows.record(row)
    return each.probe, each.record


class FieldColumns:
    """
    Make columns of records of one program.

    ``item`` returns the column of a header item, ``place`` what is known of a probepoint. Records that are ``packed``
    have columns of their data. With ``mask`` only the records are meant for which it is true.
    """

    def __init__(
        self,
        item: Callable[[str], Column],
        probes: list[int] | int,
        place: Callable[[int], Place],
        fields: FieldValues,
        count: int,
        packed: PackedRecords | None = None,
        mask: Sequence[bool] | None = None,
        plain: PlainRows | None = None,
    ) -> None:
        self._plain = plain
        self._item = item
        self._place = place
        self._fields = fields
        self._packed = packed
        self._mask = mask
        self._probes = self._chosen(probes)
        self.count = count if mask is None else sum(mask)

    def _chosen(self, column: Column) -> Any:
        if self._mask is None or not isinstance(column, list):
            return column
        return list(compress(column, self._mask))

    def of_place(self, text: Callable[[Place], str | None]) -> Column:
        """Return what is said of the probepoints."""
        probes = self._probes
        if isinstance(probes, int):
            return text(self._place(probes))
        known = {probe: text(self._place(probe)) for probe in set(probes)}
        if len(set(known.values())) == 1:
            return next(iter(known.values()))
        return [known[probe] for probe in probes]

    def _are_in_code(self) -> bool:
        probes = {self._probes} if isinstance(self._probes, int) else set(self._probes)
        return all(self._place(probe).is_code for probe in probes)

    def values(self, name: str) -> Column:
        """Return the column of a field; raise ``NoColumnError`` if there is none."""
        if self._fields.is_named(name):
            raise NoColumnError  # the name depends on the process
        if name in HEADER_FIELDS:
            return self._chosen(self._item(name))  # type: ignore[no-any-return]
        if name == "function" and not self._are_in_code():
            raise NoColumnError  # each record has one of its own
        if name in PLACE_FIELDS:
            return self.of_place(lambda place: self._fields.of_place(place, name))
        if self._plain is not None and (column := self._ragged(self._plain, name)) is not None:
            return self._chosen(column)  # type: ignore[no-any-return]
        if self._packed is not None and (found := self._of_packed(self._packed, name)) is not _Absent.ABSENT:
            return self._chosen(found)  # type: ignore[no-any-return]
        if (numbered := NUMBERED.match(name)) is not None:
            return self._chosen(self._numbered(numbered[1], int(numbered[2])))  # type: ignore[no-any-return]
        if name in ("word_size", "stack_trace"):
            return self._chosen(self._item(name))  # type: ignore[no-any-return]
        return self._fields.of_program(name)

    def _of_packed(self, packed: PackedRecords, name: str) -> Column | _Absent:
        """Return the column of a field of templates; of records with a place of its own in each, by walking them."""
        try:
            return self._in_templates(packed, name)
        except NoColumnError:
            column = self._ragged(_RaggedPacked(packed), name)
            return _Absent.ABSENT if column is None else column

    def _ragged(self, rows: PlainRows | _RaggedPacked, name: str) -> list[Any] | None:
        """Return the column of a field of records of various sizes; None if no template or word is called so."""
        if self._item("stack_trace"):
            return None
        count, word_size = len(rows), self._word_size
        codes = [self._item(code) for code in ("major", "minor")]
        majors, minors = (code if isinstance(code, list) else [code] * count for code in codes)
        groups: dict[tuple[Any, Any], list[int]] = {}
        for row, key in enumerate(zip(majors, minors, strict=True)):
            groups.setdefault(key, []).append(row)
        numbered = NUMBERED.match(name)
        if numbered is not None and numbered[1] != "word":
            raise NoColumnError

        def find(row: int) -> Any:
            probe, record = _pair(rows, row)
            return self._fields.find(decode_record(record), self._place(probe), name)

        data = RaggedData(rows, find)
        found: list[Any] = [None] * count
        is_there = numbered is not None
        for (major, minor), wanted in groups.items():
            template, is_derived = self._template_of(major or 0, minor or 0)
            if template is not None and name in (names := names_of(template, word_size)):
                is_there = True
                steps = steps_of(template, word_size)
                if steps is None:
                    raise NoColumnError
                values = data.of_template(steps, names.index(name), wanted, is_whole=is_derived)
            elif numbered is not None:
                values = data.numbers(int(numbered[2]) * word_size, word_size, wanted)
            else:
                continue
            for row, value in zip(wanted, values, strict=True):
                found[row] = value
        return found if is_there else None

    def _template_of(self, major: int, minor: int) -> tuple[Template | None, bool]:
        """Return the template of records, and whether it was derived from a handler."""
        templates = self._fields.templates
        if (written := templates.written.find(major, minor)) is not None:
            return written, False
        return templates.derived(self._word_size, major, minor), True

    def _in_templates(self, packed: PackedRecords, name: str) -> Column | _Absent:
        """Return the column of a field of templates of packed records; say that it is absent if none has it."""
        if self._item("stack_trace"):
            return _Absent.ABSENT
        codes = [self._item(code) for code in ("major", "minor")]
        if not any(isinstance(code, list) for code in codes):
            major, minor = (code if isinstance(code, int) else 0 for code in codes)
            return self._in_template(packed, major, minor, name)
        majors, minors = (code if isinstance(code, list) else [code] * len(packed) for code in codes)
        keys = list(zip(majors, minors, strict=True))
        found = {key: self._in_template(packed, key[0] or 0, key[1] or 0, name) for key in set(keys)}
        if all(column is _Absent.ABSENT for column in found.values()):
            return _Absent.ABSENT
        columns = {
            key: column if isinstance(column, list) else [None if column is _Absent.ABSENT else column] * len(packed)
            for key, column in found.items()
        }
        return [columns[key][row] for row, key in enumerate(keys)]

    def _in_template(self, packed: PackedRecords, major: int, minor: int, name: str) -> Column | _Absent:
        """Return the column as if all records had these codes; raise ``NoColumnError`` if it has no place in all."""
        word_size = self._word_size
        template, is_derived = self._template_of(major, minor)
        if template is None or name not in (names := names_of(template, word_size)):
            return _Absent.ABSENT
        found = field_places(packed, template, word_size)
        if found is None:
            raise NoColumnError
        places, end = found
        if is_derived and end != self._data_size:  # it is that of records only if it takes all of their data
            return _Absent.ABSENT
        place = places[names.index(name)]
        if place.start + place.size > self._data_size:
            raise NoColumnError
        if place.is_text:
            return strings_at(packed, place.start, place.size)
        return self._numbers(place.start, place.size, is_signed=place.is_signed)

    @property
    def _word_size(self) -> int:
        size = self._item("word_size")
        assert isinstance(size, int), "records of one shape have words of one size"
        return size

    @property
    def _data_size(self) -> int:
        assert self._packed is not None
        return self._packed.row_size - self._packed.shape.data

    def _numbered(self, kind: str, number: int) -> Column:
        if kind != "word" or self._packed is None:
            raise NoColumnError
        size = self._word_size
        return self._numbers(number * size, size) if (number + 1) * size <= self._data_size else None

    def _numbers(self, start: int, size: int, *, is_signed: bool = False) -> Column:
        assert self._packed is not None
        shape = self._packed.shape
        column = self._packed.column(shape.data + start, size, shape.byte_order)
        if not is_signed:
            return column
        top, span = 1 << (8 * size - 1), 1 << 8 * size
        if isinstance(column, int):
            return column - span if column >= top else column
        return [value - span if value >= top else value for value in column]


def columns_of_packed(
    packed: PackedRecords, place: Callable[[int], Place], fields: FieldValues, mask: Sequence[bool] | None = None
) -> FieldColumns:
    """Return the columns of packed records."""

    def item(name: str) -> Column:
        match name:
            case "name":
                names = packed.names()
                if isinstance(names, list):
                    known = {name: _decoded(name) for name in set(names)}
                    return [known[name] for name in names]
                return None if names is None else _decoded(names)
            case "word_size":
                return 8 if packed.shape.flags & Item.WIDE else 4
            case "stack_trace":
                return int(bool(packed.shape.flags & Item.STACK_TRACE))
        return packed.item(HEADER_FIELDS[name])

    return FieldColumns(item, packed.probes(), place, fields, len(packed), packed, mask)


def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def columns_of_rows(
    rows: Rows, place: Callable[[int], Place], fields: FieldValues, mask: Sequence[bool] | None = None
) -> FieldColumns:
    """Return the columns of records that stand one behind the other: of their headers only."""

    def item(name: str) -> Column:
        column = rows.column(name)
        if name != "name" or column is None:
            return column
        if not isinstance(column, list):
            return Shown(column)
        known = {text: Shown(text) for text in set(column)}
        return [known[text] for text in column]

    plain = rows if isinstance(rows, PlainRows) else None
    return FieldColumns(item, rows.probes(), place, fields, len(rows), None, mask, plain)


# The fields of records' data as filters of trace files name them, by columns wherever that is possible.
#
# Names are those of ``--count``: fields of templates, be they written or derived from handlers, ``word0``, ``item0``.


class RecordData:
    """Find fields in records of trace files (``trace.trace_filter.DataColumns``)."""

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
