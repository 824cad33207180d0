"""Expressions of unwind tables: each operation, and bytes that mean nothing."""

from __future__ import annotations

import contextlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import TargetError
from dprobes.target.unwind.stack_walk import evaluate

MEMORY = bytes(range(1, 65))
BASE = 0x1000


class FakeImage:
    """64 bytes of memory."""

    word_size = 8
    byte_order = sys.byteorder

    def read(self, address: int, n: int) -> bytes:
        if not BASE <= address <= address + n <= BASE + len(MEMORY):
            raise TargetError("no memory")
        return MEMORY[address - BASE : address - BASE + n]


def value(*code: int, initial: int | None = None) -> int:
    return evaluate(bytes(code), {0: 100, 7: BASE, 16: 0x401020}, FakeImage(), initial)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ((0x35,), 5),  # lit5
        ((0x4F,), 31),  # lit31
        ((0x70, 0x7F), 99),  # breg0 -1
        ((0x92, 16, 0), 0x401020),  # bregx
        ((0x08, 0xFF), 255),  # const1u
        ((0x09, 0xFF), 2**64 - 1),  # const1s
        ((0x0B, 0x00, 0xFF), 2**64 - 256),  # const2s
        ((0x0C, 1, 0, 0, 0x80), 0x80000001),  # const4u
        ((0x10, 0x80, 0x01), 128),  # constu
        ((0x11, 0x7E), 2**64 - 2),  # consts
        ((0x77, 8, 0x06), 0x100F0E0D0C0B0A09),  # breg7 8, deref
        ((0x77, 8, 0x94, 2), 0x0A09),  # deref_size
        ((0x33, 0x23, 4), 7),  # plus_uconst
        ((0x33, 0x35, 0x22), 8),  # plus
        ((0x33, 0x35, 0x1C), 2**64 - 2),  # minus
        ((0x33, 0x35, 0x1E), 15),  # mul
        ((0x3F, 0x33, 0x1A), 3),  # and
        ((0x33, 0x34, 0x21), 7),  # or
        ((0x33, 0x31, 0x27), 2),  # xor
        ((0x33, 0x34, 0x24), 48),  # shl
        ((0x4F, 0x32, 0x25), 7),  # shr
        ((0x11, 0x78, 0x31, 0x26), 2**64 - 4),  # shra of -8 by 1
        ((0x11, 0x79, 0x32, 0x1B), 2**64 - 3),  # -7 / 2, towards zero
        ((0x37, 0x34, 0x1D), 3),  # mod
        ((0x33, 0x1F), 2**64 - 3),  # neg
        ((0x30, 0x20), 2**64 - 1),  # not
        ((0x11, 0x7B, 0x19), 5),  # abs
        ((0x31, 0x32, 0x13), 1),  # drop
        ((0x31, 0x32, 0x14), 1),  # over
        ((0x31, 0x32, 0x33, 0x15, 2), 1),  # pick
        ((0x31, 0x32, 0x16), 1),  # swap
        ((0x31, 0x32, 0x33, 0x17), 2),  # rot
        ((0x32, 0x12, 0x22), 4),  # dup
        ((0x31, 0x11, 0x7F, 0x2B), 1),  # gt: 1 > -1
        ((0x31, 0x11, 0x7F, 0x2D), 0),  # lt
        ((0x31, 0x31, 0x29), 1),  # eq
        ((0x2F, 1, 0, 0x31, 0x32), 2),  # skip over lit1
        ((0x31, 0x28, 1, 0, 0x33, 0x34), 4),  # bra, taken
        ((0x33, 0x96), 3),  # nop
    ],
)
def test_an_operation_does_what_the_standard_says(code: tuple[int, ...], expected: int) -> None:
    assert value(*code) == expected


def test_the_frame_address_is_on_the_stack_at_first() -> None:
    assert value(0x23, 8, initial=0x20) == 0x28


def test_the_frame_address_of_a_stub_of_the_procedure_linkage_table() -> None:
    # DW_CFA_def_cfa_expression of binutils: rsp + 8, and 8 more once the stub has pushed its number.
    code = (0x77, 8, 0x80, 0, 0x3F, 0x1A, 0x3B, 0x2A, 0x33, 0x24, 0x22)
    for place, frame in ((0, BASE + 8), (10, BASE + 8), (11, BASE + 16), (15, BASE + 16)):
        assert evaluate(bytes(code), {7: BASE, 16: 0x401020 + place}, FakeImage()) == frame


@pytest.mark.parametrize(
    "code",
    [(0x2F, 0xFD, 0xFF), (0x31, 0x2F, 0xFC, 0xFF)],  # jumps to itself, and to lit1 for ever
)
def test_an_expression_ends(code: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not end"):
        value(*code)


def test_what_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="register 3 is not known"):
        value(0x73, 0)
    with pytest.raises(TargetError, match="no memory"):
        value(0x30, 0x06)
    with pytest.raises(ValueError, match="operation 0x9c"):
        value(0x31, 0x32, 0x9C)


@given(code=st.binary(max_size=40))
def test_any_bytes_end_in_a_number_or_an_error(code: bytes) -> None:
    with contextlib.suppress(ValueError, IndexError, TargetError):
        assert 0 <= evaluate(code, {0: 1, 7: BASE}, FakeImage()) < 2**64
