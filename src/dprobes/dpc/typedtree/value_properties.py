"""Properties of typed values in any context: possible faults, side effects, and truth values."""

from __future__ import annotations

from operator import add, and_, lshift, mul, or_, rshift, sub, xor
from typing import TYPE_CHECKING

from dprobes.dpc.typedtree import typed_values
from dprobes.dpc.typedtree.typed_values import (
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
from dprobes.dpc.types.c_types import Enumeration, Integer, Pointer, Void
from dprobes.dpc.types.print_formats import Form
from dprobes.rpn.word_arithmetic import divided

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.dpc.typedtree.typed_values import Value
    from dprobes.dpc.types.c_types import CType

__all__ = [
    "WHOLE_OPERATIONS",
    "cut",
    "does_something",
    "fails_otherwise",
    "folded",
    "form_of",
    "greatest",
    "integer_of",
    "is_item",
    "is_truth",
    "needs_entry",
    "operands_of",
    "reads_memory_itself",
    "steady",
]


def integer_of(type_: CType) -> Integer | None:
    """Return the integer type of a type's values, or None for a type without numbers."""
    match type_:
        case Integer():
            return type_
        case Enumeration(base=base):
            return base
        case Pointer(size=size):
            return Integer("pointer", size, is_signed=False, rank=4)
    return None


def cut(value: int, type_: CType) -> int:
    """Return a number truncated to the width of a type, and sign- or zero-extended; unchanged without a width."""
    integer = integer_of(type_)
    return value if integer is None else integer.cut(value)


def folded(value: Value) -> Value:
    """Return the simplified form of a value whose operands are already folded, a constant if possible."""
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
    """Return 1 for a value other than 0, else 0."""
    match value:
        case Comparison() | Not() | Both() | Either():
            return value
    return folded(Not(folded(Not(value, type_)), type_))


WHOLE_OPERATIONS = {"+": add, "-": sub, "*": mul, "&": and_, "|": or_, "^": xor}
"""Operations that have a result for all operands."""

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
    """Return the result of an operation, or None if it is undefined in C, so that it is left to the hit."""
    if operator in ("/", "%"):
        return divided(left, right)[operator == "%"] if right else None
    if operator in ("<<", ">>") and not 0 <= right < type_.bits:
        return None
    result: int = {**WHOLE_OPERATIONS, "<<": lshift, ">>": rshift}[operator](left, right)
    return result


def is_item(argument: typed_values.Argument) -> bool:
    """Return whether an argument is logged as an item, because reading it may fail."""
    return not isinstance(argument, typed_values.CommName) and (
        isinstance(
            argument,
            typed_values.Text
            | typed_values.Bytes
            | typed_values.Literal
            | typed_values.ItemText
            | typed_values.TextChoice
            | typed_values.StackTrace
            | typed_values.Kept
            | typed_values.NetworkAddress,
        )
        or reads_memory(argument)
    )


def form_of(argument: typed_values.Argument) -> Form:
    """Return the form in which ``printf`` logs an argument: plain bytes, or an item if reading it may fail."""
    if not is_item(argument):
        return Form.RAW
    return (
        Form.BYTES if isinstance(argument, typed_values.Memory | typed_values.Text | typed_values.Bytes) else Form.WORD
    )


def reads_memory(value: typed_values.Value) -> bool:
    """Return whether the computation of a value may raise an exception, such as for unmapped memory."""
    return reads_memory_itself(value) or any(map(reads_memory, operands_of(value)))


def reads_memory_itself(value: typed_values.Value) -> bool:
    """Return whether the computation of a value, apart from its operands, may raise an exception."""
    match value:
        case typed_values.Memory() | typed_values.BitField() | typed_values.TextTest() | typed_values.FunctionCall():
            return True
        case typed_values.TableValue() | typed_values.KeptTest() | typed_values.ItemTest():
            return True
        case typed_values.Register(is_certain=True) | typed_values.System(is_certain=True):
            return False
        case typed_values.Register(name, _, at_entry):
            return at_entry or not name.startswith(("arg", "ret", "pc", "sp"))
        case typed_values.System(name):
            return name.startswith(("elapsed", "usdt", "pmc"))
        case typed_values.Arithmetic("/" | "%"):
            return True
        case typed_values.Variable(_, _, _, index):
            return index is not None
    return False


def fails_otherwise(value: typed_values.Argument) -> bool:
    """Return whether the computation of a value may raise an exception other than one for unmapped memory."""
    match value:
        case typed_values.Arithmetic("/" | "%", _, typed_values.Constant(divisor)) if divisor:
            pass
        case typed_values.Arithmetic("/" | "%") | typed_values.FunctionCall():
            return True
        case typed_values.Variable(_, _, _, index) if index is not None:
            return True
        case typed_values.Memory(address) | typed_values.BitField(typed_values.Memory(address)):
            return fails_otherwise(address)
        case typed_values.NetworkAddress(address):
            return fails_otherwise(address)
        case (
            typed_values.Kept(_, keys)
            | typed_values.TableValue(_, keys)
            | typed_values.KeptTest(typed_values.Kept(_, keys))
        ):
            return any(map(fails_otherwise, keys))
    return any(fails_otherwise(each) for each in operands_of(value))


_OPERATIONS = Arithmetic | Comparison | Both | Either | Sequence | Negation | Not | Convert | Choice


def operands_of(value: typed_values.Argument) -> tuple[typed_values.Value, ...]:
    """Return the direct operands of a value."""
    match value:
        case typed_values.TextChoice(condition, yes, no):
            return (condition, *operands_of(yes), *operands_of(no))
        case typed_values.Assign(_, operand):
            return (operand,)
    operands = value.children() if isinstance(value, _OPERATIONS) else ()
    return tuple(each for each in operands if isinstance(each, typed_values.Value))


def does_something(value: typed_values.Value) -> bool:
    """Return whether the computation of a value has side effects: assignments, ``++``, or calls of functions."""
    match value:
        case typed_values.Assign() | typed_values.Step() | typed_values.FunctionCall():
            return True
        case typed_values.Convert(_, Void()):
            return True
    return any(does_something(each) for each in operands_of(value))


def is_truth(value: typed_values.Value) -> bool:
    """Return whether a value is always 0 or 1."""
    match value:
        case typed_values.Comparison() | typed_values.Not() | typed_values.Both() | typed_values.Either():
            return True
        case typed_values.TextTest() | typed_values.CommTest() | typed_values.KeptTest():
            return True
        case typed_values.Constant(number):
            return number in (0, 1)
        case typed_values.Convert(operand, type_):
            return (isinstance(type_, Integer) and type_.is_bool) or is_truth(operand)
    return False


def needs_entry(value: typed_values.Value) -> bool:
    """Return whether the computation of a value requires that the entry of the call was seen."""
    match value:
        case typed_values.Register(_, _, at_entry):
            return at_entry
        case typed_values.System(name):
            return name.startswith("elapsed")
        case typed_values.Both(left) | typed_values.Either(left):
            return needs_entry(left)
        case typed_values.Choice(condition):
            return needs_entry(condition)
    return any(needs_entry(each) for each in operands_of(value))


def greatest(value: typed_values.Value) -> int | None:
    """Return an inclusive upper bound of a value that is never negative, or None if none is known."""
    match value:
        case typed_values.Constant(number) if number >= 0:
            return number
        case typed_values.Arithmetic("&", _, typed_values.Constant(mask)) if mask >= 0:
            return mask
        case typed_values.Arithmetic(">>", left, typed_values.Constant(count)) if (most := greatest(left)) is not None:
            return most >> count
        case typed_values.Convert(operand, Integer() as type_) if (most := greatest(operand)) is not None:
            return most if type_.holds(most) else None
    return 1 if is_truth(value) else None


def steady(
    place: typed_values.Place, keep: Callable[[typed_values.Value], typed_values.Local]
) -> tuple[typed_values.Value | None, typed_values.Place]:
    """
    Return a value to compute first, or None, and a place that can be evaluated twice.

    If the address or index of ``place`` has side effects, the first value stores it in a variable from ``keep``.
    """
    match place:
        case typed_values.Memory(address, type_) if does_something(address):
            kept = keep(address)
            return typed_values.Assign(kept, address, kept.type), typed_values.Memory(kept, type_)
        case typed_values.BitField(typed_values.Memory(address, unit), bits, shift, type_) if does_something(address):
            kept = keep(address)
            memory = typed_values.Memory(kept, unit)
            return typed_values.Assign(kept, address, kept.type), typed_values.BitField(memory, bits, shift, type_)
        case typed_values.Variable(kind, first, type_, index) if index is not None and does_something(index):
            kept = keep(index)
            return typed_values.Assign(kept, index, kept.type), typed_values.Variable(kind, first, type_, kept)
    return None, place
