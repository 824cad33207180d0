"""
Filters of records: which of them somebody wants to see. ``filters.parser`` has the language.

A filter is compiled into functions of ``columns.Rows``, so that it looks at many records at once, and only at the items
that it names. No comparison with an item that a record lacks holds, ``!=`` and ``not in`` included.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from dprobes.diagnostics import did_you_mean
from dprobes.filters.parser import parse
from dprobes.filters.tree import (
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
    values_of,
)
from dprobes.globs import compile_glob
from dprobes.trace.columns import ITEM_COLUMNS, TEXT_COLUMNS
from dprobes.trace.fieldfilter import field_comparison, field_membership

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dprobes.trace.columns import Column, Rows
    from dprobes.trace.fieldfilter import DataColumns

    RowFilter = Callable[[Rows], "Mask"]

__all__ = ["FILTER_NAMES", "Mask", "all_of", "compile_filter", "program_filter", "time_filter"]

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
