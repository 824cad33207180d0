"""
Procedures in RPN for numbers of two cells: 64 bits in programs with words of 32.

The high word of a number is below the low one. A procedure finds its operands from SBP on, the low word of the right
one at SBP+0, and leaves the result in the deepest cells of these; who calls it drops the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["WideProcedure", "procedure_lines", "wide_procedure"]


class WideProcedure(NamedTuple):
    """A procedure: how many cells it takes and leaves, and its instructions, separated by semicolons."""

    takes: int
    leaves: int
    code: str
    calls: tuple[str, ...] = ()


def _bitwise(operation: str) -> WideProcedure:
    low = f"push sbp, 0; push sbp, 2; {operation}; pop sbp, 2"
    return WideProcedure(4, 2, f"{low}; push sbp, 1; push sbp, 3; {operation}; pop sbp, 3")


def _negated(high: int, low: int, mask: int) -> str:
    """Return code that negates the number in two cells where the mask is all ones, and not where it is 0."""
    return (
        f"push sbp, {low}; push sbp, {mask}; xor; push sbp, {mask}; push 1; and; add; copy sbp, {low};"
        f"push 0; eq; push sbp, {mask}; and; push 1; and;"
        f"push sbp, {high}; push sbp, {mask}; xor; add; pop sbp, {high}"
    )


def _shifted_right() -> str:
    # low = low >> n | high << (32 - n) | high >> (n - 32), where counts from 32 on, as unsigned numbers, give 0
    return (
        "push sbp, 0; push sbp, 1; shr;"
        "push sbp, 0; push 32; sub; push sbp, 2; shl; or;"
        "push 32; push sbp, 0; sub; push sbp, 2; shr; or; pop sbp, 1;"
        "push sbp, 0; push sbp, 2; shr; pop sbp, 2"
    )


_LESS_LOW = "push sbp, 1; push sbp, 3; eq; push sbp, 0; push sbp, 2; ltu; and"

_MULTIPLY = (
    # Of the low words ll and rl the halves: SBP-1 = ll & ffff, -2 = ll >> 16, -3 = rl & ffff, -4 = rl >> 16.
    "push sbp, 2; pzl 16; push sbp, 2; shr 16; push sbp, 0; pzl 16; push sbp, 0; shr 16;"
    "push sbp, -2; push sbp, -3; mul; push sbp, -1; push sbp, -4; mul;"  # SBP-5, SBP-6: the products in the middle
    "push sbp, -1; push sbp, -3; mul; shr 16; push sbp, -5; pzl 16; add; push sbp, -6; pzl 16; add; shr 16;"
    "push sbp, -5; shr 16; add; push sbp, -6; shr 16; add; push sbp, -2; push sbp, -4; mul; add;"
    "push sbp, 3; push sbp, 0; mul; add; push sbp, 2; push sbp, 1; mul; add; pop sbp, 3;"
    "push sbp, 2; push sbp, 0; mul; pop sbp, 2; ros 6"
)

_DIVIDE = (
    # n is at SBP+3 and +2, the divisor at +1 and +0: the quotient comes in the place of n, the remainder in that of the
    # divisor. A divisor of 0 is an exception, as of a word.
    "push 1; push sbp, 0; push sbp, 1; or; div; ros 2;"
    "push 0; push 0; push 64;"  # SBP-1 and -2: the remainder, SBP-3: the bits that are left
    "again:;"
    "push sbp, -1; shr 31;"  # what is shifted out
    "push sbp, -1; shl 1; push sbp, -2; shr 31; or; pop sbp, -1;"
    "push sbp, -2; shl 1; push sbp, 3; shr 31; or; pop sbp, -2;"
    "push sbp, 3; shl 1; push sbp, 2; shr 31; or; pop sbp, 3;"
    "push sbp, 2; shl 1; pop sbp, 2;"
    "push sbp, 1; push sbp, -1; eq; push sbp, 0; push sbp, -2; ltu; and; push sbp, 1; push sbp, -1; ltu; or;"
    "push 1; xor; or;"  # 1 if the divisor goes into the remainder
    "push sbp, 2; push tsp, 1; or; pop sbp, 2;"
    "push 0; sub;"  # all ones if it does
    "push sbp, 0; push tsp, 1; and; push sbp, -2; ltu;"  # the borrow
    "push sbp, 1; push tsp, 2; and; add; push sbp, -1; sub; pop sbp, -1;"
    "push sbp, 0; push tsp, 1; and; push sbp, -2; sub; pop sbp, -2;"
    "ros 1;"
    "loop again;"
    "push sbp, -1; pop sbp, 1; push sbp, -2; pop sbp, 0; ros 3"
)

_SIGNED_DIVIDE = (
    "push sbp, 3; pbr 32; push sbp, 1; pbr 32;"  # SBP-1 and -2: the signs of both
    + _negated(3, 2, -1)
    + ";"
    + _negated(1, 0, -2)
    + ";push sbp, 3; push sbp, 2; push sbp, 1; push sbp, 0; call wide_udivide;"
    "pop sbp, 0; pop sbp, 1; pop sbp, 2; pop sbp, 3;"
    "push sbp, -1; push sbp, -2; xor; pop sbp, -2;" + _negated(3, 2, -2) + ";" + _negated(1, 0, -1) + ";ros 2"
)

_PROCEDURES = {
    "add": WideProcedure(
        4, 2, "push sbp, 0; push sbp, 2; add; dup 1; push sbp, 2; xchg; ltu; push sbp, 1; add; push sbp, 3; add;"
        "pop sbp, 3; pop sbp, 2",
    ),
    "subtract": WideProcedure(
        4, 2, "push sbp, 0; push sbp, 2; ltu; push sbp, 1; add; push sbp, 3; sub; pop sbp, 3;"
        "push sbp, 0; push sbp, 2; sub; pop sbp, 2",
    ),
    "multiply": WideProcedure(4, 2, _MULTIPLY),
    "and": _bitwise("and"),
    "or": _bitwise("or"),
    "xor": _bitwise("xor"),
    "shl": WideProcedure(
        3, 2, "push sbp, 0; push sbp, 2; shl; push sbp, 0; push 32; sub; push sbp, 1; shr; or;"
        "push 32; push sbp, 0; sub; push sbp, 1; shl; or; pop sbp, 2; push sbp, 0; push sbp, 1; shl; pop sbp, 1",
    ),
    "shr": WideProcedure(3, 2, _shifted_right()),
    "sar": WideProcedure(
        3, 2, "push sbp, 2; pbr 32; push sbp, -1; push sbp, 1; xor; pop sbp, 1; push sbp, -1; push sbp, 2; xor;"
        "pop sbp, 2;" + _shifted_right() + ";"
        "push sbp, -1; push sbp, 1; xor; pop sbp, 1; push sbp, -1; push sbp, 2; xor; pop sbp, 2; ros 1",
    ),
    "equal": WideProcedure(
        4, 1, "push sbp, 1; push sbp, 3; xor; push sbp, 0; push sbp, 2; xor; or; push 0; eq; pop sbp, 3"
    ),
    "less": WideProcedure(4, 1, _LESS_LOW + "; push sbp, 1; push sbp, 3; lt; or; pop sbp, 3"),
    "uless": WideProcedure(4, 1, _LESS_LOW + "; push sbp, 1; push sbp, 3; ltu; or; pop sbp, 3"),
    "udivide": WideProcedure(4, 4, _DIVIDE),
    "divide": WideProcedure(4, 4, _SIGNED_DIVIDE, ("udivide",)),
}  # fmt: skip


def wide_procedure(name: str) -> WideProcedure:
    """Return a procedure by its name."""
    return _PROCEDURES[name]


def procedure_lines(names: Iterable[str]) -> list[str]:
    """Return the lines of procedures, and of those that they call."""
    wanted: dict[str, None] = {}
    for name in names:
        wanted |= dict.fromkeys((name, *_PROCEDURES[name].calls))
    lines = []
    for name in wanted:
        lines += ["", f"proc wide_{name}", "    save tsp", "    restore sbp"]
        for instruction in _PROCEDURES[name].code.split(";"):
            text = instruction.strip()
            if text:
                lines.append(text if text.endswith(":") else f"    {text}")
        lines += ["    ret", "endproc"]
    return lines
