"""Arithmetic as RPN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.typedtree.typed import Arithmetic, Constant

if TYPE_CHECKING:
    from dprobes.dpc.emitters.placeemitter import CellEmitter
    from dprobes.dpc.emitters.writer import Writer

__all__ = ["BITWISE", "OPERATIONS", "emit_arithmetic", "mask_width"]

OPERATIONS = {"+": "add", "-": "sub", "*": "mul", "&": "and", "|": "or", "^": "xor"}
"""The instructions of operations that need not look at bits above those that are wanted."""

BITWISE = ("&", "|", "^")
"""Operations whose results are as exact as their operands."""


def emit_arithmetic(values: CellEmitter, w: Writer, value: Arithmetic, bits: int) -> None:
    """Push the result of an operation, as its type holds it; a word has so many ``bits``."""
    type_, operator = value.type, value.operator
    if operator == "&" and (width := mask_width(value)) is not None:
        values.low(value.left, width)
        w.op(f"pzl {width}")
    elif operator in BITWISE:
        values.exact(value.right)
        values.exact(value.left)
        w.op(OPERATIONS[operator], -1)
    elif operator in OPERATIONS:
        values.low(value, type_.bits)
        values.cut(type_)
    elif operator == "<<":
        if isinstance(value.right, Constant):
            values.low(value, type_.bits)
        else:
            values.low(value.right, bits)
            values.low(value.left, type_.bits)
            w.op("shl", -1)
        values.cut(type_)
    elif operator == ">>":
        _shift_right(values, w, value, bits)
    else:
        values.exact(value.left)
        values.exact(value.right)
        w.op("idiv" if type_.is_signed else "div")
        if operator == "/":
            w.op("xchg")
        w.drop()


def mask_width(value: Arithmetic) -> int | None:
    """Return how many low bits a mask keeps; None if it is not made of the lowest bits only."""
    match value.right:
        case Constant(mask) if mask > 0 and mask & (mask + 1) == 0 and mask.bit_length() < value.type.bits:
            return mask.bit_length()
    return None


def _shift_right(values: CellEmitter, w: Writer, value: Arithmetic, bits: int) -> None:
    if isinstance(value.right, Constant):
        values.exact(value.left)
        count = value.right.value
        w.op(f"shr {count}")
        if value.type.is_signed and 0 < count < bits:
            w.op(f"pbl {bits - count}")
        return
    if not value.type.is_signed:
        values.low(value.right, bits)
        values.exact(value.left)
        w.op("shr", -1)
        return
    # With the sign in all bits exclusive-ored into it, a negative number is one that zeros may be shifted into.
    values.exact(value.left)
    w.op("dup 1", 1)
    w.op(f"pbr {bits}")
    values.low(value.right, bits)
    w.op("push tsp, 2", 1)
    w.op("push tsp, 2", 1)
    w.op("xor", -1)
    w.op("shr", -1)
    w.op("xor", -1)
    w.op("xchg")
    w.drop()
