"""
Filters of records: which of them somebody wants to see. ``filters.filter_language`` has the language.

A filter is compiled into functions of ``columns.Rows``, so that it looks at many records at once, and only at the items
that it names. No comparison with an item that a record lacks holds, ``!=`` and ``not in`` included.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

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
    Text,
    Value,
    fail,
    parse,
    values_of,
)
from dprobes.globs import compile_glob
from dprobes.record.packed_records import in_order
from dprobes.trace.packed_blocks import MixedBlock
from dprobes.trace.record_columns import ITEM_COLUMNS, TEXT_COLUMNS, PackedRows, rows_of
from dprobes.trace.trace_content import LostRecords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dprobes.trace.packed_blocks import Block
    from dprobes.trace.record_columns import Column, Rows
    from dprobes.trace.trace_content import TraceRecord

__all__ = ["FILTER_NAMES", "DataColumn", "Selection", "all_of", "compile_filter", "program_filter", "time_filter"]

# Comparisons of a filter with fields of records' data: what a template, a handler or ``word0`` names.
#
# What type a field has is known when there are records, so the other side of a comparison decides: a number is compared
# with numbers, a string with strings. No comparison with what a record lacks, or has of the other type, holds.


DataColumn = list[Any] | int | str | None
"""The values of all rows, None where a row has none; or the one that all have."""

_RESULT = "retval"
"""What a function returns is compared with a sign, as at a hit."""


class DataColumns(Protocol):
    """Find fields in the data of records."""

    def note(self, name: Name) -> None:
        """Know that a filter names a field."""

    def see(self, rows: Rows) -> None:
        """Know the program of some records, of which a filter need not look at every field."""

    def column(self, rows: Rows, name: Name, *, as_text: bool) -> DataColumn:
        """Return a column of numbers and strings as they are, or of the strings that are shown."""

    def word_size(self, rows: Rows) -> int:
        """Return how many bytes a number has where nothing else is said."""


def field_comparison(
    condition: Comparison, data: DataColumns, compare: dict[str, Callable[[Any, Any], bool]]
) -> RowFilter:
    """Return a comparison in which a field is; ``compare`` are the operators."""
    left, right, sign = condition.left, condition.right, str(condition.operator)
    if sign in ("=~", "!~", "startswith", "contains"):
        if not isinstance(left, Name) or not isinstance(right, Text):
            example = '"py*"' if "~" in sign else '"py"'
            fail(condition.span, f"'{sign}' goes between an item and a string", f"as in: name {sign} {example}")
        return _of_strings(left, _string_test(sign, right.value), data)
    if not isinstance(left, Name):
        left, right, sign = right, left, {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(sign, sign)
    assert isinstance(left, Name), "there is a field in the comparison"
    test = compare[sign]
    match right:
        case Text(text) if len(text) != 1:
            if sign not in ("==", "!="):
                fail(condition.span, "strings have no order", "compare them with ==, !=, =~ or in")
            return _of_strings(left, lambda value: test(value, text), data)
        case Text(text):
            code = ord(text)
            return _of_values(left, lambda value: test(value, text if isinstance(value, str) else code), data)
        case Number(number):
            is_signed = number < 0 or (left.name == _RESULT and left.type is None)
            return _of_numbers(left, test, number, data, is_signed=is_signed)
        case Name():
            return _of_two_fields(left, right, test, data)
    raise AssertionError(right)  # memory is refused before


def field_membership(condition: Membership, data: DataColumns) -> RowFilter:
    """Return the question whether a field is one of several values."""
    name = condition.value
    assert isinstance(name, Name), "there is a field in it"
    choices = frozenset(each for choice in condition.choices for each in _constants(choice))
    is_wanted = not condition.is_negated
    if all(isinstance(choice, Text) and len(choice.value) != 1 for choice in condition.choices):
        return _of_strings(name, lambda value: (value in choices) is is_wanted, data)
    return _of_values(name, lambda value: (value in choices) is is_wanted, data)


def _constants(choice: Value) -> tuple[int | str, ...]:
    match choice:
        case Text(text):
            return (text, ord(text)) if len(text) == 1 else (text,)
        case Number(number):
            return (number,)
        case Name():
            fail(
                choice.span, f"'{choice.name}' is not a value", "an item can be compared with another one by ==, <, ..."
            )
    raise AssertionError(choice)  # memory is refused before


def _string_test(sign: str, wanted: str) -> Callable[[str], bool]:
    if sign == "startswith":
        return lambda value: value.startswith(wanted)
    if sign == "contains":
        return lambda value: wanted in value
    matches, is_wanted = compile_glob(wanted).match, sign == "=~"
    return lambda value: (matches(value) is not None) is is_wanted


def _of_strings(name: Name, test: Callable[[str], bool], data: DataColumns) -> RowFilter:
    def tested(rows: Rows) -> Mask:
        return _mask(data.column(rows, name, as_text=True), lambda value: isinstance(value, str) and test(value))

    return tested


def _of_values(name: Name, test: Callable[[Any], bool], data: DataColumns) -> RowFilter:
    def tested(rows: Rows) -> Mask:
        return _mask(data.column(rows, name, as_text=False), lambda value: value is not None and test(value))

    return tested


def _mask(column: DataColumn, test: Callable[[Any], bool]) -> Mask:
    """Return what a test says, which is made once for each value."""
    if not isinstance(column, list):
        return test(column)
    verdicts = {value: test(value) for value in set(column)}
    return [verdicts[value] for value in column]


def _of_numbers(
    name: Name, test: Callable[[Any, Any], bool], number: int, data: DataColumns, *, is_signed: bool
) -> RowFilter:
    """Return the comparison with a number; with ``is_signed`` a number of a whole word has a sign."""

    def tested(rows: Rows) -> Mask:
        column = data.column(rows, name, as_text=False)
        top = 1 << 8 * data.word_size(rows) - 1

        def verdict(value: Any) -> bool:
            if not isinstance(value, int):
                return False
            return test(value - 2 * top if is_signed and top <= value < 2 * top else value, number)

        if not isinstance(column, list):
            return verdict(column)
        if is_signed or set(map(type, column)) != {int}:
            return [verdict(value) for value in column]
        return [test(value, number) for value in column]

    return tested


def _of_two_fields(left: Name, right: Name, test: Callable[[Any, Any], bool], data: DataColumns) -> RowFilter:
    def verdict(a: Any, b: Any) -> bool:
        return a is not None and isinstance(a, int) == isinstance(b, int) and b is not None and test(a, b)

    def tested(rows: Rows) -> Mask:
        a, b = (data.column(rows, each, as_text=False) for each in (left, right))
        spread = [column if isinstance(column, list) else [column] * len(rows) for column in (a, b)]
        return list(map(verdict, *spread))

    return tested


if TYPE_CHECKING:
    RowFilter = Callable[[Rows], "Mask"]

FILTER_NAMES = (*ITEM_COLUMNS, *TEXT_COLUMNS)
"""What filters can name."""

Mask = bool | list[bool]
"""For each row whether it is wanted; one value if that is the same for all."""


def compile_filter(text: str, *, called: str = "filter", data: DataColumns | None = None) -> RowFilter:
    """
    Return a filter as a function; raise ``SourceError``, in which the text is named ``called``.

    With ``data`` a name that no item has is that of a field of records' data.
    """
    condition = parse(text, called=called)
    for value in values_of(condition):
        _check_value(value, has_data=data is not None)
        if data is not None and isinstance(value, Name) and _is_field(value):
            data.note(value)
    wants = _compiled(condition, data)
    if data is None:
        return wants

    def seen(rows: Rows) -> Mask:
        data.see(rows)
        return wants(rows)

    return seen


_FUNCTION = "function"
"""The item that each record of a sampler or a watchpoint has of its own, as far as somebody names addresses."""

_ALIASES = {"comm": "name"}
"""Names that filters at hits have for an item, as users of other tools do."""


def _check_value(value: Value, *, has_data: bool) -> None:
    """Raise ``SourceError`` for a value that records do not have."""
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
    """Return whether a name is of data, or has a type as only data has."""
    return _column(name) not in FILTER_NAMES


def all_of(filters: Iterable[RowFilter]) -> RowFilter:
    """Return a filter that wants what all of ``filters`` want."""
    return _joined(list(filters), stops_at=False)


def program_filter(name: str) -> RowFilter:
    """Return a filter of what a program is called."""
    return _of_one("program", lambda value: bool(value == name))


def time_filter(since: int | None, until: int | None) -> RowFilter:
    """
    Return a filter of wall-clock time, in nanoseconds since 1970; ``until`` itself is not wanted any more.

    A record without a time has that of its being written.
    """

    def within(rows: Rows) -> Mask:
        offset = rows.block.wall_offset
        first = 0 if since is None else since - offset
        last = 1 << 65 if until is None else until - offset
        match rows.column("time"):
            case list() as times:
                return [first <= time < last for time in times]
            case int() as time:
                return first <= time < last
        match rows.written():
            case int() as written:
                return first <= written < last
            case times:
                return [first <= written < last for written in times]

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
        case Membership(Name() as name) if data is not None and (_is_field(name) or name.name == _FUNCTION):
            return field_membership(condition, data)
        case Membership():
            return _membership(condition)
        case Comparison(left, _, right) if data is not None and any(
            isinstance(each, Name) and (_is_field(each) or each.name == _FUNCTION) for each in (left, right)
        ):
            return field_comparison(condition, data, _COMPARE)
        case Comparison():
            return _comparison(condition)


def _joined(parts: Sequence[RowFilter], *, stops_at: bool) -> RowFilter:
    """Return the "and" of parts, whose result is known when all rows are False, or the "or" with ``stops_at`` True."""
    join = operator.or_ if stops_at else operator.and_
    goes_on = not stops_at

    def joined(rows: Rows) -> Mask:
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
    def negated(rows: Rows) -> Mask:
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

# Comparing in place takes half the time of calling a function.
_COMPARE_NUMBERS: dict[str, Callable[[Any, int], list[bool]]] = {
    "==": lambda column, number: [value == number for value in column],
    "!=": lambda column, number: [value != number for value in column],
    "<": lambda column, number: [value < number for value in column],
    "<=": lambda column, number: [value <= number for value in column],
    ">": lambda column, number: [value > number for value in column],
    ">=": lambda column, number: [value >= number for value in column],
}


def _comparison(condition: Comparison) -> RowFilter:
    left, right, sign = condition.left, condition.right, str(condition.operator)
    if sign in ("=~", "!~"):
        return _glob(condition)
    if sign in ("startswith", "contains"):
        return _part(condition)
    if not isinstance(left, Name):
        left, right, sign = right, left, _TURNED.get(sign, sign)
    if not isinstance(left, Name):
        fail(condition.span, "no item is in this comparison", _ITEMS)
    if _is_text(left) and sign not in ("==", "!="):
        fail(
            condition.span, f"'{left.name}' is a string, and strings have no order", "compare it with ==, !=, =~ or in"
        )
    if isinstance(right, Name):
        if _is_text(left) != _is_text(right):
            fail(condition.span, f"of '{left.name}' and '{right.name}' one is a string, the other a number")
        return _of_two(_column(left), _column(right), _COMPARE[sign])
    constant = _constant_for(left, right)
    compare = _COMPARE[sign]
    if isinstance(constant, str):
        return _of_one(_column(left), lambda value: compare(value, constant))
    return _of_number(_column(left), sign, constant)


def _membership(condition: Membership) -> RowFilter:
    name = condition.value
    if not isinstance(name, Name):
        fail(name.span, "this is not an item", _ITEMS)
    choices = frozenset(_constant_for(name, choice) for choice in condition.choices)
    is_wanted = not condition.is_negated
    return _of_one(_column(name), lambda value: (value in choices) is is_wanted)


def _glob(condition: Comparison) -> RowFilter:
    left, right = condition.left, condition.right
    if not isinstance(left, Name) or not isinstance(right, Text):
        fail(condition.span, f"'{condition.operator}' goes between an item and a string", 'as in: name =~ "py*"')
    if not _is_text(left):
        fail(left.span, f"'{left.name}' is a number, and only strings have a pattern", "compare it with ==, < or in")
    # What fnmatch makes of a pattern takes linear time, however many stars it has.
    matches = compile_glob(right.value).match
    is_wanted = condition.operator == "=~"
    return _of_one(_column(left), lambda value: (matches(value) is not None) is is_wanted)


def _part(condition: Comparison) -> RowFilter:
    """Return the test whether a string begins with another one, or contains it."""
    left, right = condition.left, condition.right
    if not isinstance(left, Name) or not isinstance(right, Text):
        fail(
            condition.span,
            f"'{condition.operator}' goes between an item and a string",
            f'as in: name {condition.operator} "py"',
        )
    if not _is_text(left):
        fail(left.span, f"'{left.name}' is a number, and only strings have parts", "compare it with ==, < or in")
    wanted = right.value
    if condition.operator == "startswith":
        return _of_one(_column(left), lambda value: bool(value.startswith(wanted)))
    return _of_one(_column(left), lambda value: wanted in value)


def _column(name: Name) -> str:
    return _ALIASES.get(name.name, name.name)


def _of_number(name: str, sign: str, number: int) -> RowFilter:
    """Return the comparison of an item with a number."""
    compare, compare_all = _COMPARE[sign], _COMPARE_NUMBERS[sign]

    def compared(rows: Rows) -> Mask:
        column = rows.column(name)
        if column is None:
            return False
        return compare_all(column, number) if isinstance(column, list) else compare(column, number)

    return compared


def _of_one(name: str, test: Callable[[Any], bool]) -> RowFilter:
    """Return the test of an item, made once for each value that occurs."""

    def tested(rows: Rows) -> Mask:
        column = rows.column(name)
        if column is None:
            return False
        if not isinstance(column, list):
            return test(column)
        verdicts = {value: test(value) for value in set(column)}
        return [verdicts[value] for value in column]

    return tested


def _of_two(left: str, right: str, compare: Callable[[Any, Any], bool]) -> RowFilter:
    """Return the comparison of two items."""

    def compared(rows: Rows) -> Mask:
        a, b = rows.column(left), rows.column(right)
        if a is None or b is None:
            return False
        return list(map(compare, _spread(a, len(rows)), _spread(b, len(rows))))

    return compared


def _spread(column: Column, count: int) -> Sequence[object]:
    return column if isinstance(column, list) else [column] * count


def _is_text(name: Name) -> bool:
    return _column(name) in TEXT_COLUMNS


def _constant_for(name: Name, value: Value) -> int | str:
    """Return the constant that an item is compared with."""
    match value:
        case Text(text) if _is_text(name):
            return text
        case Text(text) if len(text) == 1:
            return ord(text)
        case Text():
            fail(value.span, f"'{name.name}' is a number, and this a string", "write 42, 0x2a, or a character: 'x'")
        case Number() if _is_text(name):
            fail(value.span, f"'{name.name}' is a string, and this a number", f'write "{value.span.text}"')
        case Name():
            fail(value.span, f"'{value.name}' is not a value", "an item can be compared with another one by ==, <, ...")
    assert isinstance(value, Number), "records have nothing else, as was checked"
    if value.value < 0:
        fail(value.span, "no item is negative")
    return value.value


_ITEMS = f"items are {', '.join(FILTER_NAMES)}"


# The selection of records of a trace: counted without decoding them, or one by one, or the last ones.


class Selection:
    """Select the records that all of some filters want; without any, all records."""

    def __init__(self, filters: Iterable[RowFilter] = ()) -> None:
        self._filters = list(filters)
        self._wants = all_of(self._filters)

    def count(self, block: Block) -> int:
        """Return how many records of a block are wanted."""
        count = 0
        for rows in rows_of(block):
            mask = self._wants(rows)
            count += mask.count(True) if isinstance(mask, list) else len(rows) if mask else 0
        return count

    def masked(self, block: Block) -> Iterator[tuple[Rows, list[bool] | None]]:
        """Iterate over the rows of a block of which some are wanted, each with which ones; None says all of them."""
        for rows in rows_of(block):
            mask = self._wants(rows)
            if not isinstance(mask, list):
                if mask:
                    yield rows, None
            elif True in mask:
                yield rows, mask

    def of_block(self, block: Block) -> Iterator[TraceRecord]:
        """Iterate over the wanted records of a block."""
        if not self._filters:
            yield from block
            return
        for rows in self._in_order(block):
            for row in self._wanted(rows):
                yield rows.record(row)

    def records(self, found: Iterable[Block | LostRecords]) -> Iterator[TraceRecord | LostRecords]:
        """Iterate over the wanted records of a trace; where some were lost is always wanted."""
        for each in found:
            if isinstance(each, LostRecords):
                yield each
            else:
                yield from self.of_block(each)

    def last(self, found: Iterable[Block | LostRecords], count: int) -> list[TraceRecord | LostRecords]:
        """Return the last ``count`` wanted records, and where some were lost among them."""
        kept: deque[tuple[Rows | _MixedRows, Sequence[int]] | LostRecords] = deque()
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
            surplus = 0  # what is kept first holds one of the last records
        return result

    @staticmethod
    def _in_order(block: Block) -> Iterator[Rows | _MixedRows]:
        return iter((_MixedRows(block),)) if isinstance(block, MixedBlock) else rows_of(block)

    def _wanted(self, rows: Rows | _MixedRows) -> Sequence[int]:
        mask = rows.mask(self._wants) if isinstance(rows, _MixedRows) else self._wants(rows)
        if isinstance(mask, list):
            return list(itertools.compress(range(len(rows)), mask))
        return range(len(rows)) if mask else ()


class _MixedRows:
    """The records of a block of mixed ones, in order."""

    def __init__(self, block: MixedBlock) -> None:
        self._order = block.records.order
        self._parts = [PackedRows(each) for each in block.blocks()]
        self._numbers: list[int] | None = None
        """The number that each record has among those of its part."""

    def __len__(self) -> int:
        return len(self._order)

    def mask(self, wants: RowFilter) -> list[bool] | bool:
        """Return which records a filter wants."""
        masks = [wants(rows) if rows else False for rows in self._parts]
        if not any(isinstance(mask, list) for mask in masks) and len(set(map(bool, masks))) == 1:
            return masks[0]
        spread = [
            mask if isinstance(mask, list) else [mask] * len(rows)
            for rows, mask in zip(self._parts, masks, strict=True)
        ]
        return list(in_order(self._order, spread))

    def record(self, row: int) -> TraceRecord:
        """Return one record."""
        if self._numbers is None:
            self._numbers = list(in_order(self._order, [range(len(rows)) for rows in self._parts]))
        return self._parts[self._order[row]].record(self._numbers[row])


def _size(part: tuple[Rows | _MixedRows, Sequence[int]] | LostRecords) -> int:
    return 0 if isinstance(part, LostRecords) else len(part[1])
