"""Where a variable or parameter is at an instruction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dwarf.entries import UNREADABLE
from dprobes.dwarf.expressions import Frame, executed
from dprobes.dwarf.locationlists import listed_expressions
from dprobes.dwarf.locationtree import Computed, Known, Location, Number, Unavailable
from dprobes.dwarf.numbers import At

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.dwarf.entries import Entry
    from dprobes.dwarf.ranges import AddressRange

__all__ = ["frame_at", "is_listed", "known_ranges", "location_at"]

_OPTIMIZED_OUT = Unavailable("optimized out")


def frame_at(function: Entry | None, address: int, entry: int | None) -> Frame:
    """Return what expressions need to know of an instruction of a function whose first one is at ``entry``."""

    def base() -> Location:
        if function is None or not function.has(At.FRAME_BASE):
            return Unavailable("not described: its function has no frame")
        place = Frame(address, address == entry, lambda: Unavailable("a frame that is described by itself"))
        return _expression_at(function, At.FRAME_BASE, place)

    return Frame(address, address == entry, base)


def is_listed(variable: Entry) -> bool:
    """Return whether a variable is at different places at different instructions."""
    return variable.offset_in_section(At.LOCATION) is not None or variable.index_in_lists(At.LOCATION) is not None


def location_at(variable: Entry, frame: Frame) -> Location:
    """Return where a variable is at an instruction, or its constant value; raise ``TargetError`` if unreadable."""
    for each in variable.origins():
        if each.has(At.LOCATION):
            return _expression_at(each, At.LOCATION, frame)
        if each.has(At.CONST_VALUE):
            return _constant(each)
    return _OPTIMIZED_OUT


def known_ranges(variable: Entry) -> Sequence[AddressRange]:
    """Return the link addresses at which a list says where a variable is, without its values at entries."""
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
        return executed(expression, unit, frame)
    except UNREADABLE:
        unit.file.malformed(f"the location of the entry at {entry.offset:#x} cannot be understood")


def _chosen(entry: Entry, attribute: int, address: int) -> bytes | None:
    """Return the expression of a list that holds at an instruction."""
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
