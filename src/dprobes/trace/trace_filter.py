"""
Filters of records in trace files. ``filters.filter_language`` has the language.

A filter is compiled into functions of ``record_columns.BlockRows``, so that it processes many records at once, and
reads only the items that it names. A comparison with an item that a record lacks is false, also with ``!=`` and ``not
in``.

The type of an item is known, so a comparison with a value of another type is an error. The type of a field of the data
(of a template, a handler, or ``word0``) is known only with the records, so the other operand decides. A number is
compared with numbers, a string with strings. A comparison with a value of the other type is false.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, assert_never

from dprobes.diagnostics import did_you_mean
from dprobes.filters.filter_language import (
    And,
    Comparison,
    Condition,
    Membership,
    Memory,
    Name,
    Not,
    Number,
    Or,
    StringAt,
    Sum,
    Text,
    Value,
    fail,
    parse,
    values_of,
)
from dprobes.globs import compile_glob
from dprobes.record.record_rows import mapped, repeated
from dprobes.record.record_table import in_order
from dprobes.trace.packed_blocks import TableBlock
from dprobes.trace.record_columns import ITEM_COLUMNS, TEXT_COLUMNS, BlockRows, rows_of
from dprobes.trace.trace_content import LostRecords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dprobes.trace.packed_blocks import Block
    from dprobes.trace.trace_content import TraceRecord

    RowFilter = Callable[[BlockRows], "Mask"]
    Source = Callable[[BlockRows], "DataColumn"]

__all__ = ["FILTER_NAMES", "DataColumn", "Selection", "all_of", "compile_filter", "program_filter", "time_filter"]

FILTER_NAMES = (*ITEM_COLUMNS, *TEXT_COLUMNS)
"""Names that filters can use without reading the data of records."""

Mask = bool | list[bool]
"""Selection of rows: True for each selected row, or a single value if it is the same for all rows."""

DataColumn = list[Any] | int | str | None
"""Values of all rows, with None for rows without a value, or a single value that all rows share."""

_ITEMS = f"items are {', '.join(FILTER_NAMES)}"

_FUNCTION = "function"
"""The item that may differ between the records of a sampler or watchpoint, if names of addresses are known."""

_RESULT = "retval"
"""The result of a function, which is compared as a signed number, as at a hit."""

_ALIASES = {"comm": "name"}
"""Aliases of items that filters at hits accept, familiar from other tools."""


class DataColumns(Protocol):
    """An interface of filters to the fields in the data of records."""

    def note(self, name: Name) -> None:
        """Register a field that a filter names, before the first records are read."""

    def see(self, rows: BlockRows) -> None:
        """Register the program of the records, so that ``column`` need not search for fields that the program lacks."""

    def column(self, rows: BlockRows, name: Name, *, as_text: bool) -> DataColumn:
        """
        Return a field's values.

        With ``as_text``, return the displayed strings, otherwise numbers and strings unchanged.
        """


def compile_filter(text: str, *, called: str = "filter", data: DataColumns | None = None) -> RowFilter:
    """
    Compile a filter to a function. If it is invalid, raise ``SourceError``, which names the text ``called``.

    With ``data``, a name that is not an item's is a field of the records' data.
    """
    condition = parse(text, called=called)
    for value in values_of(condition):
        _check_value(value, has_data=data is not None)
        if data is not None and isinstance(value, Name) and _is_field(value):
            data.note(value)
    wants = _compiled(condition, data)
    if data is None:
        return wants

    def seen(rows: BlockRows) -> Mask:
        data.see(rows)
        return wants(rows)

    return seen


def _check_value(value: Value, *, has_data: bool) -> None:
    """Raise ``SourceError`` for a value that records do not have. ``has_data`` is True if filters can read fields."""
    match value:
        case Name() if has_data and _is_field(value):
            pass
        case Name(name, span, None):
            if _ALIASES.get(name, name) not in FILTER_NAMES:
                hint = did_you_mean(name, FILTER_NAMES) or f"there are {', '.join(FILTER_NAMES)}; strings are in quotes"
                fail(span, f"there is no item '{name}'", hint)
        case Name(name, span, known):
            fail(span, f"'{name}' has no other type: items are numbers without a sign", f"leave out ':{known}'")
        case Memory(_, _, span) | StringAt(_, _, span):
            fail(span, "records have no memory", "'dprobes run --filter' looks at it while the program runs")


def _is_field(name: Name) -> bool:
    """Return whether a name is a field of the data, or has a type, which only fields have."""
    return _item(name) not in FILTER_NAMES


def _item(name: Name) -> str:
    return _ALIASES.get(name.name, name.name)


def all_of(filters: Iterable[RowFilter]) -> RowFilter:
    """Return a filter that selects the records that all of ``filters`` select."""
    return _joined(list(filters), stops_at=False)


def program_filter(name: str) -> RowFilter:
    """Return a filter that selects the records of programs with a name."""
    return _tested(lambda rows: rows.column("program"), lambda value: bool(value == name))


def time_filter(since: int | None, until: int | None) -> RowFilter:
    """
    Return a filter for records from ``since`` up to ``until`` (excluded). None means no limit.

    Both are wall-clock times in nanoseconds since 1970. A record without a time is selected by its time of writing.
    """

    def within(rows: BlockRows) -> Mask:
        offset = rows.block.wall_offset
        first = 0 if since is None else since - offset
        last = 1 << 65 if until is None else until - offset
        times: Any = rows.column("time")
        if times is None:
            times = rows.written()
        return [first <= time < last for time in times] if isinstance(times, list) else first <= times < last

    return within


# Conditions


def _compiled(condition: Condition, data: DataColumns | None) -> RowFilter:
    match condition:
        case And(conditions):
            return _joined([_compiled(each, data) for each in conditions], stops_at=False)
        case Or(conditions):
            return _joined([_compiled(each, data) for each in conditions], stops_at=True)
        case Not(inner):
            return _negated(_compiled(inner, data))
        case Membership():
            return _membership(condition, data)
        case Comparison():
            return _comparison(condition, data)
    assert_never(condition)


def _kind(name: Name, data: DataColumns | None) -> type[int | str] | None:
    """
    Return the type of an item.

    Return None for a field of the data, and for ``function`` where ``DataColumns`` finds it.
    """
    if data is not None and (_is_field(name) or name.name == _FUNCTION):
        return None
    return str if _item(name) in TEXT_COLUMNS else int


def _joined(parts: Sequence[RowFilter], *, stops_at: bool) -> RowFilter:
    """Return the "and" of parts, or the "or" if ``stops_at`` is True. It stops once all rows are ``stops_at``."""
    join = operator.or_ if stops_at else operator.and_
    goes_on = not stops_at

    def joined(rows: BlockRows) -> Mask:
        result: Mask = goes_on
        for part in parts:
            mask = part(rows)
            if not isinstance(mask, list):
                if mask is stops_at:
                    return stops_at
                continue
            result = list(map(join, result, mask)) if isinstance(result, list) else mask
            if goes_on not in result:
                return stops_at
        return result

    return joined


def _negated(part: RowFilter) -> RowFilter:
    def negated(rows: BlockRows) -> Mask:
        mask = part(rows)
        return [not each for each in mask] if isinstance(mask, list) else not mask

    return negated


# Comparisons

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}

_TEXT_TESTS = {"=~": "a pattern", "!~": "a pattern", "startswith": "parts", "contains": "parts"}
"""Operators for strings only, with the word for their operand in error messages."""


def _column_of(name: Name, data: DataColumns | None, *, as_text: bool = False) -> Source:
    if data is not None:
        return lambda rows: data.column(rows, name, as_text=as_text)
    return lambda rows: rows.column(_item(name))


def _tested(source: Source, test: Callable[[Any], bool]) -> RowFilter:
    """
    Return a filter of the records whose value in a column fulfils ``test``. A missing value does not.

    ``test`` is called once for each distinct value.
    """

    def tested(rows: BlockRows) -> Mask:
        return mapped(source(rows), lambda value: value is not None and test(value))

    return tested


def _of_strings(name: Name, data: DataColumns | None, test: Callable[[str], bool]) -> RowFilter:
    """Return a test of strings, as they are displayed. A number fails the test."""
    return _tested(_column_of(name, data, as_text=True), lambda value: isinstance(value, str) and test(value))


def _of_two(left: Source, right: Source, compare: Callable[[Any, Any], bool]) -> RowFilter:
    """
    Return a filter that compares two columns of records with each other.

    A record is not selected if a value is missing, or one is a number and the other a string.
    """

    def both(a: Any, b: Any) -> bool:
        return a is not None and b is not None and isinstance(a, int) == isinstance(b, int) and compare(a, b)

    def compared(rows: BlockRows) -> Mask:
        a, b = left(rows), right(rows)
        if a is None or b is None:
            return False
        return list(map(both, repeated(a, len(rows)), repeated(b, len(rows))))

    return compared


def _of_numbers(source: Source, compare: Callable[[Any, Any], bool], number: int, *, is_signed: bool) -> RowFilter:
    """
    Return a filter that compares a column with ``number``. Values that are not numbers are not selected.

    ``is_signed`` interprets a full word as a two's complement number.
    """

    def compared(rows: BlockRows) -> Mask:
        column = source(rows)
        top = 1 << 8 * rows.rows.shape.word_size - 1

        def verdict(value: Any) -> bool:
            if not isinstance(value, int):
                return False
            return compare(value - 2 * top if is_signed and top <= value < 2 * top else value, number)

        if not isinstance(column, list):
            return verdict(column)
        if is_signed or set(map(type, column)) != {int}:
            return [verdict(value) for value in column]
        return list(map(compare, column, itertools.repeat(number)))

    return compared


def _string_test(condition: Comparison, data: DataColumns | None) -> tuple[Name, Callable[[str], bool]]:
    """
    Return the item or field on the left of a string operator, and the test of its value.

    Raise ``SourceError`` if one of the operands is a number.
    """
    left, right, sign = condition.left, condition.right, str(condition.operator)
    if not isinstance(left, Name) or not isinstance(right, Text):
        example = f'name {sign} "py{"*" if "~" in sign else ""}"'
        fail(condition.span, f"'{sign}' goes between an item and a string", f"as in: {example}")
    if _kind(left, data) is int:
        fail(
            left.span,
            f"'{left.name}' is a number, and only strings have {_TEXT_TESTS[sign]}",
            "compare it with ==, < or in",
        )
    wanted = right.value
    if sign == "startswith":
        return left, lambda value: bool(value.startswith(wanted))
    if sign == "contains":
        return left, lambda value: wanted in value
    # The regular expression that fnmatch makes of a pattern takes linear time, however many stars it has.
    matches, is_wanted = compile_glob(wanted).match, sign == "=~"
    return left, lambda value: (matches(value) is not None) is is_wanted


def _comparison(condition: Comparison, data: DataColumns | None) -> RowFilter:
    left, right, sign = condition.left, condition.right, str(condition.operator)
    if sign in _TEXT_TESTS:
        name, text_test = _string_test(condition, data)
        return _of_strings(name, data, text_test)
    if not isinstance(left, Name):
        left, right, sign = right, left, _TURNED.get(sign, sign)
    if not isinstance(left, Name):
        fail(condition.span, "no item is in this comparison", _ITEMS)
    kind, compare, source = _kind(left, data), _COMPARE[sign], _column_of(left, data)
    if kind is str and sign not in ("==", "!="):
        fail(
            condition.span, f"'{left.name}' is a string, and strings have no order", "compare it with ==, !=, =~ or in"
        )
    if isinstance(right, Name):
        if {kind, _kind(right, data)} == {int, str}:
            fail(condition.span, f"of '{left.name}' and '{right.name}' one is a string, the other a number")
        return _of_two(source, _column_of(right, data), compare)
    match _constants(left, right, kind):
        case (int() as number,):
            is_signed = kind is None and (number < 0 or (left.name == _RESULT and left.type is None))
            return _of_numbers(source, compare, number, is_signed=is_signed)
        case (text,):
            if sign not in ("==", "!="):
                fail(condition.span, "strings have no order", "compare them with ==, !=, =~ or in")
            return _of_strings(left, data, lambda value: compare(value, text))
        case (text, code):
            return _tested(source, lambda value: compare(value, text if isinstance(value, str) else code))


def _membership(condition: Membership, data: DataColumns | None) -> RowFilter:
    name = condition.value
    if not isinstance(name, Name):
        fail(name.span, "this is not an item", _ITEMS)
    kind, is_wanted = _kind(name, data), not condition.is_negated
    choices = frozenset(each for choice in condition.choices for each in _constants(name, choice, kind))
    if all(isinstance(choice, str) for choice in choices):
        return _of_strings(name, data, lambda value: (value in choices) is is_wanted)
    return _tested(_column_of(name, data), lambda value: (value in choices) is is_wanted)


def _constants(name: Name, value: Value, kind: type[int | str] | None) -> tuple[int | str] | tuple[str, int]:
    """
    Return the constants to compare with an item or field of type ``kind``, None if its type is unknown.

    A character is a string, its code, or both. Raise ``SourceError`` for a constant of the other type.
    """
    match value:
        case Text(text) if kind is str or (kind is None and len(text) != 1):
            return (text,)
        case Text(text) if kind is None:
            return text, ord(text)
        case Text(text) if len(text) == 1:
            return (ord(text),)
        case Text():
            fail(value.span, f"'{name.name}' is a number, and this a string", "write 42, 0x2a, or a character: 'x'")
        case Number() if kind is str:
            fail(value.span, f"'{name.name}' is a string, and this a number", f'write "{value.span.text}"')
        case Number(number) if kind is int and number < 0:
            fail(value.span, "no item is negative")
        case Number(number):
            return (number,)
        case Name():
            fail(value.span, f"'{value.name}' is not a value", "an item can be compared with another one by ==, <, ...")
        case Memory() | StringAt() | Sum():
            raise AssertionError(value)  # rejected before compilation
    assert_never(value)


# The selection of records of a trace: counting without decoding, iteration, or the last records.


class Selection:
    """Selection of the records that all filters accept. Without filters, it has all records."""

    def __init__(self, filters: Iterable[RowFilter] = ()) -> None:
        self._filters = list(filters)
        self._wants = all_of(self._filters)

    def count(self, block: Block) -> int:
        """Return the number of selected records of a block."""
        count = 0
        for rows in rows_of(block):
            mask = self._wants(rows)
            count += mask.count(True) if isinstance(mask, list) else len(rows) if mask else 0
        return count

    def masked(self, block: Block) -> Iterator[tuple[BlockRows, list[bool] | None]]:
        """Iterate over groups of a block's rows with selected records, each with its mask, or None for all rows."""
        for rows in rows_of(block):
            mask = self._wants(rows)
            if not isinstance(mask, list):
                if mask:
                    yield rows, None
            elif True in mask:
                yield rows, mask

    def of_block(self, block: Block) -> Iterator[TraceRecord]:
        """Iterate over the selected records of a block."""
        if not self._filters:
            yield from block
            return
        for rows in self._in_order(block):
            for row in self._wanted(rows):
                yield rows.record(row)

    def records(self, found: Iterable[Block | LostRecords]) -> Iterator[TraceRecord | LostRecords]:
        """Iterate over the selected records of a trace, and over all notes of lost records."""
        for each in found:
            if isinstance(each, LostRecords):
                yield each
            else:
                yield from self.of_block(each)

    def last(self, found: Iterable[Block | LostRecords], count: int) -> list[TraceRecord | LostRecords]:
        """Return the last ``count`` selected records, and the notes of lost records among them."""
        kept: deque[tuple[BlockRows | _TableRows, Sequence[int]] | LostRecords] = deque()
        total = 0
        for each in found:
            if isinstance(each, LostRecords):
                kept.append(each)
                continue
            for rows in self._in_order(each):
                if wanted := self._wanted(rows):
                    kept.append((rows, wanted))
                    total += len(wanted)
            while kept and total - _size(kept[0]) >= count:
                total -= _size(kept.popleft())
        surplus = max(total - count, 0)
        result: list[TraceRecord | LostRecords] = []
        for part in kept:
            if isinstance(part, LostRecords):
                result.append(part)
                continue
            rows, wanted = part
            result += [rows.record(row) for row in wanted[surplus:]]
            surplus = 0  # only the first part that is kept has surplus records
        return result

    @staticmethod
    def _in_order(block: Block) -> Iterator[BlockRows | _TableRows]:
        if isinstance(block, TableBlock) and len(block.records.parts) > 1:
            return iter((_TableRows(block),))
        return rows_of(block)

    def _wanted(self, rows: BlockRows | _TableRows) -> Sequence[int]:
        mask = rows.mask(self._wants) if isinstance(rows, _TableRows) else self._wants(rows)
        if isinstance(mask, list):
            return list(itertools.compress(range(len(rows)), mask))
        return range(len(rows)) if mask else ()


class _TableRows:
    """The records of a table of several shapes, in their original order."""

    def __init__(self, block: TableBlock) -> None:
        self._order = block.records.order
        self._parts = [BlockRows(block, part) for part in block.records.parts]
        self._numbers: list[int] | None = None
        """The index of each record in its part."""

    def __len__(self) -> int:
        return len(self._order)

    def mask(self, wants: RowFilter) -> list[bool] | bool:
        """Return True for each record that a filter selects, or a single value if it is the same for all."""
        masks = [wants(rows) if rows else False for rows in self._parts]
        if not any(isinstance(mask, list) for mask in masks) and len(set(map(bool, masks))) == 1:
            return masks[0]
        spread = [repeated(mask, len(rows)) for rows, mask in zip(self._parts, masks, strict=True)]
        return list(in_order(self._order, spread))

    def record(self, row: int) -> TraceRecord:
        """Return the record in row ``row``, with its probepoint and time of writing."""
        if self._numbers is None:
            self._numbers = list(in_order(self._order, [range(len(rows)) for rows in self._parts]))
        return self._parts[self._order[row]].record(self._numbers[row])


def _size(part: tuple[BlockRows | _TableRows, Sequence[int]] | LostRecords) -> int:
    return 0 if isinstance(part, LostRecords) else len(part[1])
