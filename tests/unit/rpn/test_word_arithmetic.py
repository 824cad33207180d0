"""The one definition of arithmetic: it has every instruction, and what it gives is what C gives."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.rpn import instruction_set
from dprobes.rpn.instruction_set import Group, OperandKind
from dprobes.rpn.word_arithmetic import (
    BINARY,
    COMPARISONS,
    DIVISIONS,
    FILLS,
    MAX_VALUE,
    MIN_VALUE,
    SHIFTS,
    complement,
    limits,
    mask_of,
    signed,
)

SIGNED = {32: ctypes.c_int32, 64: ctypes.c_int64}
UNSIGNED = {32: ctypes.c_uint32, 64: ctypes.c_uint64}

widths = st.sampled_from((32, 64))


@st.composite
def words(draw: st.DrawFn) -> tuple[int, int, int]:
    """Two words and their width; edges more often than others."""
    bits = draw(widths)
    edges = st.sampled_from((0, 1, 2, bits - 1, bits, bits + 1, 1 << (bits - 1), mask_of(bits), mask_of(bits - 1)))
    word = edges | st.integers(0, mask_of(bits))
    return draw(word), draw(word), bits


def test_the_tables_have_the_instructions_of_arithmetic_and_no_others() -> None:
    operators = {row.operator for row in instruction_set.ROWS if row.group is Group.ARITHMETIC}
    assert operators == {*BINARY, *COMPARISONS, *DIVISIONS, *SHIFTS, *FILLS, "neg"}


def test_instructions_with_a_count_have_two_forms() -> None:
    syntaxes = {row.syntax for row in instruction_set.ROWS if row.operand_kind is OperandKind.BITS}
    assert syntaxes == {f"{name} <bits>" for name in (*SHIFTS, *FILLS)}


@given(words())
def test_binary_operations_are_those_of_unsigned_words(given_words: tuple[int, int, int]) -> None:
    a, b, bits = given_words
    for name, operation in BINARY.items():
        result = operation.function(a, b)
        assert UNSIGNED[bits](result).value == result & mask_of(bits)
        assert operation.wraps or result == result & mask_of(bits), name
        assert not operation.commutes or result == operation.function(b, a), name
        assert result == eval(f"{a} {operation.symbol} {b}"), name


@given(words())
def test_comparisons_are_those_of_c(given_words: tuple[int, int, int]) -> None:
    a, b, bits = given_words
    left, right = SIGNED[bits](a).value, SIGNED[bits](b).value
    assert COMPARISONS["eq"].of_words(a, b, bits) == (left == right)
    assert COMPARISONS["lt"].of_words(a, b, bits) == (left < right)
    assert COMPARISONS["ltu"].of_words(a, b, bits) == (a < b)


@given(words())
def test_division_is_that_of_c(given_words: tuple[int, int, int]) -> None:
    a, b, bits = given_words
    if b == 0:
        return
    quotient, remainder = DIVISIONS["div"].function(a, b)
    assert (a, True) == (quotient * b + remainder, 0 <= remainder < b)
    dividend, divisor = SIGNED[bits](a).value, SIGNED[bits](b).value
    quotient, remainder = DIVISIONS["idiv"].function(dividend, divisor)
    assert dividend == quotient * divisor + remainder
    assert abs(remainder) < abs(divisor)
    assert remainder == 0 or (remainder < 0) == (dividend < 0)
    assert [name for name, division in DIVISIONS.items() if division.is_signed] == ["idiv"]


@given(words())
def test_shifts_and_rotations_work_on_the_string_of_bits(given_words: tuple[int, int, int]) -> None:
    value, count, bits = given_words
    text = f"{value:0{bits}b}"
    few, turn = min(count, bits), count % bits
    expected = {
        "shl": text[few:] + "0" * few,
        "shr": "0" * few + text[: bits - few],
        "rol": text[turn:] + text[:turn],
        "ror": text[bits - turn :] + text[: bits - turn],
    }
    found = {name: f"{function(value, count, bits) & mask_of(bits):0{bits}b}" for name, function in SHIFTS.items()}
    assert found == expected


@given(words(), st.data())
def test_fills_work_on_the_string_of_bits(given_words: tuple[int, int, int], data: st.DataObject) -> None:
    value, _, bits = given_words
    n = data.draw(st.integers(1, bits))
    text = f"{value:0{bits}b}"
    bit = text[bits - n]
    expected = {
        "pbl": bit * (bits - n) + text[bits - n :],
        "pbr": text[: bits - n + 1] + bit * (n - 1),
        "pzl": "0" * (bits - n) + text[bits - n :],
        "pzr": text[: bits - n + 1] + "0" * (n - 1),
    }
    found = {name: f"{function(value, n, bits) & mask_of(bits):0{bits}b}" for name, function in FILLS.items()}
    assert found == expected


@given(words())
def test_signs(given_words: tuple[int, int, int]) -> None:
    value, _, bits = given_words
    assert SIGNED[bits](value).value == signed(value, bits)
    assert value ^ mask_of(bits) == complement(value) & mask_of(bits)


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        ((0, 255), {"size": 1}),
        ((0, 65535), {"size": 2}),
        ((-32768, 32767), {"size": 2, "is_signed": True}),
        ((0, MAX_VALUE), {"size": 8}),
        ((MIN_VALUE, (1 << 63) - 1), {"size": 8, "is_signed": True}),
    ],
)
def test_limits(expected: tuple[int, int], arguments: dict[str, Any]) -> None:
    assert expected == limits(**arguments)
