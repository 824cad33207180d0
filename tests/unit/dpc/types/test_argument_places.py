# ruff: noqa: SIM300 - expected == actual
"""Where arguments are, by the examples and rules of the ABI (AMD64 supplement, 3.2.3)."""

from __future__ import annotations

import pytest

from dprobes.dpc.types.argument_places import (
    ArgumentPlace,
    argument_places,
    go_results,
    is_returned_in_memory,
    result_parts,
)
from dprobes.dpc.types.c_types import CHAR, INT, VOID, Array, CType, Floating, Integer, Member, Pointer, Record

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
LONG_DOUBLE = Floating("long double", 16)
FIELDS = Record("bits")
FIELDS.define([Member("low", INT, 3, 10, 0), Member("high", LONG, 0, 20, 40)], 8, 8)
COPIED = Record("copied", is_passed_by_address=True)
COPIED.define([Member("p", POINTER, 0)], 8, 8)


@pytest.mark.parametrize(
    ("parameters", "result", "places"),
    [
        ([INT, POINTER, CHAR], VOID, ["arg0", "arg1", "arg2"]),
        ([DOUBLE, INT, DOUBLE, INT], VOID, ["xmm0", "arg0", "xmm1", "arg1"]),
        ([INT] * 8, VOID, [*(f"arg{n}" for n in range(6)), 8, 16]),
        ([TWO, INT], VOID, ["arg0 arg1", "arg2"]),
        ([MIXED, INT], VOID, ["xmm0 arg0", "arg1"]),
        ([LARGE, INT, LARGE], VOID, [8, "arg0", 32]),
        ([INT], LARGE, ["arg1"]),
        ([INT], TWO, ["arg0"]),
        ([INT] * 5 + [TWO, INT], VOID, [*(f"arg{n}" for n in range(5)), 8, "arg5"]),
        ([PACKED, TEXT], VOID, [8, "arg0"]),
        ([LONG_DOUBLE, INT], VOID, [8, "arg0"]),
        ([INT] * 7 + [LONG_DOUBLE], VOID, [*(f"arg{n}" for n in range(6)), 8, 24]),
        ([Floating("__int128", 16), INT], VOID, ["arg0 arg1", "arg2"]),
        ([Floating("complex double", 16), DOUBLE], VOID, ["xmm0 xmm1", "xmm2"]),
        ([Floating("complex float", 8), DOUBLE], VOID, ["xmm0", "xmm1"]),
        ([Array(Floating("float", 4), 4), DOUBLE], VOID, ["xmm0", "xmm1"]),
        ([EMPTY, INT], VOID, ["", "arg0"]),
        ([FIELDS, INT], VOID, ["arg0", "arg1"]),
        ([INT], record(16, (LONG_DOUBLE, 0)), ["arg0"]),
    ],
)
def test_arguments_of_64_bits_are_in_registers_or_on_the_stack(
    parameters: list[CType], result: CType, places: list[str | int]
) -> None:
    expected = [
        ArgumentPlace(tuple(place.split())) if isinstance(place, str) else ArgumentPlace((), place) for place in places
    ]
    assert expected == argument_places(parameters, result, 8)


def test_objects_that_are_more_than_their_bytes_are_passed_by_address() -> None:
    places = argument_places([COPIED, INT], COPIED, 8)
    assert [ArgumentPlace(("arg1",), is_address=True), ArgumentPlace(("arg2",))] == places
    places = argument_places([COPIED, INT], VOID, 4)
    assert [ArgumentPlace((), 4, is_address=True), ArgumentPlace((), 8)] == places


@pytest.mark.parametrize(
    ("type_", "parts"),
    [
        (INT, [(0, 4, "retval")]),
        (DOUBLE, [(0, 8, "xmm0")]),
        (TWO, [(0, 8, "retval"), (8, 8, "rdx")]),
        (MIXED, [(0, 8, "xmm0"), (8, 8, "retval")]),
        (record(12, (DOUBLE, 0), (Floating("float", 4), 8)), [(0, 8, "xmm0"), (8, 4, "xmm1")]),
        (TEXT, [(0, 5, "retval")]),
        (LARGE, None),
        (COPIED, None),
        (LONG_DOUBLE, []),
        (record(16, (LONG_DOUBLE, 0)), []),
    ],
)
def test_results_are_in_registers_or_where_one_leads(type_: CType, parts: list[tuple[int, int, str]] | None) -> None:
    found = result_parts(type_, 8)
    assert parts == (None if found is None else [tuple(part) for part in found])


def test_results_of_programs_of_32_bits() -> None:
    assert ((0, 4, "retval"),) == result_parts(INT, 4)
    assert ((0, 4, "retval"), (4, 4, "edx")) == result_parts(Integer("long long", 8, is_signed=True, rank=5), 4)
    assert () == result_parts(DOUBLE, 4)
    assert result_parts(TWO, 4) is None


def test_results_of_go() -> None:
    text = record(16, (POINTER, 0), (LONG, 8))
    found = go_results([LONG, text, DOUBLE, Array(LONG, 2), CHAR])
    assert [
        ((0, 8, "rax"),),
        ((0, 8, "rbx"), (8, 8, "rcx")),
        ((0, 8, "xmm0"),),
        (),
        ((0, 1, "rdi"),),
    ] == found


def test_arguments_of_32_bits_are_on_the_stack() -> None:
    places = argument_places([INT, LONG, TWO, CHAR], VOID, 4)
    assert [4, 8, 16, 32] == [place.offset for place in places]


@pytest.mark.parametrize(
    ("type_", "expected"), [(LARGE, True), (PACKED, True), (TWO, False), (MIXED, False), (INT, False), (EMPTY, True)]
)
def test_what_is_returned_in_memory(type_: CType, *, expected: bool) -> None:
    assert expected == is_returned_in_memory(type_)
