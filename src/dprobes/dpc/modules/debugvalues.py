"""Where variables are, as values of C that are computed at the hit: registers, memory, and arithmetic with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.typedtree import typed
from dprobes.dpc.typedtree.folder import folded
from dprobes.dpc.typedtree.scattered import NotKnownError, Part, Scattered
from dprobes.dpc.typedtree.scope import ModuleVariable
from dprobes.dpc.types.argumentplaces import ResultPart, result_parts
from dprobes.dpc.types.ctype import INT, LONG_LONG, UNSIGNED_LONG_LONG, Integer, is_scalar, size_of
from dprobes.dwarf.locationtree import (
    Choice,
    Computed,
    Extended,
    FrameAddressOf,
    InMemory,
    InRegister,
    Known,
    LinkAddress,
    Loaded,
    Number,
    Operation,
    Pieces,
    RegisterContent,
    Unavailable,
)
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dprobes.arch import ByteOrder
    from dprobes.dpc.types.ctype import CType, Member
    from dprobes.dwarf.locationtree import Location, Node

__all__ = ["GONE", "Machine", "in_registers", "part_of", "returned_value", "value_at", "value_of"]

GONE = (
    "not known any more at the return: at the entry it is in no register",
    "keep it at the entry, in a thread variable",
)
"""Why a parameter is not known at a return, and what to do."""

_COMPARISONS = {"==": ("==", False), "!=": ("==", True), "<s": ("<", False), ">=s": ("<", True)}


class Machine(NamedTuple):
    """
    What is known of a processor and a module when values are computed.

    ``registers`` are the names of registers by DWARF's numbers. ``symbol_near`` gives a symbol for a link address, and
    how far behind it that is. ``frame`` gives register and offset of the canonical frame address at an instruction.
    ``at_return`` says that registers are meant as they were at the entry of the function that has returned.
    """

    word: Integer
    byte_order: ByteOrder
    registers: Mapping[int, str]
    symbol_near: Callable[[int], tuple[str, int] | None]
    frame: Callable[[int], tuple[int, int] | None]
    at_return: bool = False

    @property
    def long(self) -> Integer:
        """The signed type of a word."""
        return LONG_LONG if self.word.size == 8 else Integer("long", 4, is_signed=True, rank=4)


def value_at(location: Location, type_: CType, machine: Machine) -> typed.Value | Scattered:
    """Return the value, or the place in memory, of a variable; raise ``NotKnownError`` if it has none there."""
    match location:
        case Unavailable(reason):
            raise NotKnownError(reason)
        case InMemory(address):
            if machine.at_return and not isinstance(address, LinkAddress):
                raise NotKnownError(*GONE)
            return typed.Memory(value_of(address, machine), type_)
    parts = tuple(_parts(location, 0, size_of(type_) or machine.word.size, machine))
    if not is_scalar(type_):
        return Scattered(parts, type_)
    return _scalar(parts, type_, machine)


def in_registers(type_: CType, parts: Sequence[ResultPart], machine: Machine) -> ModuleVariable:
    """Return an argument or a result that is in registers; raise ``NotKnownError`` without ``parts``."""
    if not parts:
        raise NotKnownError("in no register that a handler can read")
    made = tuple(
        Part(part.offset, part.size, typed.Register(part.register, machine.word, at_entry=machine.at_return))
        for part in parts
    )
    if not is_scalar(type_):
        return ModuleVariable(Scattered(made, type_), type_)
    if len(made) > 1:
        wide = UNSIGNED_LONG_LONG
        low, high = (folded(typed.Convert(part.value, wide)) for part in made[:2] if part.value is not None)
        above = typed.Arithmetic("<<", high, typed.Constant(32, INT), wide)
        return ModuleVariable(folded(typed.Convert(typed.Arithmetic("|", low, above, wide), type_)), type_)
    return ModuleVariable(_scalar(made, type_, machine), type_)


def returned_value(type_: CType, machine: Machine, *, is_x86: bool) -> ModuleVariable:
    """Return what a function has returned; raise ``NotKnownError`` where that is not known."""
    if not is_x86 and (not is_scalar(type_) or (size_of(type_) or 0) > machine.word.size):
        raise NotKnownError(f"where a function returns '{type_}' is known of x86 only")
    parts = result_parts(type_, machine.word.size) if is_x86 else (ResultPart(0, size_of(type_) or 8, "retval"),)
    if parts is None:
        return ModuleVariable(typed.Memory(typed.Register("retval", machine.word), type_), type_)
    return in_registers(type_, parts, machine)


def part_of(scattered: Scattered, member: Member, machine: Machine) -> typed.Value | Scattered:
    """Return a member of a structure that is not in memory; raise ``NotKnownError`` if it has no value there."""
    size = size_of(member.unit or member.type) or 1
    start, end = member.offset, member.offset + size
    found = tuple(
        Part(part.offset - start, part.size, part.value)
        for part in scattered.parts
        if part.offset < end and start < part.offset + part.size
    )
    if not is_scalar(member.type):
        return Scattered(found, member.type)
    if member.bits is None:
        return _scalar(found, member.type, machine)
    integer = member.unit or UNSIGNED_LONG_LONG
    unit = _scalar(found, Integer("unit", size, is_signed=False, rank=integer.rank), machine)
    return _bits(unit, member, machine)


def _bits(unit: typed.Value, member: Member, machine: Machine) -> typed.Value:
    """Return a bit field of a unit: shifted to the highest bits of a word, and back with its sign."""
    assert member.bits is not None
    integer = member.type.base if hasattr(member.type, "base") else member.type
    is_signed = isinstance(integer, Integer) and integer.is_signed
    type_ = machine.long if is_signed else machine.word
    bits = 8 * machine.word.size
    value = folded(typed.Convert(unit, machine.word))
    high = _operation("<<", value, typed.Constant(bits - member.bits - member.shift, machine.word), machine.word)
    low = _operation(">>", folded(typed.Convert(high, type_)), typed.Constant(bits - member.bits, machine.word), type_)
    return folded(typed.Convert(low, member.type))


def _scalar(parts: tuple[Part, ...], type_: CType, machine: Machine) -> typed.Value:
    """Return a number from the parts that its bytes are in."""
    size = size_of(type_) or machine.word.size
    whole: typed.Value | None = None
    known = 0  # bytes from the first one on
    for part in parts:
        if part.value is None or part.offset > known:
            raise NotKnownError("optimized out, at least in part")
        known = part.offset + part.size
        piece: typed.Value = folded(typed.Convert(part.value, machine.word))
        if part.offset < 0:
            piece = _shifted(">>", piece, -8 * part.offset, machine)
        if known < size:
            mask = (1 << 8 * (known if part.offset < 0 else part.size)) - 1
            piece = _operation("&", piece, typed.Constant(mask, machine.word), machine.word)
        if part.offset > 0:
            piece = _shifted("<<", piece, 8 * part.offset, machine)
        whole = piece if whole is None else _operation("|", whole, piece, machine.word)
    if whole is None or known < size:
        raise NotKnownError("optimized out")
    return folded(typed.Convert(whole, type_))


def _shifted(operator: str, value: typed.Value, bits: int, machine: Machine) -> typed.Value:
    return _operation(operator, value, typed.Constant(bits, machine.word), machine.word)


def _operation(operator: str, left: typed.Value, right: typed.Value, type_: Integer) -> typed.Value:
    return folded(typed.Arithmetic(operator, left, right, type_))


def _parts(location: Location, offset: int, size: int, machine: Machine) -> list[Part]:
    """Return the parts of ``size`` bytes that a location has from ``offset`` on, each no larger than a word."""
    word = machine.word.size
    match location:
        case Unavailable():
            return [Part(offset, size, None)]
        case InRegister(number):
            return [Part(offset, min(size, word), _register(number, machine))]
        case Computed(node):
            return [Part(offset, min(size, word), value_of(node, machine))]
        case Known(data):
            return [
                Part(offset + at, min(word, size - at), typed.Constant(_number(data, at, machine), machine.word))
                for at in range(0, min(size, len(data)), word)
            ]
        case InMemory() if machine.at_return:
            return [Part(offset, size, None)]
        case InMemory(address):
            return list(_memory_parts(value_of(address, machine), offset, size, machine))
        case Pieces(pieces):
            found: list[Part] = []
            for piece in pieces:
                found += _parts(piece.location, offset, piece.size, machine)
                offset += piece.size
            return found


def _memory_parts(address: typed.Value, offset: int, size: int, machine: Machine) -> list[Part]:
    found = []
    at = 0
    while at < size:
        width = next(each for each in (8, 4, 2, 1) if each <= min(size - at, machine.word.size))
        place = _operation("+", address, typed.Constant(at, machine.word), machine.word)
        found.append(Part(offset + at, width, typed.Memory(place, Integer("unit", width, is_signed=False, rank=4))))
        at += width
    return found


def _number(data: bytes, at: int, machine: Machine) -> int:
    return int.from_bytes(data[at : at + machine.word.size], machine.byte_order)


def _register(number: int, machine: Machine) -> typed.Value:
    name = machine.registers.get(number)
    if name is None:
        if machine.at_return:
            raise NotKnownError(*GONE)
        raise NotKnownError("in a register that is not for integers")
    return typed.Register(name, machine.word, at_entry=machine.at_return)


def value_of(node: Node, machine: Machine) -> typed.Value:
    """Return what has to be computed at the hit; raise ``NotKnownError`` if it cannot be."""
    word = machine.word
    match node:
        case Number(number):
            return typed.Constant(word.cut(number), word)
        case RegisterContent(number):
            return _register(number, machine)
        case LinkAddress(address):
            return _address(address, machine)
        case FrameAddressOf() | Loaded() if machine.at_return:
            raise NotKnownError(*GONE)
        case FrameAddressOf(address):
            frame = machine.frame(address)
            if frame is None:
                raise NotKnownError("in a frame that no unwind table describes")
            return _operation("+", _register(frame[0], machine), typed.Constant(word.cut(frame[1]), word), word)
        case Loaded(address, size):
            integer = Integer("unit", size, is_signed=False, rank=4)
            return folded(typed.Convert(typed.Memory(value_of(address, machine), integer), word))
        case Extended(inner, size, is_signed):
            narrow = Integer("unit", size, is_signed=is_signed, rank=3)
            return folded(typed.Convert(folded(typed.Convert(value_of(inner, machine), narrow)), word))
        case Choice(condition, chosen, otherwise):
            test = folded(typed.Convert(value_of(condition, machine), word))
            return folded(typed.Choice(test, value_of(chosen, machine), value_of(otherwise, machine), word))
        case Operation(operator, left, right):
            return _calculated(operator, value_of(left, machine), right, machine)


def _address(address: int, machine: Machine) -> typed.Value:
    near = machine.symbol_near(address)
    if near is None:
        raise NotKnownError(f"at link address {address:#x}, which no symbol is near to")
    name, distance = near
    symbol = typed.Symbol(name, machine.word)
    return symbol if not distance else _shifted_symbol(symbol, distance, machine)


def _shifted_symbol(symbol: typed.Symbol, distance: int, machine: Machine) -> typed.Value:
    return typed.Arithmetic("+", symbol, typed.Constant(machine.word.cut(distance), machine.word), machine.word)


def _calculated(operator: str, left: typed.Value, right: Node | None, machine: Machine) -> typed.Value:
    word, long = machine.word, machine.long
    if right is None:
        match operator:
            case "abs":
                signed = folded(typed.Convert(left, long))
                minus = folded(typed.Negation(signed, long))
                zero = typed.Constant(0, long)
                test = folded(typed.Comparison("<", signed, zero, True, word))
                return folded(typed.Convert(typed.Choice(test, minus, signed, long), word))
            case _:
                return folded(typed.Negation(left, word, is_complement=operator == "~"))
    if operator in ("<<", ">>", ">>s") and isinstance(right, Number) and right.value >= 8 * word.size:
        if operator != ">>s":
            return typed.Constant(0, word)  # compilers write such counts, and debuggers take them so
        right = Number(8 * word.size - 1)
    other = value_of(right, machine)
    if operator in _COMPARISONS or operator in (">s", "<=s"):
        if operator in (">s", "<=s"):
            left, other, operator = other, left, {">s": "<s", "<=s": ">=s"}[operator]
        name, is_not = _COMPARISONS[operator]
        a, b = folded(typed.Convert(left, long)), folded(typed.Convert(other, long))
        test = folded(typed.Comparison(name, a, b, True, word))
        return folded(typed.Not(test, word)) if is_not else test
    if operator in ("/s", ">>s"):
        signed = folded(typed.Convert(left, long))
        count = folded(typed.Convert(other, long)) if operator == "/s" else other
        return folded(typed.Convert(_operation(operator[:-1], signed, count, long), word))
    return _operation(operator, left, other, word)
