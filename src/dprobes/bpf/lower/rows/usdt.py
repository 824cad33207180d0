"""The template that pushes an argument of a USDT probe; ``vm.usdtvalues`` defines what the value is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch.arguments import RegisterPart
from dprobes.bpf.asm.isa import Alu, Jump, Register, Size
from dprobes.bpf.lower.rows.world import nobody, read_value
from dprobes.bpf.lower.state.stack import SCRATCH
from dprobes.errors import NotSupportedError

if TYPE_CHECKING:
    from dprobes.arch.arguments import MemoryPlace
    from dprobes.bpf.lower.writer import Template, Writer
    from dprobes.rpn.decoder import EncodedInstruction

__all__ = ["TEMPLATES"]


def _push_argument(w: Writer, i: EncodedInstruction) -> None:
    arguments, number = w.point.arguments, int(i.operand)
    if not 1 <= number <= len(arguments) or (operand := (argument := arguments[number - 1]).operand) is None:
        nothing = nobody(w)
        w.asm.mov(Register.R1, 0)
        w.asm.jump_if(Jump.JEQ, Register.R1, 0, nothing)  # always, but what follows can still be reached
        w.stack.push(0)
        return
    bits = 8 * argument.size
    if isinstance(operand, int):
        number = operand & ((1 << bits) - 1)
        w.stack.push(number - (1 << bits) if argument.signed and number >> (bits - 1) else number)
        return
    if isinstance(operand, RegisterPart):
        bits = operand.bits
        value = w.stack.take()
        w.host.register(value, operand.name)
        if operand.shift:
            w.asm.alu(Alu.RSH, value, operand.shift)
    else:
        read_value(w, _address(w, operand), argument.size)
        value = w.stack.take()
        w.asm.load(value, SCRATCH, w.work(1), Size.of(argument.size))
    _extend(w, value, bits, signed=argument.signed)
    w.stack.push(value)


def _address(w: Writer, place: MemoryPlace) -> Register:
    """Return a new register with the address of a place."""
    if place.symbol:
        w.stack.settle()
        link = w.request.symbols.get(place.symbol)
        if link is None:
            raise NotSupportedError(f"the address of '{place.symbol}' is not known")
        address = w.stack.take()
        w.host.load_bias(address)
        _add(w, address, link + place.displacement)
    else:
        address = w.stack.copy(place.displacement)
    for name, factor in ((place.base, 1), (place.index, place.scale)):
        if name:
            register = w.stack.take()
            w.host.register(register, name)
            w.asm.alu(Alu.LSH, register, factor.bit_length() - 1)
            w.asm.alu(Alu.ADD, address, register)
    if not w.wide:
        w.asm.mov(address, address, wide=False)
    return address


def _add(w: Writer, register: Register, number: int) -> None:
    constant = w.stack.copy(number & (1 << 64) - 1)
    w.asm.alu(Alu.ADD, register, constant)


def _extend(w: Writer, value: Register, bits: int, *, signed: bool) -> None:
    """Extend the lower bits of a register to a word."""
    if bits < 64:
        w.asm.alu(Alu.LSH, value, 64 - bits)
        w.asm.alu(Alu.ARSH if signed else Alu.RSH, value, 64 - bits)
    if not w.wide:
        w.asm.mov(value, value, wide=False)


TEMPLATES: dict[str, Template] = {"push usdt, <argument>": _push_argument}
