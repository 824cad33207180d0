"""The value of a USDT probe's argument at a hit: this is its definition, which compiled handlers follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch.arguments import Argument, RegisterPart
from dprobes.vm.context import AddressFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.arch import Architecture
    from dprobes.arch.arguments import MemoryPlace
    from dprobes.vm.context import Context

__all__ = ["argument_value"]


def argument_value(arguments: Sequence[Argument], number: int, context: Context, architecture: Architecture) -> int:
    """
    Return an argument, counted from 1, as a word: extended as its note says, or the low word of a wider one.

    Raise ``AddressFault`` for memory that cannot be read, and with address 0 if there is no such argument.
    """
    if not 1 <= number <= len(arguments) or (operand := (argument := arguments[number - 1]).operand) is None:
        raise AddressFault(0)
    bits = 8 * argument.size
    if isinstance(operand, int):
        value = operand
    elif isinstance(operand, RegisterPart):
        value, bits = _register(operand.name, context, architecture) >> operand.shift, operand.bits
    else:
        address = _address(operand, context, architecture)
        value = int.from_bytes(context.read(address, argument.size), architecture.byte_order)
    value &= (1 << bits) - 1
    if argument.signed and value >> (bits - 1):
        value -= 1 << bits
    return value & architecture.word_mask


def _register(name: str, context: Context, architecture: Architecture) -> int:
    register = architecture.register(name)
    assert register is not None
    return context.register(register.index, user=False)


def _address(place: MemoryPlace, context: Context, architecture: Architecture) -> int:
    address = place.displacement
    if place.symbol:
        address += context.symbol_address(place.symbol)
    if place.base:
        address += _register(place.base, context, architecture)
    if place.index:
        address += _register(place.index, context, architecture) * place.scale
    return address & architecture.word_mask
