"""
What a filter says, as data: conditions that join comparisons of values.

``parser`` makes it of a text. What a name stands for is known to those who evaluate a filter: ``trace.filter`` on
records, ``handlerfilter`` at a hit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NoReturn

from dprobes.diagnostics import Diagnostic, Severity
from dprobes.errors import SourceError
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.rpn.numbertypes import NumberType
    from dprobes.source import Span

__all__ = [
    "And",
    "Comparison",
    "Condition",
    "Membership",
    "Memory",
    "Name",
    "Not",
    "Number",
    "Operator",
    "Or",
    "StringAt",
    "Sum",
    "Text",
    "Value",
    "fail",
    "values_of",
]

Operator = Literal["==", "!=", "<", "<=", ">", ">=", "=~", "!~", "startswith", "contains"]


@dataclass(frozen=True, slots=True)
class Name:
    """An item of records, a register, a field of a tracepoint; of a number with ``type`` only the low bits count."""

    name: str
    span: Span
    type: NumberType | None = None


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is written."""

    value: int
    span: Span


@dataclass(frozen=True, slots=True)
class Text:
    """A string in quotes."""

    value: str
    span: Span


@dataclass(frozen=True, slots=True)
class Sum:
    """An address so many bytes behind another one, or before it."""

    base: Value
    addend: int
    span: Span


@dataclass(frozen=True, slots=True)
class Memory:
    """The number of ``size`` bytes that is in memory at an address."""

    address: Value
    size: int
    span: Span
    type: NumberType | None = None


@dataclass(frozen=True, slots=True)
class StringAt:
    """The string that is in memory at an address, at most ``limit`` bytes of it where that is given."""

    address: Value
    limit: int | None
    span: Span


Value = Name | Number | Text | Sum | Memory | StringAt


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compare two values."""

    left: Value
    operator: Operator
    right: Value
    span: Span


@dataclass(frozen=True, slots=True)
class Membership:
    """Ask whether a value is one of some, or none of them."""

    value: Value
    choices: tuple[Value, ...]
    is_negated: bool
    span: Span


@dataclass(frozen=True, slots=True)
class Not:
    """Turn a condition round."""

    condition: Condition


@dataclass(frozen=True, slots=True)
class And:
    """Ask for all conditions."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """Ask for one of the conditions."""

    conditions: tuple[Condition, ...]


Condition = Comparison | Membership | Not | And | Or


def values_of(condition: Condition) -> Iterator[Value]:
    """Iterate over the values that a condition compares, in the order in which they are written."""
    match condition:
        case And(conditions) | Or(conditions):
            for each in conditions:
                yield from values_of(each)
        case Not(inner):
            yield from values_of(inner)
        case Comparison(left, _, right):
            yield from _with_parts(left)
            yield from _with_parts(right)
        case Membership(value, choices):
            yield from _with_parts(value)
            for choice in choices:
                yield from _with_parts(choice)


def _with_parts(value: Value) -> Iterator[Value]:
    yield value
    match value:
        case Sum(part) | Memory(part) | StringAt(part):
            yield from _with_parts(part)


def fail(span: Span, message: str, hint: str | None = None) -> NoReturn:
    """Raise ``SourceError`` for a place in a filter."""
    raise SourceError((Diagnostic(Severity.ERROR, message, span, hint=hint),))
