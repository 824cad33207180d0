"""
The fields of many records at once, as ``--count`` and ``--hist`` want them.

There is a column wherever a field is at one place in all of the records: items of the header, what is known of the
probepoint and the program, words of the data, and numbers that a template takes from data of a fixed size. Values are
those of ``FieldValues.find``.
"""

from __future__ import annotations

import enum
from itertools import compress
from typing import TYPE_CHECKING, Any

from dprobes.formatters.fieldvalues import HEADER_FIELDS, NUMBERED, PLACE_FIELDS, names_of
from dprobes.record.codec import decode_record
from dprobes.record.layout import Item
from dprobes.sinks.packedfields import field_places, strings_at
from dprobes.sinks.raggedcolumns import RaggedData, steps_of
from dprobes.trace.columns import PlainRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.formatters.fieldvalues import FieldValues
    from dprobes.formatters.templates.model import Template
    from dprobes.record.packed import PackedRecords
    from dprobes.record.probeinfo import Place
    from dprobes.trace.columns import Rows

__all__ = ["FieldColumns", "NoColumnError", "Shown", "columns_of_packed", "columns_of_rows"]

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
