"""
Expressions that say where a variable is: executed with trees instead of numbers (DWARF 5, 2.5 and 2.6; GNU's forms).

What has to be known of a process is left to the hit. Where a jump depends on it, both ways are followed to their ends.
"""

from __future__ import annotations

import operator as operators
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dprobes.dwarf.address_lists import listed_expressions
from dprobes.dwarf.debug_entries import UNREADABLE
from dprobes.dwarf.dwarf_numbers import At, Encoding, signed_at, unsigned_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.dwarf.address_lists import AddressRange
    from dprobes.dwarf.debug_entries import Entry, EntryUnit

__all__ = [
    "Choice",
    "Computed",
    "Extended",
    "Frame",
    "FrameAddressOf",
    "InMemory",
    "InRegister",
    "Known",
    "LinkAddress",
    "Loaded",
    "Location",
    "Node",
    "Number",
    "Operation",
    "Pieces",
    "RegisterContent",
    "Unavailable",
    "executed",
    "frame_at",
    "is_listed",
    "known_ranges",
    "location_at",
]

# Where a variable is, or what it is, as a tree of what has to be computed at the hit.
#
# Nothing here is of a process: registers and memory are named, not read. Numbers are words that wrap, without a sign;
# operators whose names end with ``s`` take them as signed ones.


SIZE_MAX = 64
"""Nodes of a tree; compilers make some ten."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number."""

    value: int


@dataclass(frozen=True, slots=True)
class RegisterContent:
    """What is in a register, by DWARF's number."""

    number: int


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """The run-time address of what has this link address."""

    address: int


@dataclass(frozen=True, slots=True)
class FrameAddressOf:
    """The canonical frame address at an instruction: what the unwind table of the function says."""

    address: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """So many bytes of memory, with zeros above them."""

    address: Node
    size: int
    nodes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of C on one or two nodes: ``+ - * / % & | ^ << >> ~ neg``, ``/s %s >>s``, and ``== <s`` …."""

    operator: str
    left: Node
    right: Node | None = None
    nodes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Extended:
    """The low bytes of a node, with zeros or copies of their sign above them."""

    node: Node
    size: int
    is_signed: bool
    nodes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """One node if a condition is not 0, else another one."""

    condition: Node
    chosen: Node
    otherwise: Node
    nodes: int = field(default=0, compare=False)


Node = Number | RegisterContent | LinkAddress | FrameAddressOf | Loaded | Operation | Extended | Choice


def size_of_tree(*nodes: Node | None) -> int:
    """Return how many nodes there are."""
    return sum(getattr(node, "nodes", 0) or 1 for node in nodes if node is not None)


@dataclass(frozen=True, slots=True)
class InMemory:
    """The variable is in memory at an address."""

    address: Node


@dataclass(frozen=True, slots=True)
class InRegister:
    """The variable is in a register."""

    number: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The variable is nowhere, but its value is known."""

    value: Node


@dataclass(frozen=True, slots=True)
class Known:
    """The variable is nowhere, but its bytes are known."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The variable is nowhere, for a reason."""

    reason: str
    is_at_entry: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a variable: ``size`` bytes."""

    location: Location
    size: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """The variable is in parts, in order."""

    pieces: tuple[Piece, ...]


Location = InMemory | InRegister | Computed | Known | Unavailable | Pieces


_STEPS_MAX = 512
_STACK_MAX = 64
_FORKS_MAX = 3
"""Jumps on one way that depend on the process; each of them doubles the ways."""

_CONSTANTS = {
    0x08: (1, False), 0x09: (1, True), 0x0A: (2, False), 0x0B: (2, True),
    0x0C: (4, False), 0x0D: (4, True), 0x0E: (8, False), 0x0F: (8, True),
}  # fmt: skip
_BINARY = {
    0x1A: "&", 0x1B: "/s", 0x1C: "-", 0x1D: "%", 0x1E: "*", 0x21: "|", 0x22: "+", 0x24: "<<", 0x25: ">>", 0x26: ">>s",
    0x27: "^", 0x29: "==", 0x2A: ">=s", 0x2B: ">s", 0x2C: "<=s", 0x2D: "<s", 0x2E: "!=",
}  # fmt: skip
_FOLDED = {
    "+": operators.add, "-": operators.sub, "*": operators.mul, "&": operators.and_, "|": operators.or_,
    "^": operators.xor, "==": operators.eq, "!=": operators.ne,
}  # fmt: skip
"""What is computed at once with two numbers: so loops that count end."""
_UNARY = {0x19: "abs", 0x1F: "neg", 0x20: "~"}
_INTEGERS = frozenset(
    (Encoding.ADDRESS, Encoding.BOOLEAN, Encoding.SIGNED, Encoding.SIGNED_CHAR, Encoding.UNSIGNED,
     Encoding.UNSIGNED_CHAR, Encoding.UTF)
)  # fmt: skip
_SIGNED = frozenset((Encoding.SIGNED, Encoding.SIGNED_CHAR))


class Frame(NamedTuple):
    """
    Where an expression is asked for: at the link address ``address``, in a function.

    ``base`` gives the frame base of the function. At the first instruction, ``is_entry``, registers have what they had
    when the function was entered.
    """

    address: int
    is_entry: bool
    base: Callable[[], Location]


class _NotThere(Exception):  # noqa: N818 - no error of a file
    """Leave an expression: what it is about is nowhere."""

    def __init__(self, reason: str, *, is_at_entry: bool = False) -> None:
        super().__init__(reason)
        self.place = Unavailable(reason, is_at_entry=is_at_entry)


class _Typed(NamedTuple):
    """A node on the stack, and the size and sign of its type; size 0 for a word."""

    node: Node
    size: int = 0
    is_signed: bool = False


def executed(expression: bytes, unit: EntryUnit, frame: Frame) -> Location:
    """Return where an expression says that a variable is; IndexError or ValueError if it cannot be understood."""
    if not expression:
        return Unavailable("optimized out")
    try:
        return _Machine(expression, unit, frame).run()
    except _NotThere as found:
        return found.place


class _Machine:
    def __init__(self, expression: bytes, unit: EntryUnit, frame: Frame) -> None:
        self._data = expression
        self._unit = unit
        self._order = unit.sizes.order
        self._word = unit.sizes.address
        self._mask = (1 << 8 * self._word) - 1
        self._frame = frame
        self._position = 0
        self._stack: list[_Typed] = []
        self._place: Location | None = None
        self._pieces: list[Piece] = []
        self._forks = 0

    def run(self) -> Location:
        steps = 0
        while self._position < len(self._data):
            steps += 1
            if steps > _STEPS_MAX or len(self._stack) > _STACK_MAX:
                raise ValueError("an expression that does not end")
            operation = self._number(1)
            if operation in (0x93, 0x9D):  # piece, bit_piece
                self._end_piece(operation)
            elif self._place is not None:
                raise ValueError("an operation behind the end of an expression")
            elif operation == 0x2F:  # skip
                self._jump(self._number(2, is_signed=True))
            elif operation == 0x28:  # bra
                distance, condition = self._number(2, is_signed=True), self._pop().node
                if not isinstance(condition, Number):
                    return self._either(condition, distance)
                if condition.value:
                    self._jump(distance)
            else:
                self._step(operation)
        if self._pieces:
            return Pieces(tuple(self._pieces))
        return self._found()

    def _jump(self, distance: int) -> None:
        self._position += distance
        if not 0 <= self._position <= len(self._data):
            raise ValueError("a jump out of an expression")

    def _either(self, condition: Node, distance: int) -> Location:
        """Return what is found with and without a jump, as a choice."""
        self._forks += 1
        if self._forks > _FORKS_MAX or self._pieces:
            raise _NotThere("computed in too many ways")
        other = _Machine(self._data, self._unit, self._frame)
        other._position, other._stack, other._forks = self._position, [*self._stack], self._forks
        other._jump(distance)
        match other.run(), self.run():
            case InMemory(chosen), InMemory(otherwise):
                return InMemory(self._choice(condition, chosen, otherwise))
            case Computed(chosen), Computed(otherwise):
                return Computed(self._choice(condition, chosen, otherwise))
        raise _NotThere("here or there, as it comes")

    def _choice(self, condition: Node, chosen: Node, otherwise: Node) -> Node:
        nodes = size_of_tree(condition, chosen, otherwise) + 1
        if nodes > SIZE_MAX:
            raise _NotThere("computed in too many steps")
        return Choice(condition, chosen, otherwise, nodes)

    def _found(self) -> Location:
        if self._place is not None:
            return self._place
        return InMemory(self._pop().node)

    def _end_piece(self, operation: int) -> None:
        size = self._unsigned()
        if operation == 0x9D:
            offset = self._unsigned()
            if size % 8 or offset:
                raise _NotThere("in parts of bytes")
            size //= 8
        is_there = self._place is not None or self._stack
        self._pieces.append(Piece(self._found() if is_there else Unavailable("optimized out"), size))
        self._place = None
        self._stack.clear()

    def _step(self, operation: int) -> None:
        match operation:
            case _ if 0x30 <= operation < 0x50:  # lit0 to lit31
                self._push(Number(operation - 0x30))
            case _ if 0x50 <= operation < 0x70:  # reg0 to reg31
                self._place = InRegister(operation - 0x50)
            case _ if 0x70 <= operation < 0x90:  # breg0 to breg31
                self._push(self._moved(RegisterContent(operation - 0x70), self._signed()))
            case 0x90:  # regx
                self._place = InRegister(self._unsigned())
            case 0x92:  # bregx
                number = self._unsigned()
                self._push(self._moved(RegisterContent(number), self._signed()))
            case 0x91:  # fbreg
                distance = self._signed()
                self._push(self._moved(self._base(), distance))
            case 0x9C:  # call_frame_cfa
                self._push(FrameAddressOf(self._frame.address))
            case 0x03:  # addr
                self._push(LinkAddress(self._number(self._word)))
            case 0xA1 | 0xFB:  # addrx, GNU_addr_index
                self._push(LinkAddress(self._unit.file.indexed_address(self._unit, self._unsigned())))
            case 0xA2 | 0xFC:  # constx, GNU_const_index
                self._push(Number(self._unit.file.indexed_address(self._unit, self._unsigned())))
            case _ if operation in _CONSTANTS:
                size, is_signed = _CONSTANTS[operation]
                self._push(Number(self._number(size, is_signed=is_signed) & self._mask))
            case 0x10:  # constu
                self._push(Number(self._unsigned() & self._mask))
            case 0x11:  # consts
                self._push(Number(self._signed() & self._mask))
            case 0x9F:  # stack_value
                self._place = Computed(self._pop().node)
            case 0x9E:  # implicit_value
                self._place = Known(self._block(self._unsigned()))
            case 0x96:  # nop
                pass
            case 0xA3 | 0xF3:  # entry_value, GNU_entry_value
                self._entry_value(self._block(self._unsigned()))
            case 0xA0 | 0xF2:  # implicit_pointer
                raise _NotThere("a pointer to what was optimized out")
            case 0xFA:  # GNU_parameter_ref
                raise _NotThere("known only in the caller")
            case 0x99 | 0x98:  # call_ref, call4
                raise _NotThere("optimized out")
            case 0x9B | 0xE0:  # form_tls_address, GNU_push_tls_address
                raise _NotThere("thread-local: each thread has its own")
            case _:
                self._calculate(operation)

    def _calculate(self, operation: int) -> None:
        stack = self._stack
        match operation:
            case 0x06:  # deref
                self._push(self._loaded(self._pop().node, self._word))
            case 0x94:  # deref_size
                size = self._number(1)
                self._push(self._loaded(self._pop().node, size))
            case 0x12:  # dup
                stack.append(stack[-1])
            case 0x13:  # drop
                stack.pop()
            case 0x14:  # over
                stack.append(stack[-2])
            case 0x15:  # pick
                stack.append(stack[-1 - self._number(1)])
            case 0x16:  # swap
                stack[-1], stack[-2] = stack[-2], stack[-1]
            case 0x17:  # rot
                stack[-1], stack[-2], stack[-3] = stack[-2], stack[-3], stack[-1]
            case 0x23:  # plus_uconst
                self._push(self._moved(self._pop().node, self._unsigned()))
            case _ if operation in _UNARY:
                operand = self._pop()
                self._push_typed(self._operation(_UNARY[operation], operand.node), operand)
            case _ if operation in _BINARY:
                right, left = self._pop(), self._pop()
                self._push_typed(self._operation(_BINARY[operation], left.node, right.node), left)
            case 0xA8 | 0xF7 | 0xA9 | 0xF9:  # convert, reinterpret
                self._convert(self._type(self._unsigned()))
            case 0xA5 | 0xF5:  # regval_type
                number = self._unsigned()
                self._stack.append(_Typed(RegisterContent(number)))
                self._convert(self._type(self._unsigned()))
            case 0xA4 | 0xF4:  # const_type
                type_ = self._type(self._unsigned())
                data = self._block(self._number(1))
                self._stack.append(_Typed(Number(int.from_bytes(data, self._order) & self._mask)))
                self._convert(type_)
            case 0xA6 | 0xF6:  # deref_type
                size = self._number(1)
                type_ = self._type(self._unsigned())
                self._push(self._loaded(self._pop().node, size))
                self._convert(type_)
            case _:
                raise ValueError(f"operation {operation:#x}")

    # Nodes

    def _push(self, node: Node) -> None:
        if size_of_tree(node) > SIZE_MAX:
            raise _NotThere("computed in too many steps")
        self._stack.append(_Typed(node))

    def _push_typed(self, node: Node, of: _Typed) -> None:
        """Push the result of an operation, which has the type of its operands."""
        if 0 < of.size < self._word:
            node = Extended(node, of.size, of.is_signed, size_of_tree(node) + 1)
        self._push(node)
        self._stack[-1] = of._replace(node=node)

    def _pop(self) -> _Typed:
        return self._stack.pop()

    def _operation(self, operator: str, left: Node, right: Node | None = None) -> Node:
        if isinstance(left, Number) and isinstance(right, Number) and operator in _FOLDED:
            return Number(int(_FOLDED[operator](left.value, right.value)) & self._mask)
        return Operation(operator, left, right, size_of_tree(left, right) + 1)

    def _moved(self, node: Node, distance: int) -> Node:
        distance &= self._mask
        if not distance:
            return node
        if isinstance(node, Number):
            return Number(node.value + distance & self._mask)
        if isinstance(node, LinkAddress):
            return LinkAddress(node.address + distance & self._mask)
        if isinstance(node, Operation) and node.operator == "+" and isinstance(node.right, Number):
            return self._moved(node.left, node.right.value + distance)
        return self._operation("+", node, Number(distance))

    def _loaded(self, address: Node, size: int) -> Loaded:
        if size not in (1, 2, 4, 8) or size > self._word:
            raise ValueError(f"{size} bytes of memory")
        return Loaded(address, size, size_of_tree(address) + 1)

    def _base(self) -> Node:
        match self._frame.base():
            case InMemory(node):
                return node
            case InRegister(number):
                return RegisterContent(number)
            case Unavailable() as place:
                raise _NotThere(place.reason)
        raise ValueError("a frame base that is no address")

    def _entry_value(self, expression: bytes) -> None:
        """Push what a register had at the entry of the function; only there it is known."""
        if not self._frame.is_entry:
            raise _NotThere("known only at the entry of the function", is_at_entry=True)
        place = executed(expression, self._unit, self._frame)
        match place:
            case InRegister(number):
                self._push(RegisterContent(number))
            case InMemory(node):
                self._push(node)
            case Unavailable():
                raise _NotThere(place.reason)
            case _:
                raise ValueError("the value of an entry that is no register")

    def _convert(self, type_: Entry | None) -> None:
        value = self._pop()
        if type_ is None:
            self._push(value.node)
            return
        size, encoding = type_.number(At.BYTE_SIZE), type_.number(At.ENCODING)
        if encoding not in _INTEGERS or size not in (1, 2, 4, 8):
            raise _NotThere("computed with floating-point numbers, or wide ones")
        is_signed = encoding in _SIGNED
        node = value.node
        if size < self._word:
            node = Extended(node, size, is_signed, size_of_tree(node) + 1)
        self._push(node)
        self._stack[-1] = _Typed(node, size, is_signed)

    def _type(self, offset: int) -> Entry | None:
        """Return a base type of the unit; None for a word."""
        return self._unit.entry(self._unit.offset + offset) if offset else None

    # Bytes

    def _number(self, size: int, *, is_signed: bool = False) -> int:
        start = self._position
        self._position += size
        if self._position > len(self._data):
            raise IndexError("an expression that ends early")
        return int.from_bytes(self._data[start : self._position], self._order, signed=is_signed)

    def _unsigned(self) -> int:
        value, self._position = unsigned_at(self._data, self._position)
        return value

    def _signed(self) -> int:
        value, self._position = signed_at(self._data, self._position)
        return value

    def _block(self, size: int) -> bytes:
        start = self._position
        self._position += size
        if self._position > len(self._data):
            raise IndexError("an expression that ends early")
        return self._data[start : self._position]


# Where a variable or parameter is at an instruction.


_OPTIMIZED_OUT = Unavailable("optimized out")


def frame_at(function: Entry | None, address: int, entry: int | None) -> Frame:
    """Return what expressions need to know of an instruction of a function whose first one is at ``entry``."""

    def base() -> Location:
        if function is None or not function.has(At.FRAME_BASE):
            return Unavailable("not described: its function has no frame")
        place = Frame(address, address == entry, lambda: Unavailable("a frame that is described by itself"))
        return _expression_at(function, At.FRAME_BASE, place)

    return Frame(address, address == entry, base)


def is_listed(variable: Entry) -> bool:
    """Return whether a variable is at different places at different instructions."""
    return variable.offset_in_section(At.LOCATION) is not None or variable.index_in_lists(At.LOCATION) is not None


def location_at(variable: Entry, frame: Frame) -> Location:
    """Return where a variable is at an instruction, or its constant value; raise ``TargetError`` if unreadable."""
    for each in variable.origins():
        if each.has(At.LOCATION):
            return _expression_at(each, At.LOCATION, frame)
        if each.has(At.CONST_VALUE):
            return _constant(each)
    return _OPTIMIZED_OUT


def known_ranges(variable: Entry) -> Sequence[AddressRange]:
    """Return the link addresses at which a list says where a variable is, without its values at entries."""
    found = listed_expressions(variable, At.LOCATION) if variable.has(At.LOCATION) else None
    ranges: list[AddressRange] = []
    for start, end, expression in found or ():
        if start is not None and start < end and expression and expression[0] not in (0xA3, 0xF3, 0xF2, 0xA0, 0xFA):
            if ranges and ranges[-1][1] == start:
                start, _ = ranges.pop()  # noqa: PLW2901 - the two are one
            ranges.append((start, end))
    return ranges


def _expression_at(entry: Entry, attribute: int, frame: Frame) -> Location:
    unit = entry.unit
    expression = entry.block(attribute)
    if expression is None:
        expression = _chosen(entry, attribute, frame.address)
    if expression is None:
        return _OPTIMIZED_OUT
    try:
        return executed(expression, unit, frame)
    except UNREADABLE:
        unit.file.malformed(f"the location of the entry at {entry.offset:#x} cannot be understood")


def _chosen(entry: Entry, attribute: int, address: int) -> bytes | None:
    """Return the expression of a list that holds at an instruction."""
    otherwise = None
    for start, end, expression in listed_expressions(entry, attribute) or ():
        if start is None:
            otherwise = expression
        elif start <= address < end:
            return expression
    return otherwise


def _constant(entry: Entry) -> Location:
    if (number := entry.number(At.CONST_VALUE)) is not None:
        return Computed(Number(number & (1 << 8 * entry.unit.sizes.address) - 1))
    if (data := entry.block(At.CONST_VALUE)) is not None:
        return Known(data)
    text = entry.text(At.CONST_VALUE)
    return Known(text.encode("utf-8", "surrogateescape") + b"\0") if text is not None else _OPTIMIZED_OUT
