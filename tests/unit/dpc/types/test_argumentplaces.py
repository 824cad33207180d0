# ruff: noqa: SIM300 - expected == actual
"""Where arguments are, by the examples and rules of the ABI (AMD64 supplement, 3.2.3)."""

from __future__ import annotations

import pytest

from dprobes.dpc.types.argumentplaces import ArgumentPlace, argument_places, is_returned_in_memory
from dprobes.dpc.types.ctype import CHAR, INT, VOID, Array, CType, Floating, Integer, Member, Pointer, Record

LONG = Integer("long", 8, is_signed=True, rank=4)
DOUBLE = Floating("double", 8)
POINTER = Pointer(VOID, 8)


def record(size: int, *members: tuple[CType, int]) -> Record:
    made = Record("r")
    made.define([Member(f"m{n}", type_, offset) for n, (type_, offset) in enumerate(members)], size, 8)
    return made


TWO = record(16, (INT, 0), (LONG, 8))
MIXED = record(16, (DOUBLE, 0), (INT, 8))
LARGE = record(24, (LONG, 0), (LONG, 8), (LONG, 16))
PACKED = record(9, (CHAR, 0), (LONG, 1))
TEXT = record(5, (Array(CHAR, 5), 0))
EMPTY = record(0)


@pytest.mark.parametrize(
    ("parameters", "result", "places"),
    [
        ([INT, POINTER, CHAR], VOID, [((0,), None), ((1,), None), ((2,), None)]),
        ([DOUBLE, INT, DOUBLE, INT], VOID, [((None,), None), ((0,), None), ((None,), None), ((1,), None)]),
        ([INT] * 8, VOID, [*(((n,), None) for n in range(6)), ((), 8), ((), 16)]),
        ([TWO, INT], VOID, [((0, 1), None), ((2,), None)]),
        ([MIXED, INT], VOID, [((None, 0), None), ((1,), None)]),
        ([LARGE, INT, LARGE], VOID, [((), 8), ((0,), None), ((), 32)]),
        ([INT], LARGE, [((1,), None)]),
        ([INT], TWO, [((0,), None)]),
        ([INT] * 5 + [TWO, INT], VOID, [*(((n,), None) for n in range(5)), ((), 8), ((5,), None)]),
        ([PACKED, TEXT], VOID, [((), 8), ((0,), None)]),
        ([Floating("long double", 16), INT], VOID, [((), 8), ((0,), None)]),
        ([Floating("__int128", 16), INT], VOID, [((0, 1), None), ((2,), None)]),
    ],
)
def test_arguments_of_64_bits_are_in_registers_or_on_the_stack(
    parameters: list[CType], result: CType, places: list[tuple[tuple[int | None, ...], int | None]]
) -> None:
    assert [ArgumentPlace(*place) for place in places] == argument_places(parameters, result, 8)


def test_arguments_of_32_bits_are_on_the_stack() -> None:
    places = argument_places([INT, LONG, TWO, CHAR], VOID, 4)
    assert [4, 8, 16, 32] == [place.offset for place in places]


@pytest.mark.parametrize(
    ("type_", "expected"), [(LARGE, True), (PACKED, True), (TWO, False), (MIXED, False), (INT, False), (EMPTY, True)]
)
def test_what_is_returned_in_memory(type_: CType, *, expected: bool) -> None:
    assert expected == is_returned_in_memory(type_)
