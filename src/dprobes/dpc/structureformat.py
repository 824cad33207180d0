"""
``%S``: a structure printed whole, ``{next=0x0, state=IDLE, name="x", values=[1, 2]}``, as conversions of its members.

The result is what somebody could have written: a longer format, and an expression for each value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.dpc import tree
from dprobes.dpc.ctype import Array, Enumeration, Integer, Pointer, Record, size_of

if TYPE_CHECKING:
    from dprobes.dpc.ctype import CType

__all__ = ["VALUES_MAX", "Expansion", "expanded", "is_text"]

VALUES_MAX = 64
"""Values of one structure: each is an item of the record."""

_ELEMENTS_MAX = 8
_DEPTH_MAX = 4


class Expansion(NamedTuple):
    """A format without ``%S``, and its values."""

    format: str
    values: tuple[tree.Expression, ...]


def is_text(type_: CType) -> bool:
    """Return whether a type is an array of characters, which is printed as text."""
    return (
        isinstance(type_, Array)
        and type_.count is not None
        and isinstance(type_.element, Integer)
        and type_.element.size == 1
        and "char" in type_.element.name
    )


def expanded(expression: tree.Expression, record: Record) -> Expansion:
    """Return what prints a structure; dots stand for members behind the first ``VALUES_MAX`` values."""
    values: list[tree.Expression] = []
    return Expansion(_record(expression, record, values, 0), tuple(values))


def _record(expression: tree.Expression, record: Record, values: list[tree.Expression], depth: int) -> str:
    parts: list[str] = []
    for member in record.members or ():
        if len(values) >= VALUES_MAX:
            parts.append("...")
            break
        if member.name:
            place = tree.MemberAccess(expression, member.name, is_arrow=False, span=expression.span)
            parts.append(f"{member.name}={_value(place, member.type, values, depth)}")
        elif isinstance(member.type, Record) and depth < _DEPTH_MAX:
            # The members of an unnamed structure are members of this one.
            parts.append(_record(expression, member.type, values, depth + 1)[1:-1])
    return f"{{{', '.join(parts)}}}"


def _value(place: tree.Expression, type_: CType, values: list[tree.Expression], depth: int) -> str:
    match type_:
        case Integer(size=size) if size_of(type_):
            values.append(place)
            return "%d" if type_.is_signed or type_.is_bool or size < 4 else "%u"
        case Enumeration():
            values.append(place)
            return "%s" if type_.values else "%d"
        case Pointer():
            values.append(place)
            return "%p"
        case Record() if depth < _DEPTH_MAX:
            return _record(place, type_, values, depth + 1)
        case Array() if is_text(type_) and type_.count:
            values.append(place)
            return '"%s"'
        case Array(element, count) if depth < _DEPTH_MAX and count is not None:
            parts = []
            for number in range(min(count, _ELEMENTS_MAX)):
                if len(values) >= VALUES_MAX:
                    break
                index = tree.Number(number, "", is_decimal=True, span=place.span)
                parts.append(_value(tree.Index(place, index, place.span), element, values, depth + 1))
            return f"[{', '.join(parts)}{', ...' if len(parts) < count else ''}]"
    return "..."
