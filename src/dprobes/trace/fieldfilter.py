"""
Comparisons of a filter with fields of records' data: what a template, a handler or ``word0`` names.

What type a field has is known when there are records, so the other side of a comparison decides: a number is compared
with numbers, a string with strings. No comparison with what a record lacks, or has of the other type, holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dprobes.filters.tree import Comparison, Membership, Name, Number, Text, Value, fail
from dprobes.globs import compile_glob

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.trace.columns import Rows

    Mask = bool | list[bool]
    RowFilter = Callable[[Rows], Mask]

__all__ = ["DataColumn", "DataColumns", "field_comparison", "field_membership"]

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
            return _of_two(left, right, test, data)
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


def _of_two(left: Name, right: Name, test: Callable[[Any, Any], bool], data: DataColumns) -> RowFilter:
    def verdict(a: Any, b: Any) -> bool:
        return a is not None and isinstance(a, int) == isinstance(b, int) and b is not None and test(a, b)

    def tested(rows: Rows) -> Mask:
        a, b = (data.column(rows, each, as_text=False) for each in (left, right))
        spread = [column if isinstance(column, list) else [column] * len(rows) for column in (a, b)]
        return list(map(verdict, *spread))

    return tested
