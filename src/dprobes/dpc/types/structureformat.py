"""
``%S``: a structure printed whole, ``{next=0x0, state=IDLE, name="x", values=[1, 2]}``, as conversions of its members.

The result is what somebody could have written: a longer format, and an expression for each value. An array of numbers
is one value, a list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.syntax import tree
from dprobes.dpc.types.ctype import Array, Enumeration, Integer, Pointer, Record
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from dprobes.dpc.types.ctype import CType

__all__ = ["VALUES_MAX", "Expansion", "FirstElements", "expanded", "is_text"]

VALUES_MAX = 64
"""Values of one structure: each is an item of the record."""

_ELEMENTS_MAX = 8
_DEPTH_MAX = 4


class Expansion(NamedTuple):
    """A format without ``%S``, and its values."""

    format: str
    values: tuple[tree.Expression | FirstElements, ...]


class FirstElements(NamedTuple):
    """The first elements of an array, which are printed as a list."""

    array: tree.Expression
    shown: int


def is_text(type_: CType) -> bool:
    """Return whether a type is an array of characters, which is printed as text."""
    return (
        isinstance(type_, Array)
        and type_.count is not None
        and isinstance(type_.element, Integer)
        and type_.element.size == 1
        and "char" in type_.element.name
    )


def expanded(expression: tree.Expression, record: Record, word_size: int) -> Expansion:
    """
    Return what prints a structure.

    Dots stand for members behind the first ``VALUES_MAX`` values, for values that do not fit into a word, and for
    virtual bases.
    """
    values: list[tree.Expression | FirstElements] = []
    return Expansion(_Expander(word_size, values).record(expression, record, 0), tuple(values))


class _Expander:
    def __init__(self, word_size: int, values: list[tree.Expression | FirstElements]) -> None:
        self._word_size = word_size
        self._values = values

    def record(self, expression: tree.Expression, record: Record, depth: int) -> str:
        """Return the format of a structure."""
        values = self._values
        parts: list[str] = []
        for member in record.members or ():
            if len(values) >= VALUES_MAX:
                parts.append("...")
                break
            if member.name:
                place = tree.MemberAccess(expression, member.name, is_arrow=False, span=expression.span)
                parts.append(f"{member.name}={self._value(place, member.type, depth)}")
            elif isinstance(member.type, Record) and member.type.members is None:
                parts.append(f"{member.type.tag}=...")  # a virtual base
            elif isinstance(member.type, Record) and depth < _DEPTH_MAX:
                # The members of an unnamed structure are members of this one.
                parts.append(self.record(expression, member.type, depth + 1)[1:-1])
        return f"{{{', '.join(parts)}}}"

    def _value(self, place: tree.Expression, type_: CType, depth: int) -> str:
        values = self._values
        match type_:
            case Integer(size=size) if size <= self._word_size:
                values.append(place)
                return _conversion_of(type_)
            case Enumeration() if type_.base.size <= self._word_size:
                values.append(place)
                return _conversion_of(type_)
            case Pointer():
                values.append(place)
                return _conversion_of(type_)
            case Record() if depth < _DEPTH_MAX:
                return self.record(place, type_, depth + 1)
            case Array() if is_text(type_) and type_.count:
                values.append(place)
                return '"%s"'
            case Array(Integer() | Enumeration() | Pointer() as element, count) if count:
                values.append(FirstElements(place, min(count, _ELEMENTS_MAX)))
                return f"[{_conversion_of(element)}{', ...' if count > _ELEMENTS_MAX else ''}]"
            case Array(element, count) if depth < _DEPTH_MAX and count is not None:
                parts = []
                for number in range(min(count, _ELEMENTS_MAX)):
                    if len(values) >= VALUES_MAX:
                        break
                    index = tree.Number(number, "", is_decimal=True, span=place.span)
                    parts.append(self._value(tree.Index(place, index, place.span), element, depth + 1))
                return f"[{', '.join(parts)}{', ...' if len(parts) < count else ''}]"
        return "..."


def _conversion_of(type_: Integer | Enumeration | Pointer) -> str:
    """Return the conversion that shows a number of a type."""
    match type_:
        case Integer(size=size):
            return "%d" if type_.is_signed or type_.is_bool or size < 4 else "%u"
        case Enumeration():
            return "%v" if type_.values else "%d"
    return "%p"
