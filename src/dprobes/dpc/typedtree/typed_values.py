"""
The typed tree: a program whose names are resolved and whose conversions are written out.

Each value has a type, and stands for one cell of the RPN stack that holds a number of that type: sign-extended to the
word if the type is signed, else filled up with zeros.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from dprobes.tree_nodes import Node

if TYPE_CHECKING:
    from dprobes.dpc.types.c_types import CType, Integer
    from dprobes.source_text import Span

__all__ = [
    "Argument",
    "Arithmetic",
    "Assign",
    "BitField",
    "Both",
    "Bytes",
    "Choice",
    "CommName",
    "CommTest",
    "Comparison",
    "Constant",
    "Convert",
    "Either",
    "FunctionCall",
    "Kept",
    "KeptTest",
    "Local",
    "Memory",
    "Negation",
    "NetworkAddress",
    "Not",
    "Place",
    "Register",
    "Sequence",
    "StackTrace",
    "Step",
    "Symbol",
    "System",
    "TableValue",
    "Text",
    "TextChoice",
    "TextTest",
    "Value",
    "Variable",
    "VariableKind",
]

# Values


class Constant(Node):
    """A number that is known."""

    value: int
    type: CType


class Symbol(Node):
    """The run-time address of a symbol of the module."""

    name: str
    type: CType


class Register(Node):
    """
    A register at the hit, or with ``at_entry`` at the entry of the function whose return is probed.

    ``is_certain`` says that the entry was seen, as a value before has shown.
    """

    name: str
    type: CType
    at_entry: bool = False
    is_certain: bool = False


class System(Node):
    """What an instruction of the group "System variables" pushes: ``pid``, ``time``; ``is_certain`` as of registers."""

    name: str
    type: CType
    is_certain: bool = False


class Local(Node):
    """A variable on the RPN stack, by its number in the handler or function; parameters have negative numbers."""

    slot: int
    type: CType


class VariableKind(Enum):
    """The instructions that access a variable."""

    LOCAL = "lv"
    GLOBAL = "gv"
    PER_CPU = "cv"
    THREAD = "tv"


class Variable(Node):
    """A variable of the program, or the element ``index`` of an array of them that begins at ``first``."""

    kind: VariableKind
    first: int
    type: CType
    index: Value | None = None


class Memory(Node):
    """What is in the target's memory at an address."""

    address: Value
    type: CType


class BitField(Node):
    """Bits of a unit in memory: ``bits`` of them, above ``shift`` lower ones."""

    unit: Memory
    bits: int
    shift: int
    type: CType


Place = Register | Local | Variable | Memory | BitField
"""What can be assigned to."""


class Arithmetic(Node):
    """An operation on two values of its type; of shifts the right one may be of another."""

    operator: str
    left: Value
    right: Value
    type: Integer


class Negation(Node):
    """``-x``, or with ``is_complement`` ``~x``."""

    operand: Value
    type: Integer
    is_complement: bool = False


class Comparison(Node):
    """A comparison of two values of one type, ``== < <=`` or with the operands exchanged; it is 0 or 1."""

    operator: str
    left: Value
    right: Value
    is_signed: bool
    type: CType


class Not(Node):
    """``!x``."""

    operand: Value
    type: CType


class Both(Node):
    """``left && right``."""

    left: Value
    right: Value
    type: CType


class Either(Node):
    """``left || right``."""

    left: Value
    right: Value
    type: CType


class Convert(Node):
    """A value as another type holds it."""

    operand: Value
    type: CType


class Assign(Node):
    """An assignment; its value is what the place holds then."""

    target: Place
    value: Value
    type: CType


class Step(Node):
    """``++`` and ``--``: ``amount`` is added; the value is that before if ``is_postfix``."""

    target: Place
    amount: int
    is_postfix: bool
    type: CType


class Choice(Node):
    """``condition ? yes : no``."""

    condition: Value
    yes: Value
    no: Value
    type: CType


class Sequence(Node):
    """``left, right``."""

    left: Value
    right: Value
    type: CType


class FunctionCall(Node):
    """A call of a function of the program."""

    name: str
    arguments: tuple[Value, ...]
    type: CType
    span: Span


class TableValue(Node):
    """What a keyed table has under its keys."""

    table: str
    keys: tuple[Argument, ...]
    type: CType


class TextTest(Node):
    """Whether the string at an address is ``text``, or begins with it if ``is_prefix``."""

    address: Value
    text: str
    is_prefix: bool
    type: CType


class CommTest(Node):
    """Whether the process name is ``text``, or begins with it if ``is_prefix``."""

    text: str
    is_prefix: bool
    type: CType


class KeptTest(Node):
    """Whether the string that a table keeps is ``text``, or begins with it; with "" also whether there is no stack."""

    kept: Kept
    text: str
    is_prefix: bool
    type: CType


Value = (
    Constant | Symbol | Register | System | Local | Variable | Memory | BitField | Arithmetic | Negation | Comparison
    | Not | Both | Either | Convert | Assign | Step | Choice | Sequence | FunctionCall | TextTest | CommTest
    | TableValue | KeptTest
)  # fmt: skip


# What only can be logged


class Text(Node):
    """The string at an address, at most ``limit`` bytes of it."""

    address: Value
    limit: int
    type: CType


class Bytes(Node):
    """``size`` bytes of memory."""

    address: Value
    size: Value
    type: CType


class Literal(Node):
    """A text in quotes: what a table keeps, or its key, has room for ``limit`` bytes of it."""

    text: str
    limit: int
    type: CType


class TextChoice(Node):
    """One of two strings in quotes, or of more: the one of a condition."""

    condition: Value
    yes: Literal | TextChoice
    no: Literal | TextChoice
    type: CType


class CommName(Node):
    """The process name, which is in the header of each record."""

    type: CType


class StackTrace(Node):
    """The call stack of the program, or of the kernel."""

    is_kernel: bool
    frames: int | None
    type: CType


class Kept(Node):
    """
    The string or call stack that a keyed table has under its keys; it takes ``cells`` on the RPN stack.

    ``padding`` is how many cells of zeros are behind it, where it goes to something with more room.
    """

    table: str
    keys: tuple[Argument, ...]
    cells: int
    type: CType
    padding: int = 0


class NetworkAddress(Node):
    """An address of the Internet: ``size`` bytes of memory in the network's order, or a number as it is read there."""

    value: Value
    size: Value | None
    type: CType


Argument = Value | Text | Bytes | Literal | TextChoice | CommName | StackTrace | Kept | NetworkAddress
