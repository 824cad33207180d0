"""
Words and the results of arithmetic instructions on them: the single definition for every back end.

A word is an unsigned number of 32 or 64 bits. The result of a function counts modulo the word, and the caller that
stores it truncates it. The interpreter calls the functions, the translation writes the operators' text, and the
lowering to eBPF folds constants with them. Parameters are named by their meaning, not by their place on the stack.

=============  =====================  =======================================================================
``BINARY``     (val1, val2)           val1 is the top of the stack; the same for every width
``COMPARISONS``  (val1, val2, bits)     1 if the comparison holds, else 0
``SHIFTS``     (value, count, bits)   counts are unsigned; a count of the width or more shifts all bits out, and
                                      rotates by its remainder modulo the width
``FILLS``      (value, n, bits)       n is from 1 to the width; bit n-1 or zeros fill one side
``DIVISIONS``  (dividend, divisor)    quotient and remainder; the divisor is not 0. A signed quotient is rounded towards
                                      zero, so that the remainder has the sign of the dividend
=============  =====================  =======================================================================
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "BINARY",
    "COMPARISONS",
    "DIVISIONS",
    "FILLS",
    "MAX_VALUE",
    "MIN_VALUE",
    "SHIFTS",
    "Binary",
    "Comparison",
    "Division",
    "complement",
    "divided",
    "limits",
    "mask_of",
    "signed",
]


def mask_of(bits: int) -> int:
    """Return the largest unsigned number of ``bits`` bits."""
    return (1 << bits) - 1


def limits(size: int, *, is_signed: bool = False) -> tuple[int, int]:
    """Return the minimum and the maximum, inclusive, of numbers of ``size`` bytes."""
    bits = 8 * size
    return (-(1 << bits - 1), mask_of(bits - 1)) if is_signed else (0, mask_of(bits))


def signed(value: int, bits: int) -> int:
    """Return the value of a word of ``bits`` bits interpreted as a two's complement number."""
    return value - (1 << bits) if value >> (bits - 1) else value


MIN_VALUE, MAX_VALUE = limits(8, is_signed=True)[0], limits(8)[1]
"""Minimum and maximum number that may be written for a word, signed or unsigned, of any size."""


def complement(value: int) -> int:
    """Return the one's complement (``neg``) as a negative Python number. The caller truncates it to a word."""
    return ~value


class Binary(NamedTuple):
    """
    Operation on two words. ``wraps`` is True if its result may exceed a word.

    ``symbol`` is C's and Python's operator.
    """

    symbol: str
    function: Callable[[int, int], int]
    wraps: bool
    commutes: bool


BINARY = {
    "add": Binary("+", operator.add, wraps=True, commutes=True),
    "sub": Binary("-", operator.sub, wraps=True, commutes=False),
    "mul": Binary("*", operator.mul, wraps=True, commutes=True),
    "and": Binary("&", operator.and_, wraps=False, commutes=True),
    "or": Binary("|", operator.or_, wraps=False, commutes=True),
    "xor": Binary("^", operator.xor, wraps=False, commutes=True),
}


class Comparison(NamedTuple):
    """Comparison of two words. With ``is_signed``, they are two's complement numbers."""

    symbol: str
    is_signed: bool
    function: Callable[[int, int], bool]

    def of_words(self, val1: int, val2: int, bits: int) -> int:
        """Compare two words of ``bits`` bits; return 1 if the comparison is true, else 0."""
        return int(
            self.function(signed(val1, bits), signed(val2, bits)) if self.is_signed else self.function(val1, val2)
        )


COMPARISONS = {
    "eq": Comparison("==", is_signed=False, function=operator.eq),
    "lt": Comparison("<", is_signed=True, function=operator.lt),
    "ltu": Comparison("<", is_signed=False, function=operator.lt),
}


def divided(dividend: int, divisor: int) -> tuple[int, int]:
    """Return the quotient, truncated towards zero, and the remainder of two signed numbers of any size, as in C."""
    quotient, remainder = divmod(dividend, divisor)
    if remainder and (dividend < 0) != (divisor < 0):  # Python rounds the quotient down
        return quotient + 1, remainder - divisor
    return quotient, remainder


class Division(NamedTuple):
    """A division of numbers; ``is_signed`` if it interprets words as two's complement numbers."""

    function: Callable[[int, int], tuple[int, int]]
    is_signed: bool


DIVISIONS = {"div": Division(divmod, is_signed=False), "idiv": Division(divided, is_signed=True)}


def _shift_left(value: int, count: int, bits: int) -> int:
    return value << count if count < bits else 0


def _shift_right(value: int, count: int, bits: int) -> int:
    return value >> count if count < bits else 0


def _rotate_left(value: int, count: int, bits: int) -> int:
    count %= bits
    return value << count | value >> (bits - count)


def _rotate_right(value: int, count: int, bits: int) -> int:
    count %= bits
    return value >> count | value << (bits - count)


SHIFTS = {"rol": _rotate_left, "ror": _rotate_right, "shl": _shift_left, "shr": _shift_right}


def _propagate_left(value: int, n: int, bits: int) -> int:
    low = (1 << n) - 1
    return value | (mask_of(bits) & ~low) if value >> (n - 1) & 1 else value & low


def _propagate_right(value: int, n: int, bits: int) -> int:  # noqa: ARG001 - as the others
    low = (1 << (n - 1)) - 1
    return value | low if value >> (n - 1) & 1 else value & ~low


def _zero_left(value: int, n: int, bits: int) -> int:  # noqa: ARG001 - as the others
    return value & ((1 << n) - 1)


def _zero_right(value: int, n: int, bits: int) -> int:  # noqa: ARG001 - as the others
    return value & ~((1 << (n - 1)) - 1)


FILLS = {"pbl": _propagate_left, "pbr": _propagate_right, "pzl": _zero_left, "pzr": _zero_right}
