"""What expressions compute is what a machine with numbers computes, whatever is in the registers."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.dwarf.dwarf_numbers import At, Encoding, Tag
from dprobes.dwarf.variable_locations import Frame, location_of
from dprobes.errors import TargetError
from dprobes.target.unwind.dwarf_expressions import (
    Choice,
    Computed,
    FrameAddressOf,
    InMemory,
    InRegister,
    Number,
    Operation,
    RegisterContent,
    Unavailable,
)
from unit.dwarf.conftest import compiled, read

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dprobes.dwarf.debug_entries import Unit
    from dprobes.target.unwind.dwarf_expressions import Location, Node

MASK = (1 << 64) - 1

LARGER = bytes.fromhex("7b00 12 0820 24 36 16 14 0820 24 2b 280100 16 13 35 1c 9f")
"""A number that is at least 6, less 5, as gcc writes it (glibc, ``__makecontext``)."""

SWAPPED = bytes.fromhex(
    "7500 48 30 1502 48 1503 1c 25 08ff 1a 1502 24 21 16 12 30 29 280600 38 1c 16 2fe5ff 13 16 13 9f"
)
"""The bytes of a number in the other order, in a loop (glibc, ``inet_netof``)."""


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def value_of(node: Node, registers: Mapping[int, int]) -> int:
    """Return what a tree is with some registers."""
    match node:
        case Number(value):
            return value
        case RegisterContent(number):
            return registers[number]
        case Choice(condition, chosen, otherwise):
            return value_of(chosen if value_of(condition, registers) else otherwise, registers)
        case Operation(operator, left, right) if right is not None:
            a, b = value_of(left, registers), value_of(right, registers)
            found = {
                "+": a + b, "-": a - b, "&": a & b, "|": a | b, "<<": a << b if b < 64 else 0, ">>": a >> b,
                ">s": signed(a) > signed(b), "==": a == b,
            }  # fmt: skip
            return int(found[operator]) & MASK
    raise AssertionError(node)


def of(unit: Unit, expression: bytes) -> Location:
    return location_of(expression, unit, Frame(0, False, lambda: Unavailable("no frame")))


@pytest.fixture(scope="module")
def unit_of_program(programs: Path) -> Unit:
    return next(read(compiled(programs, "d5-O2")).units())


@pytest.fixture
def unit(unit_of_program: Unit) -> Unit:
    return unit_of_program


def test_a_jump_that_depends_on_a_register_is_a_choice(unit: Unit) -> None:
    found = of(unit, LARGER)
    assert isinstance(found, Computed)
    for count in (0, 1, 5, 6, 7, 100, 1 << 30):
        assert value_of(found.value, {11: count}) == max(count, 6) - 5


def test_a_loop_that_counts_ends(unit: Unit) -> None:
    found = of(unit, SWAPPED)
    assert isinstance(found, Computed)
    chance = random.Random(5)
    for number in (chance.randrange(1 << 32) for _ in range(100)):
        expected = int.from_bytes(number.to_bytes(4, "little"), "big")
        assert value_of(found.value, {5: number}) & 0xFFFFFFFF == expected


def test_places_in_memory_may_be_a_choice(unit: Unit) -> None:
    # rdi ? rsi + 8 : rdx
    found = of(unit, bytes.fromhex("7500 280500 7100 2f0200 7408"))
    assert isinstance(found, InMemory)
    assert value_of(found.address, {5: 1, 4: 100, 1: 7}) == 108  # rsi + 8
    assert value_of(found.address, {5: 0, 4: 100, 1: 7}) == 7


def test_what_is_of_two_kinds_is_not_known(unit: Unit) -> None:
    # rdi ? in memory at rdx : the value of rdx
    found = of(unit, bytes.fromhex("7100 7500 280100 9f"))
    assert found == Unavailable("here or there, as it comes")


def test_many_ways_are_not_followed(unit: Unit) -> None:
    # rdi ? nop : nop, again and again
    found = of(unit, bytes.fromhex("750028010096") * 40 + bytes.fromhex("7500"))
    assert found == Unavailable("computed in too many ways")


@pytest.mark.parametrize("jump", ["2fff7f", "2f0080", "31280010", "2f00"])
def test_jumps_out_of_an_expression_are_refused(unit: Unit, jump: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        of(unit, bytes.fromhex(jump))


def test_loops_without_an_end_are_refused(unit: Unit) -> None:
    with pytest.raises(ValueError, match="an expression that does not end"):
        of(unit, bytes.fromhex("2ffdff"))


def test_a_register_is_a_place(unit: Unit) -> None:
    assert of(unit, b"\x53") == InRegister(3)


def number(unit: Unit, size: int, encoding: int) -> bytes:
    """Return a base type of a unit as an operand: ULEB128 distance from the unit."""
    for entry in unit.root.children():
        if entry.tag == Tag.BASE_TYPE and (entry.number(At.BYTE_SIZE), entry.number(At.ENCODING)) == (size, encoding):
            distance = entry.offset - unit.offset
            return bytes((distance & 0x7F | 0x80, distance >> 7 & 0x7F | 0x80, distance >> 14))
    raise AssertionError((size, encoding))


@pytest.mark.parametrize(
    ("size", "encoding", "code", "expected"),
    [
        (4, Encoding.SIGNED, "31 25", 0x7FFFFFFC),  # shr fills up with zeros, whatever the type
        (4, Encoding.SIGNED, "31 26", -4),  # shra
        (1, Encoding.UNSIGNED_CHAR, "31 26", 0xFC),  # with copies of the sign, and a type that has none
        (4, Encoding.SIGNED, "33 1d", -2),  # mod: -8 % 3
        (8, Encoding.UNSIGNED, "32 1b", 0x7FFFFFFFFFFFFFFC),  # div of a whole word without a sign
        (8, Encoding.UNSIGNED, "30 2d", 0),  # lt: not below 0
        (8, Encoding.UNSIGNED, "30 2b", 1),  # gt
        (8, Encoding.SIGNED, "30 2d", 1),
        (8, Encoding.UNSIGNED, "19", -8),  # abs
        (4, Encoding.SIGNED, "19", 8),
        (1, Encoding.UNSIGNED_CHAR, "1f", 8),  # neg of 0xf8
        (4, Encoding.UNSIGNED, "36 24", 0xFFFFFE00),  # shl
    ],
)
def test_an_operation_counts_as_its_type_does(unit: Unit, size: int, encoding: int, code: str, expected: int) -> None:
    # -8 as a number of the type, then the operation with another one
    expression = b"\x09\xf8\xa8" + number(unit, size, encoding)
    for each in bytes.fromhex(code):
        expression += bytes((each,))
        if 0x30 <= each < 0x50:
            expression += b"\xa8" + number(unit, size, encoding)
    assert of(unit, expression + b"\x9f") == Computed(Number(expected & MASK))


def test_numbers_wider_than_a_word_are_not_computed(unit: Unit) -> None:
    found = of(unit, b"\x31\xa8" + number(unit, 8, Encoding.FLOAT) + b"\x9f")
    assert found == Unavailable("computed with floating-point numbers, or wide ones")


def test_values_at_the_entry_are_not_in_each_other(unit: Unit) -> None:
    # as deep as a block of 60 000 bytes may have them
    expression = b"\x75\x00"
    while len(expression) < 60_000:
        size = len(expression)
        expression = b"\xa3" + bytes((size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14)) + expression
    with pytest.raises(ValueError, match="operation 0xa3"):
        location_of(expression, unit, Frame(0, True, lambda: Unavailable("no frame")))


@given(code=st.binary(max_size=40))
def test_any_bytes_end_in_a_place_or_an_error(unit_of_program: Unit, code: bytes) -> None:
    with contextlib.suppress(ValueError, IndexError, TargetError):
        location_of(code, unit_of_program, Frame(0, True, lambda: InMemory(FrameAddressOf(0))))
