"""
Where the arguments of a function are when it is entered, by the types of its parameters.

Rules: System V ABI, AMD64 Architecture Processor Supplement, 3.2.3 "Parameter Passing"; Intel386 Architecture Processor
Supplement, 2.2.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.types.ctype import Array, Enumeration, Floating, Integer, Pointer, Record, size_of
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.dpc.types.ctype import CType

__all__ = ["ArgumentPlace", "argument_places", "is_returned_in_memory"]

_REGISTERS = 6
_VECTORS = 8
_WIDE_MAX = 16
"""Bytes of the largest structure that is in registers."""
_DEPTH_MAX = 16
_LEAVES_MAX = 64


class ArgumentPlace(NamedTuple):
    """
    An argument at the entry: from ``registers`` on, one for each 8 bytes, or ``offset`` bytes above the stack pointer.

    Registers are those of ``arg0`` to ``arg5`` by their numbers; None is one for floating-point numbers.
    """

    registers: tuple[int | None, ...]
    offset: int | None = None


def argument_places(parameters: Sequence[CType], result: CType, word_size: int) -> list[ArgumentPlace]:
    """Return where arguments are; ``result`` is the type that is returned."""
    if word_size != 8:
        return list(_all_on_stack(parameters, word_size))
    free, vectors, offset = 0, 0, 8
    if is_returned_in_memory(result):
        free = 1  # where to is the first argument, which nobody wrote
    found: list[ArgumentPlace] = []
    for type_ in parameters:
        classes = _classes(type_)
        integers = sum(classes)
        floats = len(classes) - integers
        if classes and free + integers <= _REGISTERS and vectors + floats <= _VECTORS:
            registers: list[int | None] = []
            for is_integer in classes:
                registers.append(free if is_integer else None)
                free += is_integer
            vectors += floats
            found.append(ArgumentPlace(tuple(registers)))
        else:
            found.append(ArgumentPlace((), offset))
            offset += -(-(size_of(type_) or 8) // 8) * 8
    return found


def is_returned_in_memory(type_: CType) -> bool:
    """Return whether a function of 64 bits is told by its first argument where to put what it returns."""
    return isinstance(type_, Record) and not _classes(type_)


def _all_on_stack(parameters: Sequence[CType], word_size: int) -> Iterator[ArgumentPlace]:
    offset = word_size
    for type_ in parameters:
        yield ArgumentPlace((), offset)
        offset += -(-(size_of(type_) or word_size) // word_size) * word_size


def _classes(type_: CType) -> list[bool]:
    """Return of each 8 bytes of a type whether they are in a register for integers; empty if it is in memory."""
    match type_:
        case Integer() | Enumeration() | Pointer():
            return [True]
        case Floating(name, size):
            if "int" in name:
                return [True, True] if size == _WIDE_MAX else []
            return [False] if size <= 8 else []  # a long double is in memory
        case Record():
            size = size_of(type_) or 0
            if not 0 < size <= _WIDE_MAX:
                return []
            classes = [False] * -(-size // 8)
            leaves = list(_leaves(type_, 0, 0))
            if not leaves or len(leaves) > _LEAVES_MAX:
                return []
            for offset, leaf in leaves:
                width = size_of(leaf) or 1
                if offset % min(width, 8) or (isinstance(leaf, Floating) and width > 8):
                    return []
                if not isinstance(leaf, Floating):
                    classes[min(offset // 8, len(classes) - 1)] = True
            return classes
    return []


def _leaves(type_: CType, offset: int, depth: int) -> Iterator[tuple[int, CType]]:
    """Give what a structure consists of in the end, with offsets."""
    if depth > _DEPTH_MAX:
        return
    match type_:
        case Record():
            for member in type_.members or ():
                yield from _leaves(member.type, offset + member.offset, depth + 1)
        case Array(element, count):
            size = size_of(element) or 1
            for number in range(min(count or 0, _LEAVES_MAX)):
                yield from _leaves(element, offset + number * size, depth + 1)
        case _:
            yield offset, type_
