"""What is true of typed values, wherever they stand: whether they can fail, change something, are 0 or 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.typedtree import typed
from dprobes.dpc.types.ctype import Integer, Void
from dprobes.dpc.types.printformat import Form

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "does_something",
    "fails_otherwise",
    "form_of",
    "greatest",
    "is_item",
    "is_truth",
    "needs_entry",
    "operands_of",
    "reads_memory",
    "reads_memory_itself",
    "steady",
]


def is_item(argument: typed.Argument) -> bool:
    """Return whether an argument is logged as an item, because reading it may fail."""
    return not isinstance(argument, typed.CommName) and (
        isinstance(
            argument,
            typed.Text
            | typed.Bytes
            | typed.Literal
            | typed.TextChoice
            | typed.StackTrace
            | typed.Kept
            | typed.NetworkAddress,
        )
        or reads_memory(argument)
    )


def form_of(argument: typed.Argument) -> Form:
    """Return how an argument is logged."""
    if not is_item(argument):
        return Form.RAW
    return Form.BYTES if isinstance(argument, typed.Memory | typed.Text | typed.Bytes) else Form.WORD


def reads_memory(value: typed.Value) -> bool:
    """Return whether computing a value may raise an exception for memory that is not there."""
    return reads_memory_itself(value) or any(map(reads_memory, operands_of(value)))


def reads_memory_itself(value: typed.Value) -> bool:
    """Return whether a value reads memory when all that it is computed from is known."""
    match value:
        case typed.Memory() | typed.BitField() | typed.TextTest() | typed.FunctionCall():
            return True
        case typed.TableValue() | typed.KeptTest():
            return True
        case typed.Register(is_certain=True) | typed.System(is_certain=True):
            return False
        case typed.Register(name, _, at_entry):
            return at_entry or not name.startswith(("arg", "ret", "pc", "sp"))
        case typed.System(name):
            return name.startswith(("elapsed", "usdt"))
        case typed.Arithmetic("/" | "%"):
            return True
        case typed.Variable(_, _, _, index):
            return index is not None
    return False


def fails_otherwise(value: typed.Argument) -> bool:
    """Return whether computing a value may raise an exception for something else than memory that is not there."""
    match value:
        case typed.Arithmetic("/" | "%", _, typed.Constant(divisor)) if divisor:
            pass
        case typed.Arithmetic("/" | "%") | typed.FunctionCall():
            return True
        case typed.Variable(_, _, _, index) if index is not None:
            return True
        case typed.Memory(address) | typed.BitField(typed.Memory(address)):
            return fails_otherwise(address)
        case typed.NetworkAddress(address):
            return fails_otherwise(address)
        case typed.Kept(_, keys) | typed.TableValue(_, keys) | typed.KeptTest(typed.Kept(_, keys)):
            return any(map(fails_otherwise, keys))
    return any(fails_otherwise(each) for each in operands_of(value))


def operands_of(value: typed.Argument) -> tuple[typed.Value, ...]:
    """Return the values that a value is computed from."""
    match value:
        case typed.Arithmetic(_, left, right) | typed.Comparison(_, left, right):
            return (left, right)
        case typed.Both(left, right) | typed.Either(left, right) | typed.Sequence(left, right):
            return (left, right)
        case typed.Negation(operand) | typed.Not(operand) | typed.Convert(operand):
            return (operand,)
        case typed.Choice(condition, yes, no):
            return (condition, yes, no)
        case typed.TextChoice(condition, yes, no):
            return (condition, *operands_of(yes), *operands_of(no))
        case typed.Assign(_, operand):
            return (operand,)
    return ()


def does_something(value: typed.Value) -> bool:
    """Return whether computing a value changes something."""
    match value:
        case typed.Assign() | typed.Step() | typed.FunctionCall():
            return True
        case typed.Convert(_, Void()):
            return True
    return any(does_something(each) for each in operands_of(value))


def is_truth(value: typed.Value) -> bool:
    """Return whether a value is 0 or 1."""
    match value:
        case typed.Comparison() | typed.Not() | typed.Both() | typed.Either():
            return True
        case typed.TextTest() | typed.CommTest() | typed.KeptTest():
            return True
        case typed.Constant(number):
            return number in (0, 1)
        case typed.Convert(operand, type_):
            return (isinstance(type_, Integer) and type_.is_bool) or is_truth(operand)
    return False


def needs_entry(value: typed.Value) -> bool:
    """Return whether a value cannot be computed unless the entry of the call was seen."""
    match value:
        case typed.Register(_, _, at_entry):
            return at_entry
        case typed.System(name):
            return name == "elapsed"
        case typed.Both(left) | typed.Either(left):
            return needs_entry(left)
        case typed.Choice(condition):
            return needs_entry(condition)
    return any(needs_entry(each) for each in operands_of(value))


def greatest(value: typed.Value) -> int | None:
    """Return a number that a value, which is not negative, never exceeds; None if nothing is known of it."""
    match value:
        case typed.Constant(number) if number >= 0:
            return number
        case typed.Arithmetic("&", _, typed.Constant(mask)) if mask >= 0:
            return mask
        case typed.Arithmetic(">>", left, typed.Constant(count)) if (most := greatest(left)) is not None:
            return most >> count
        case typed.Convert(operand, Integer() as type_) if (most := greatest(operand)) is not None:
            return most if type_.holds(most) else None
    return 1 if is_truth(value) else None


def steady(place: typed.Place, keep: Callable[[typed.Value], typed.Local]) -> tuple[typed.Value | None, typed.Place]:
    """Return a place that can be used twice, and what is done before: its address, which may do something, is kept."""
    match place:
        case typed.Memory(address, type_) if does_something(address):
            kept = keep(address)
            return typed.Assign(kept, address, kept.type), typed.Memory(kept, type_)
        case typed.BitField(typed.Memory(address, unit), bits, shift, type_) if does_something(address):
            kept = keep(address)
            memory = typed.Memory(kept, unit)
            return typed.Assign(kept, address, kept.type), typed.BitField(memory, bits, shift, type_)
        case typed.Variable(kind, first, type_, index) if index is not None and does_something(index):
            kept = keep(index)
            return typed.Assign(kept, index, kept.type), typed.Variable(kind, first, type_, kept)
    return None, place
