"""
Location of a variable or parameter at an instruction, from its debug information (DWARF 5, 2.6).

Locations are symbolic: they name registers and memory of a process, which are read only at a hit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.dwarf.address_lists import listed_expressions
from dprobes.dwarf.debug_entries import UNREADABLE
from dprobes.dwarf.dwarf_numbers import At, Encoding
from dprobes.target.unwind.dwarf_expressions import (
    BaseType,
    Computed,
    Expressible,
    FrameAddressOf,
    InMemory,
    InRegister,
    Known,
    LinkAddress,
    Loaded,
    NowhereError,
    Number,
    RegisterContent,
    Unavailable,
    executed,
    moved,
    size_of_tree,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.dwarf.address_lists import AddressRange
    from dprobes.dwarf.debug_entries import Entry, Unit
    from dprobes.target.unwind.dwarf_expressions import Location, Node

__all__ = ["Frame", "frame_at", "is_listed", "known_ranges", "location_at", "location_of"]

_UNSIGNED = (Encoding.ADDRESS, Encoding.BOOLEAN, Encoding.UNSIGNED, Encoding.UNSIGNED_CHAR, Encoding.UTF)
_SIGNED = (Encoding.SIGNED, Encoding.SIGNED_CHAR)


class Frame(NamedTuple):
    """
    The context of an expression: the link address ``address``, in a function.

    ``base`` returns the frame base of the function. At the first instruction, ``is_entry``, registers have their values
    from the entry of the function.
    """

    address: int
    is_entry: bool
    base: Callable[[], Location]


def location_of(expression: bytes, unit: Unit, frame: Frame) -> Location:
    """
    Return the location that a DWARF expression of a unit computes in a frame.

    Raise IndexError or ValueError if it is malformed.
    """
    return executed(expression, _expressible(unit, frame)) if expression else Unavailable("optimized out")


def _expressible(unit: Unit, frame: Frame) -> Expressible:
    """Return the context in which the expressions of a unit are evaluated at an instruction, ``frame``."""
    word, file = unit.sizes.address, unit.file

    def memory(address: Node, size: int) -> Node:
        if size not in (1, 2, 4, 8):
            raise ValueError(f"{size} bytes of memory")
        return Loaded(address, size, size_of_tree(address) + 1)

    def frame_base(distance: int) -> Node:
        return moved(_node_of(frame.base()), distance, (1 << 8 * word) - 1)

    def entry_value(expression: bytes) -> Node:
        """Return the value of an expression at the entry of the function. It is known only there."""
        if not frame.is_entry:
            raise NowhereError("known only at the entry of the function", is_at_entry=True)
        without = {name: base for name, base in bases.items() if name != "entry_value"}
        return _node_of(
            executed(expression, about._replace(bases=without)) if expression else Unavailable("optimized out")
        )

    def type_at(offset: int) -> BaseType:
        entry = unit.entry(unit.offset + offset)
        encoding = entry.number(At.ENCODING)
        size = entry.number(At.BYTE_SIZE) if encoding in (*_SIGNED, *_UNSIGNED) else None
        return BaseType(size or 0, encoding in _SIGNED)

    bases: dict[str, Callable[..., Node]] = {
        "fbreg": frame_base,
        "call_frame_cfa": lambda: FrameAddressOf(frame.address),
        "addrx": lambda index: LinkAddress(file.indexed_address(unit, index)),
        "constx": lambda index: Number(file.indexed_address(unit, index)),
        "entry_value": entry_value,
    }
    about = Expressible(word, unit.sizes.order, RegisterContent, memory, LinkAddress, bases, type_at)
    return about


def _node_of(place: Location) -> Node:
    """
    Return the address of a location in memory, or the content of a register, for use in another expression.

    Raise ``NowhereError`` if the location is unavailable, ValueError for any other kind.
    """
    match place:
        case InMemory(node):
            return node
        case InRegister(number):
            return RegisterContent(number)
        case Unavailable(reason):
            raise NowhereError(reason)
    raise ValueError("a place that is neither memory nor a register")


_OPTIMIZED_OUT = Unavailable("optimized out")


def frame_at(function: Entry | None, address: int, entry: int | None) -> Frame:
    """Return the context of an instruction in a function whose first instruction is at ``entry``."""

    def base() -> Location:
        if function is None or not function.has(At.FRAME_BASE):
            return Unavailable("not described: its function has no frame")
        place = Frame(address, address == entry, lambda: Unavailable("a frame that is described by itself"))
        return _expression_at(function, At.FRAME_BASE, place)

    return Frame(address, address == entry, base)


def is_listed(variable: Entry) -> bool:
    """Return whether a variable has a location list, which gives different locations for different instructions."""
    return variable.offset_in_section(At.LOCATION) is not None or variable.index_in_lists(At.LOCATION) is not None


def location_at(variable: Entry, frame: Frame) -> Location:
    """
    Return the location of a variable at an instruction, or its constant value.

    Raise ``TargetError`` if the debug information is malformed.
    """
    for each in variable.origins():
        if each.has(At.LOCATION):
            return _expression_at(each, At.LOCATION, frame)
        if each.has(At.CONST_VALUE):
            return _constant(each)
    return _OPTIMIZED_OUT


def known_ranges(variable: Entry) -> Sequence[AddressRange]:
    """Return the link addresses for which a list has a variable's location, except for values at function entries."""
    found = listed_expressions(variable, At.LOCATION) if variable.has(At.LOCATION) else None
    ranges: list[AddressRange] = []
    for start, end, expression in found or ():
        if start is not None and start < end and expression and expression[0] not in (0xA3, 0xF3, 0xF2, 0xA0, 0xFA):
            if ranges and ranges[-1][1] == start:
                start, _ = ranges.pop()  # noqa: PLW2901 - the two are one
            ranges.append((start, end))
    return ranges


def _expression_at(entry: Entry, attribute: int, frame: Frame) -> Location:
    unit = entry.unit
    expression = entry.block(attribute)
    if expression is None:
        expression = _chosen(entry, attribute, frame.address)
    if expression is None:
        return _OPTIMIZED_OUT
    try:
        return location_of(expression, unit, frame)
    except UNREADABLE:
        unit.file.malformed(f"the location of the entry at {entry.offset:#x} cannot be understood")


def _chosen(entry: Entry, attribute: int, address: int) -> bytes | None:
    """
    Return the DWARF expression that a location list, ``attribute`` of ``entry``, has for a link address.

    Return the list's default, or else None, if no range contains the address.
    """
    otherwise = None
    for start, end, expression in listed_expressions(entry, attribute) or ():
        if start is None:
            otherwise = expression
        elif start <= address < end:
            return expression
    return otherwise


def _constant(entry: Entry) -> Location:
    if (number := entry.number(At.CONST_VALUE)) is not None:
        return Computed(Number(number & (1 << 8 * entry.unit.sizes.address) - 1))
    if (data := entry.block(At.CONST_VALUE)) is not None:
        return Known(data)
    text = entry.text(At.CONST_VALUE)
    return Known(text.encode("utf-8", "surrogateescape") + b"\0") if text is not None else _OPTIMIZED_OUT
