"""
DWARF expressions: a stack machine that computes a location or a value (DWARF 5, 2.5 and 2.6; GNU's forms).

It computes with trees. Known values become numbers at once, so an expression over readable memory and registers results
in a number. A value that is known only at a hit stays a tree. If a jump depends on a tree, both ways are followed.

The caller passes the context of an expression, which determines the values that can be read, and the bases. Unwind
tables have no base. Debug information has frames, types, and indexed addresses.
"""

from __future__ import annotations

import operator as operators
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dprobes.target.elf.byte_reader import ByteReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dprobes.arch import ByteOrder

__all__ = [
    "SIZE_MAX",
    "BaseType",
    "Choice",
    "Computed",
    "Expressible",
    "Extended",
    "FrameAddressOf",
    "InMemory",
    "InRegister",
    "Known",
    "LinkAddress",
    "Loaded",
    "Location",
    "Node",
    "NowhereError",
    "Number",
    "Operation",
    "Pieces",
    "RegisterContent",
    "Unavailable",
    "executed",
    "moved",
    "size_of_tree",
]

SIZE_MAX = 64
"""Maximum number of nodes of a tree. Compilers need about ten."""

_STEPS_MAX = 512
_STACK_MAX = 64
_FORKS_MAX = 3
"""Maximum number of jumps on one path that depend on a tree. Each of them doubles the number of paths."""

# Trees. Numbers are unsigned words that wrap; operators whose names end with ``s`` take them as signed.


@dataclass(frozen=True, slots=True)
class Number:
    """A number that is known from the expression alone."""

    value: int


@dataclass(frozen=True, slots=True)
class RegisterContent:
    """The content of a register, by its DWARF number."""

    number: int


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """The run-time address of the code or data at a link address of the file."""

    address: int


@dataclass(frozen=True, slots=True)
class FrameAddressOf:
    """The canonical frame address at an instruction, by the unwind table of the function."""

    address: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The content of ``size`` bytes of memory at an address, zero-extended."""

    address: Node
    size: int
    nodes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Operation:
    """Operation of C with one or two operands: ``+ - * / % & | ^ << >> ~ neg abs``, ``/s >>s``, and ``== <s`` …."""

    operator: str
    left: Node
    right: Node | None = None
    nodes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Extended:
    """The low ``size`` bytes of a node, zero- or sign-extended."""

    node: Node
    size: int
    is_signed: bool
    nodes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """``chosen`` if a condition is not 0, else ``otherwise``."""

    condition: Node
    chosen: Node
    otherwise: Node
    nodes: int = field(default=0, compare=False)


Node = Number | RegisterContent | LinkAddress | FrameAddressOf | Loaded | Operation | Extended | Choice


def size_of_tree(*nodes: Node | None) -> int:
    """Return the total number of nodes in these expression trees. A tree that is None has no nodes."""
    return sum(getattr(node, "nodes", 0) or 1 for node in nodes if node is not None)


# Locations of a variable, or its value.


@dataclass(frozen=True, slots=True)
class InMemory:
    """A variable in memory, at an address."""

    address: Node


@dataclass(frozen=True, slots=True)
class InRegister:
    """A variable in a register, by its DWARF number."""

    number: int


@dataclass(frozen=True, slots=True)
class Computed:
    """A variable without a location, whose value is computed."""

    value: Node


@dataclass(frozen=True, slots=True)
class Known:
    """A variable without a location, whose bytes are known."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A variable without a location and value, for a reason."""

    reason: str
    is_at_entry: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a variable, of ``size`` bytes."""

    location: Location
    size: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """A variable in several parts, in order."""

    pieces: tuple[Piece, ...]


Location = InMemory | InRegister | Computed | Known | Unavailable | Pieces


class NowhereError(Exception):
    """Error of a DWARF expression whose variable has no location, or whose value cannot be computed."""

    def __init__(self, reason: str, *, is_at_entry: bool = False) -> None:
        super().__init__(reason)
        self.place = Unavailable(reason, is_at_entry=is_at_entry)


class BaseType(NamedTuple):
    """Type of a number: its size in bytes, or 0 for a word, and its signedness."""

    size: int = 0
    is_signed: bool = False


class Expressible(NamedTuple):
    """
    Context in which expressions are evaluated.

    * ``register`` returns the content of a register, ``memory`` a number of bytes at an address, ``address`` an address
      of code or data, and ``type_at`` the type at an offset. They raise ValueError, ``TargetError`` or ``NowhereError``
      if there is no value.
    * ``bases`` has additional operations by name, which push the result for their operand.
    """

    word_size: int
    byte_order: ByteOrder
    register: Callable[[int], Node]
    memory: Callable[[Node, int], Node]
    address: Callable[[int], Node]
    bases: Mapping[str, Callable[..., Node]]
    type_at: Callable[[int], BaseType] | None = None


_WORD = BaseType()


class _Row(NamedTuple):
    """
    Operation of DWARF expressions: its name, and the forms of its operands.

    ``a`` is an address, ``B b H h I i Q q`` are numbers as in ``struct``, ``t`` is a type. ``u`` and ``s`` are LEB128,
    unsigned and signed. ``x`` is a block whose size is LEB128, ``X`` a block whose size is a byte. ``given`` has
    operands that the opcode implies.
    """

    name: str
    forms: str = ""
    given: tuple[int, ...] = ()


_OPERATIONS: Final[Mapping[int, _Row]] = {
    0x03: _Row("addr", "a"),
    0x06: _Row("deref"),
    0x08: _Row("const", "B"), 0x09: _Row("const", "b"), 0x0A: _Row("const", "H"), 0x0B: _Row("const", "h"),
    0x0C: _Row("const", "I"), 0x0D: _Row("const", "i"), 0x0E: _Row("const", "Q"), 0x0F: _Row("const", "q"),
    0x10: _Row("const", "u"), 0x11: _Row("const", "s"),
    0x12: _Row("pick", given=(0,)), 0x13: _Row("drop"), 0x14: _Row("pick", given=(1,)), 0x15: _Row("pick", "B"),
    0x16: _Row("swap"), 0x17: _Row("rot"),
    0x19: _Row("abs"), 0x1A: _Row("&"), 0x1B: _Row("/s"), 0x1C: _Row("-"), 0x1D: _Row("%"), 0x1E: _Row("*"),
    0x1F: _Row("neg"), 0x20: _Row("~"), 0x21: _Row("|"), 0x22: _Row("+"),
    0x23: _Row("plus_uconst", "u"),
    0x24: _Row("<<"), 0x25: _Row(">>"), 0x26: _Row(">>s"), 0x27: _Row("^"),
    0x28: _Row("bra", "h"),
    0x29: _Row("=="), 0x2A: _Row(">=s"), 0x2B: _Row(">s"), 0x2C: _Row("<=s"), 0x2D: _Row("<s"), 0x2E: _Row("!="),
    0x2F: _Row("skip", "h"),
    **{0x30 + number: _Row("const", given=(number,)) for number in range(32)},
    **{0x50 + number: _Row("reg", given=(number,)) for number in range(32)},
    **{0x70 + number: _Row("breg", "s", (number,)) for number in range(32)},
    0x90: _Row("reg", "u"),
    0x91: _Row("fbreg", "s"),
    0x92: _Row("breg", "us"),
    0x93: _Row("piece", "u"),
    0x94: _Row("deref", "B"),
    0x96: _Row("nop"),
    0x98: _Row("call"), 0x99: _Row("call"),
    0x9B: _Row("form_tls_address"), 0xE0: _Row("form_tls_address"),
    0x9C: _Row("call_frame_cfa"),
    0x9D: _Row("bit_piece", "uu"),
    0x9E: _Row("implicit_value", "x"),
    0x9F: _Row("stack_value"),
    0xA0: _Row("implicit_pointer"), 0xF2: _Row("implicit_pointer"),
    0xA1: _Row("addrx", "u"), 0xFB: _Row("addrx", "u"),
    0xA2: _Row("constx", "u"), 0xFC: _Row("constx", "u"),
    0xA3: _Row("entry_value", "x"), 0xF3: _Row("entry_value", "x"),
    0xA4: _Row("const_type", "tX"), 0xF4: _Row("const_type", "tX"),
    0xA5: _Row("regval_type", "ut"), 0xF5: _Row("regval_type", "ut"),
    0xA6: _Row("deref_type", "Bt"), 0xF6: _Row("deref_type", "Bt"),
    0xA8: _Row("convert", "t"), 0xF7: _Row("convert", "t"), 0xA9: _Row("convert", "t"), 0xF9: _Row("convert", "t"),
    0xFA: _Row("GNU_parameter_ref"),
}  # fmt: skip
"""All operations that compilers and linkers emit."""

_SIZES = {"b": 1, "h": 2, "i": 4, "q": 8}

_NOWHERE = {
    "implicit_pointer": "a pointer to what was optimized out",
    "GNU_parameter_ref": "known only in the caller",
    "call": "optimized out",
    "form_tls_address": "thread-local: each thread has its own",
}
"""Operations whose subject has no location, with the reason."""

_UNARY: Mapping[str, Callable[[int], int]] = {"abs": abs, "neg": operators.neg, "~": operators.inv}


def _quotient(left: int, right: int) -> int:
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_BINARY: Mapping[str, Callable[[int, int], int]] = {
    "+": operators.add, "-": operators.sub, "*": operators.mul, "/": operators.floordiv, "/s": _quotient,
    "%": operators.mod, "&": operators.and_, "|": operators.or_, "^": operators.xor, "<<": operators.lshift,
    ">>": operators.rshift, ">>s": operators.rshift, "==": operators.eq, "!=": operators.ne, ">=s": operators.ge,
    ">s": operators.gt, "<=s": operators.le, "<s": operators.lt,
}  # fmt: skip
_SHIFTS, _DIVISIONS = ("<<", ">>", ">>s"), ("/", "/s", "%")
_ORDERS = (">=s", ">s", "<=s", "<s")
_COMPARISONS = (*_ORDERS, "==", "!=")


class _Typed(NamedTuple):
    """A value on the stack of the DWARF expression, and its type."""

    node: Node
    type: BaseType = _WORD


def executed(expression: bytes, about: Expressible, initial: int | None = None) -> Location:
    """
    Evaluate an expression and return the location that it describes.

    ``initial`` is on the stack first. Raise IndexError or ValueError for a malformed expression.
    """
    machine = _Machine(expression, about)
    if initial is not None:
        machine.stack.append(_Typed(Number(initial)))
    try:
        return machine.run()
    except NowhereError as found:
        return found.place


class _Machine:
    def __init__(self, expression: bytes, about: Expressible) -> None:
        self._expression = expression
        self._reader = ByteReader(expression, about.byte_order)
        self._about = about
        self._mask = (1 << 8 * about.word_size) - 1
        self.stack: list[_Typed] = []
        self._place: Location | None = None
        self._pieces: list[Piece] = []
        self._forks = 0

    def run(self) -> Location:
        reader = self._reader
        steps = 0
        while not reader.is_at_end:
            steps += 1
            if steps > _STEPS_MAX or len(self.stack) > _STACK_MAX:
                raise ValueError("an expression that does not end")
            code = reader.number(1)
            row = _OPERATIONS.get(code)
            if row is None:
                raise ValueError(f"operation {code:#x}")
            if self._place is not None and row.name not in ("piece", "bit_piece"):
                raise ValueError("an operation after the end of an expression")
            if row.name in _NOWHERE:
                raise NowhereError(_NOWHERE[row.name])
            operands = [*row.given, *map(self._operand, row.forms)]
            if row.name == "bra":
                condition = self._pop()
                if not isinstance(condition, Number):
                    return self._either(condition, operands[0])
                reader.move(operands[0] if condition.value else 0)
            elif row.name in self._about.bases:
                self._push(self._about.bases[row.name](*operands))
            elif not (self._calculate(row.name) or self._stacked(row.name, operands) or self._ends(row.name, operands)):
                raise ValueError(f"operation {code:#x}")
        return Pieces(tuple(self._pieces)) if self._pieces else self._found()

    def _operand(self, form: str) -> Any:
        reader = self._reader
        match form:
            case "a":
                return reader.number(self._about.word_size)
            case "u":
                return reader.unsigned()
            case "s":
                return reader.signed()
            case "x":
                return reader.take(reader.unsigned())
            case "X":
                return reader.take(reader.number(1))
            case "t":
                return self._type(reader.unsigned())
            case _:
                return reader.number(_SIZES[form.lower()], is_signed=form.islower())

    def _type(self, offset: int) -> BaseType:
        if not offset:
            return _WORD
        if self._about.type_at is None:
            raise ValueError("a type, where there are none")
        found = self._about.type_at(offset)
        if found.size not in (1, 2, 4, 8) or found.size > self._about.word_size:
            raise NowhereError("computed with floating-point numbers, or wide ones")
        return found

    def _either(self, condition: Node, distance: int) -> Location:
        """Return a choice between the locations with and without a jump."""
        self._forks += 1
        if self._forks > _FORKS_MAX or self._pieces:
            raise NowhereError("computed in too many ways")
        other = _Machine(self._expression, self._about)
        other.stack, other._forks = [*self.stack], self._forks
        other._reader.move(self._reader.position + distance)
        match other.run(), self.run():
            case InMemory(chosen), InMemory(otherwise):
                return InMemory(_limited(_choice(condition, chosen, otherwise)))
            case Computed(chosen), Computed(otherwise):
                return Computed(_limited(_choice(condition, chosen, otherwise)))
        raise NowhereError("here or there, as it comes")

    # Operations: each method executes one, and returns False if it does not handle it

    def _stacked(self, name: str, operands: Sequence[Any]) -> bool:
        """Execute an operation that rearranges the stack or pushes a value. Return False for any other operation."""
        stack, about = self.stack, self._about
        match name, operands:
            case "const", [value]:
                self._push(Number(value & self._mask))
            case "addr", [value]:
                self._push(about.address(value))
            case "breg", [number, distance]:
                self._push(moved(about.register(number), distance, self._mask))
            case "plus_uconst", [distance]:
                self._push(moved(self._pop(), distance, self._mask))
            case "deref", sizes:
                self._push(self._loaded(*sizes))
            case "pick", [number]:
                stack.append(stack[-1 - number])
            case "drop", _:
                stack.pop()
            case "swap", _:
                stack[-1], stack[-2] = stack[-2], stack[-1]
            case "rot", _:
                stack[-1], stack[-2], stack[-3] = stack[-2], stack[-3], stack[-1]
            case "skip", [distance]:
                self._reader.move(distance)
            case "convert", [type_]:
                self._push(self._pop(), type_)
            case "regval_type", [number, type_]:
                self._push(about.register(number), type_)
            case "const_type", [type_, data]:
                self._push(Number(int.from_bytes(data, about.byte_order) & self._mask), type_)
            case "deref_type", [size, type_]:
                self._push(self._loaded(size), type_)
            case _:
                return name == "nop"
        return True

    def _ends(self, name: str, operands: Sequence[Any]) -> bool:
        """Execute an operation that defines a location. Return False for any other operation."""
        match name, operands:
            case "reg", [number]:
                self._place = InRegister(number)
            case "stack_value", _:
                self._place = Computed(self._pop())
            case "implicit_value", [data]:
                self._place = Known(data)
            case "piece", [size]:
                self._end_piece(size)
            case "bit_piece", [bits, offset]:
                if bits % 8 or offset:
                    raise NowhereError("in parts of bytes")
                self._end_piece(bits // 8)
            case _:
                return False
        return True

    def _end_piece(self, size: int) -> None:
        is_there = self._place is not None or self.stack
        self._pieces.append(Piece(self._found() if is_there else Unavailable("optimized out"), size))
        self._place = None
        self.stack.clear()

    def _found(self) -> Location:
        return self._place if self._place is not None else InMemory(self._pop())

    def _calculate(self, name: str) -> bool:
        """
        Execute an arithmetic operation or a comparison. Return False for any other operation.

        The result has the type of the operands; the result of a comparison is a word.
        """
        if name in _UNARY:
            operand = self.stack.pop()
            if name != "abs" or operand.type.is_signed or not operand.type.size:
                operand = _Typed(self._folded(name, operand.node), operand.type)
            self._push(*operand)
            return True
        if name not in _BINARY:
            return False
        right, (left, type_) = self._pop(), self.stack.pop()
        if type_.size and name in (">>", ">>s"):
            left = self._extended(left, BaseType(type_.size, name == ">>s"))
        elif type_.is_signed and name == "%":  # the remainder has the sign of the dividend
            right, name = self._folded("*", self._folded("/s", left, right), right), "-"
        elif type_ == BaseType(self._about.word_size) and name in ("/s", *_ORDERS):  # unsigned, with the size of a word
            if name == "/s":
                name = "/"
            else:  # flipping the highest bits of unsigned words makes their order that of signed words
                bit = Number(self._mask // 2 + 1)
                left, right = self._folded("^", left, bit), self._folded("^", right, bit)
        self._push(self._folded(name, left, right), _WORD if name in _COMPARISONS else type_)
        return True

    def _folded(self, name: str, left: Node, right: Node | None = None) -> Node:
        """Return an operation, as a number if its operands are numbers, so that loops with counters terminate."""
        if isinstance(left, Number):
            a = self._signed(left.value) if name.endswith("s") else left.value
            if right is None:
                return Number(_UNARY[name](a) & self._mask)
            if isinstance(right, Number) and (right.value or name not in _DIVISIONS):
                b = self._signed(right.value) if name.endswith("s") else right.value
                if name in _SHIFTS:
                    b = min(right.value, 8 * self._about.word_size)  # all bits are shifted out, and numbers stay small
                return Number(int(_BINARY[name](a, b)) & self._mask)
        return Operation(name, left, right, size_of_tree(left, right) + 1)

    def _extended(self, node: Node, type_: BaseType) -> Node:
        """Return a node converted to a type of at most a word's size."""
        if not 0 < type_.size < self._about.word_size:
            return node
        if isinstance(node, Number):
            value = node.value & (1 << 8 * type_.size) - 1
            is_negative = type_.is_signed and value >> 8 * type_.size - 1
            return Number(value - (1 << 8 * type_.size) & self._mask if is_negative else value)
        return Extended(node, type_.size, type_.is_signed, size_of_tree(node) + 1)

    def _loaded(self, size: int | None = None) -> Node:
        size = self._about.word_size if size is None else size
        if not 1 <= size <= self._about.word_size:
            raise ValueError(f"{size} bytes of memory")
        return self._about.memory(self._pop(), size)

    def _push(self, node: Node, type_: BaseType = _WORD) -> None:
        self.stack.append(_Typed(_limited(self._extended(node, type_)), type_))

    def _pop(self) -> Node:
        return self.stack.pop().node

    def _signed(self, value: int) -> int:
        return value - self._mask - 1 if value >> 8 * self._about.word_size - 1 else value


def _limited(node: Node) -> Node:
    if size_of_tree(node) > SIZE_MAX:
        raise NowhereError("computed in too many steps")
    return node


def _choice(condition: Node, chosen: Node, otherwise: Node) -> Choice:
    return Choice(condition, chosen, otherwise, size_of_tree(condition, chosen, otherwise) + 1)


def moved(node: Node, distance: int, mask: int) -> Node:
    """Return a node plus a number. All bits of a word are set in ``mask``."""
    distance &= mask
    match node:
        case _ if not distance:
            return node
        case Number(value):
            return Number(value + distance & mask)
        case LinkAddress(address):
            return LinkAddress(address + distance & mask)
        case Operation("+", left, Number(value)):
            return moved(left, value + distance, mask)
    return Operation("+", node, Number(distance), size_of_tree(node) + 2)
