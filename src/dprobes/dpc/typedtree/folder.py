"""What is known when a program is compiled: values of constants are worked out, and decisions on them taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.typedtree.typed import (
    Arithmetic,
    Both,
    Choice,
    Comparison,
    Constant,
    Convert,
    Either,
    Negation,
    Not,
    Sequence,
)
from dprobes.dpc.types.ctype import Enumeration, Integer, Pointer
from dprobes.rpn.arithmetic import divided

if TYPE_CHECKING:
    from dprobes.dpc.typedtree.typed import Value
    from dprobes.dpc.types.ctype import CType

__all__ = ["cut", "folded", "integer_of"]


def integer_of(type_: CType) -> Integer | None:
    """Return the integer type whose numbers a type's values are; None of a type that has no numbers."""
    match type_:
        case Integer():
            return type_
        case Enumeration(base=base):
            return base
        case Pointer(size=size):
            return Integer("pointer", size, is_signed=False, rank=4)
    return None


def cut(value: int, type_: CType) -> int:
    """Return a number as a type holds it."""
    integer = integer_of(type_)
    return value if integer is None else integer.cut(value)


def folded(value: Value) -> Value:
    """Return a value whose operands are folded already, as a constant if it is one, or more simply written."""
    match value:
        case Convert(Constant(number), type_):
            return Constant(cut(number, type_), type_)
        case Convert(operand, type_) if operand.type == type_:
            return operand
        case Negation(Constant(number), type_, is_complement):
            return Constant(type_.cut(~number if is_complement else -number), type_)
        case Not(Constant(number), type_):
            return Constant(int(number == 0), type_)
        case Not(Not(Comparison() as inner), _):
            return inner
        case Comparison(operator, Constant(left), Constant(right), _, type_):
            return Constant(int(left == right if operator == "==" else left < right), type_)
        case Both(Constant(number), right, type_):
            return _truth(right, type_) if number else Constant(0, type_)
        case Either(Constant(number), right, type_):
            return Constant(1, type_) if number else _truth(right, type_)
        case Choice(Constant(number), yes, no):
            return yes if number else no
        case Sequence(Constant(), right):
            return right
        case Arithmetic():
            return _arithmetic(value)
    return value


def _truth(value: Value, type_: CType) -> Value:
    """Return 1 of what is not 0."""
    match value:
        case Comparison() | Not() | Both() | Either():
            return value
    return folded(Not(folded(Not(value, type_)), type_))


_ADDITIVE = ("+", "|", "^")


def _arithmetic(value: Arithmetic) -> Value:
    operator, type_ = value.operator, value.type
    match value.left, value.right:
        case Constant(left), Constant(right) if (result := _computed(operator, left, right, type_)) is not None:
            return Constant(type_.cut(result), type_)
        case left, Constant(0) if operator in (*_ADDITIVE, "-", "<<", ">>"):
            return left
        case Constant(0), right if operator in _ADDITIVE:
            return right
        case left, Constant(1) if operator in ("*", "/"):
            return left
        case Constant(1), right if operator == "*":
            return right
        case left, Constant(number) if operator == "*" and _power_of(number):
            return Arithmetic("<<", left, Constant(_power_of(number), type_), type_)
        case Constant(number), right if operator == "*" and _power_of(number):
            return Arithmetic("<<", right, Constant(_power_of(number), type_), type_)
        case left, Constant(number) if operator == "/" and not type_.is_signed and _power_of(number):
            return Arithmetic(">>", left, Constant(_power_of(number), type_), type_)
        case left, Constant(number) if operator == "%" and not type_.is_signed and _power_of(number):
            return Arithmetic("&", left, Constant(number - 1, type_), type_)
        case Arithmetic("+", inner, Constant(first)), Constant(second) if operator == "+":
            return _arithmetic(Arithmetic("+", inner, Constant(type_.cut(first + second), type_), type_))
    return value


def _power_of(number: int) -> int:
    """Return n if a number is 2 ** n and n is not 0, else 0."""
    return number.bit_length() - 1 if number > 1 and number & (number - 1) == 0 else 0


def _computed(operator: str, left: int, right: int, type_: Integer) -> int | None:
    """Return the result of an operation; None where C leaves it undefined, so that it happens at the hit."""
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "&":
            return left & right
        case "|":
            return left | right
        case "^":
            return left ^ right
        case "/" | "%" if right != 0:
            return divided(left, right)[operator == "%"]
        case "<<" if 0 <= right < type_.bits:
            return left << right
        case ">>" if 0 <= right < type_.bits:
            return left >> right
    return None
