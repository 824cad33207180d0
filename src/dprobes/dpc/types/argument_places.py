"""
Places of a function's arguments at its entry, and of its result at the return, by their types.

Rules: System V ABI, AMD64 Architecture Processor Supplement, 3.2.3 "Parameter Passing"; Intel386 Architecture Processor
Supplement, 2.2.3; Go's ABIInternal (cmd/compile/abi-internal.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, assert_never

from dprobes.dpc.types.c_types import (
    UNSIGNED_CHAR,
    Array,
    Enumeration,
    Floating,
    Integer,
    Network,
    Pointer,
    Record,
    Stack,
    String,
    Void,
    size_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.dpc.types.c_types import CType

__all__ = ["ArgumentPlace", "ResultPart", "argument_places", "go_results", "is_returned_in_memory", "result_parts"]

_REGISTERS = 6
_VECTORS = 8
_WIDE_MAX = 16
"""Maximum size in bytes of a structure that is passed in registers."""
_DEPTH_MAX = 16
_LEAVES_MAX = 64
_GO_REGISTERS = ("rax", "rbx", "rcx", "rdi", "rsi", "r8", "r9", "r10", "r11")
_GO_VECTORS = 15


class ArgumentPlace(NamedTuple):
    """
    Argument at the entry: in ``registers`` of 8 bytes each, or ``offset`` bytes above the stack pointer.

    Registers are ``arg0`` to ``arg5``, and ``xmm0`` to ``xmm7`` for floating-point numbers. With ``is_address``, the
    place contains the address of the argument.
    """

    registers: tuple[str, ...]
    offset: int | None = None
    is_address: bool = False


class ResultPart(NamedTuple):
    """``size`` bytes of a result, from ``offset`` on, in a register."""

    offset: int
    size: int
    register: str


def argument_places(parameters: Sequence[CType], result: CType, word_size: int) -> list[ArgumentPlace]:
    """Return where the ABI passes arguments of these types to a function that returns ``result``, in their order."""
    if word_size != 8:
        return list(_all_on_stack(parameters, result, word_size))
    free, vectors, offset = 0, 0, 8
    if is_returned_in_memory(result):
        free = 1  # the address of the result is a hidden first argument
    found: list[ArgumentPlace] = []
    for type_ in parameters:
        is_address = isinstance(type_, Record) and type_.is_passed_by_address
        classes = [True] if is_address else _classes(type_)
        integers = sum(classes)
        floats = len(classes) - integers
        if classes and free + integers <= _REGISTERS and vectors + floats <= _VECTORS:
            registers: list[str] = []
            for is_integer in classes:
                registers.append(f"arg{free}" if is_integer else f"xmm{vectors}")
                free += is_integer
                vectors += not is_integer
            found.append(ArgumentPlace(tuple(registers), is_address=is_address))
        elif isinstance(type_, Record) and not is_address and not any(_leaves(type_, 0, 0)):
            found.append(ArgumentPlace(()))  # a structure without members is not passed
        else:
            size = 8 if is_address else size_of(type_) or 8
            if size > 8 and _is_aligned_wide(type_):
                offset += (offset - 8) % 16  # the first stack argument, at 8, is aligned to 16
            found.append(ArgumentPlace((), offset, is_address=is_address))
            offset += -(-size // 8) * 8
    return found


def is_returned_in_memory(type_: CType) -> bool:
    """Return whether a 64-bit function receives the address for its result as a hidden first argument."""
    if not isinstance(type_, Record):
        return False
    return type_.is_passed_by_address or not (_classes(type_) or _is_long_double(type_))


def result_parts(type_: CType, word_size: int) -> tuple[ResultPart, ...] | None:
    """
    Return the registers of a result, or None if ``retval`` is the address of the result.

    The tuple is empty if no readable register contains the result. An example is a ``long double``, which is on the
    register stack of the x87 FPU.
    """
    size = size_of(type_) or word_size
    if word_size != 8:
        if isinstance(type_, Record):
            return None
        if isinstance(type_, Floating) or size > 2 * word_size:
            return ()
        return (ResultPart(0, min(size, 4), "retval"), ResultPart(4, size - 4, "edx"))[: 1 + (size > word_size)]
    if is_returned_in_memory(type_):
        return None
    integers, vectors = ["rdx", "retval"], ["xmm1", "xmm0"]
    return tuple(
        ResultPart(8 * number, min(8, size - 8 * number), (integers if is_integer else vectors).pop())
        for number, is_integer in enumerate(_classes(type_))
    )


def go_results(types: Sequence[CType]) -> list[tuple[ResultPart, ...]]:
    """Return the registers of the results, with these types, of a Go function; empty for a result on the stack."""
    integers, vectors = 0, 0
    found: list[tuple[ResultPart, ...]] = []
    for type_ in types:
        leaves = list(_leaves(type_, 0, 0))
        floats = sum(isinstance(leaf, Floating) for _, leaf in leaves)
        words = len(leaves) - floats
        if not _is_for_go(type_, 0) or integers + words > len(_GO_REGISTERS) or vectors + floats > _GO_VECTORS:
            found.append(())
            continue
        parts: list[ResultPart] = []
        for offset, leaf in leaves:
            is_float = isinstance(leaf, Floating)
            register = f"xmm{vectors}" if is_float else _GO_REGISTERS[integers]
            integers, vectors = integers + (not is_float), vectors + is_float
            parts.append(ResultPart(offset, size_of(leaf) or 8, register))
        found.append(tuple(parts))
    return found


def _is_for_go(type_: CType, depth: int) -> bool:
    """Return whether Go passes a type in registers: arrays of several elements and complex numbers are on the stack."""
    match type_:
        case Array(element, count):
            return count in (0, 1) and _is_for_go(element, depth)
        case Record():
            return depth < _DEPTH_MAX and all(_is_for_go(member.type, depth + 1) for member in type_.members or ())
        case Floating(size=size):
            return size <= 8
    return True


def _all_on_stack(parameters: Sequence[CType], result: CType, word_size: int) -> Iterator[ArgumentPlace]:
    offset = word_size
    if isinstance(result, Record):
        offset += word_size  # the address for the result comes first
    for type_ in parameters:
        is_address = isinstance(type_, Record) and type_.is_passed_by_address
        yield ArgumentPlace((), offset, is_address=is_address)
        size = word_size if is_address else size_of(type_) or word_size
        offset += -(-size // word_size) * word_size


def _is_long_double(type_: CType) -> bool:
    """Return whether a structure consists of a ``long double`` only."""
    leaves = [leaf for _, leaf in _leaves(type_, 0, 0)]
    return len(leaves) == 1 and isinstance(leaves[0], Floating) and leaves[0].size > 8


def _is_aligned_wide(type_: CType) -> bool:
    """Return whether a type is aligned to 16 bytes."""
    if isinstance(type_, Record):
        return any(_is_aligned_wide(leaf) for _, leaf in _leaves(type_, 0, 0))
    return isinstance(type_, Floating) and type_.size == _WIDE_MAX and "complex" not in type_.name


def _classes(type_: CType) -> list[bool]:
    """Return the registers of a type: True for a general one, False for a vector one. Types in memory have none."""
    match type_:
        case Integer() | Enumeration() | Pointer():
            return [True]
        case Floating(name, size):
            if "int" in name:
                return [True, True] if size == _WIDE_MAX else []
            if "complex" in name:
                return [False] * (size // 8) if size <= _WIDE_MAX else []
            if "128" in name:
                return [False]
            return [False] if size <= 8 else []  # a long double is in memory
        case Array():
            return [False] if (size_of(type_) or 0) in (8, _WIDE_MAX) else []  # only vectors are passed as arrays
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
                if offset % min(width, 8) or (isinstance(leaf, Floating) and width > 8 and "complex" not in leaf.name):
                    return []
                if not isinstance(leaf, Floating):
                    classes[min(offset // 8, len(classes) - 1)] = True
            return classes
    return []


def _leaves(type_: CType, offset: int, depth: int) -> Iterator[tuple[int, CType]]:
    """
    Iterate over the scalar parts of a type at ``offset``: (offset in bytes, type).

    A bit field gives its first and last byte. ``depth`` is the number of types around it.
    """
    if depth > _DEPTH_MAX:
        return
    match type_:
        case Record():
            for member in type_.members or ():
                if member.bits is not None:
                    first = offset + member.offset + member.shift // 8
                    yield first, UNSIGNED_CHAR
                    yield first + (member.shift % 8 + member.bits - 1) // 8, UNSIGNED_CHAR
                else:
                    yield from _leaves(member.type, offset + member.offset, depth + 1)
        case Array(element, count):
            size = size_of(element) or 1
            for number in range(min(count or 0, _LEAVES_MAX)):
                yield from _leaves(element, offset + number * size, depth + 1)
        case Void() | Integer() | Floating() | Enumeration() | Pointer() | String() | Stack() | Network():
            yield offset, type_
        case _:
            assert_never(type_)
