"""What expressions compute is what a machine with numbers computes, whatever is in the registers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from dprobes.dwarf.variable_locations import (
    Choice,
    Computed,
    Frame,
    InMemory,
    InRegister,
    Number,
    Operation,
    RegisterContent,
    Unavailable,
    executed,
)
from unit.dwarf.conftest import read

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dprobes.dwarf.debug_file import Unit
    from dprobes.dwarf.variable_locations import Location, Node

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
    return executed(expression, unit, Frame(0, False, lambda: Unavailable("no frame")))


@pytest.fixture
def unit(program: Path) -> Unit:
    return next(read(program).units())


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
