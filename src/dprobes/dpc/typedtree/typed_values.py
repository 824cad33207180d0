"""
Typed tree: a program with resolved names and explicit conversions.

Each value has a type and is one cell of the RPN stack with a number of that type. If the type is signed, the number is
sign-extended to the word, otherwise zero-extended.
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
    "ItemTest",
    "ItemText",
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
    """A number that is known at compile time."""

    value: int
    type: CType


class Symbol(Node):
    """The run-time address of a symbol of the module."""

    name: str
    type: CType


class Register(Node):
    """
    A register at the hit, or, with ``at_entry``, at the entry of the function whose return is probed.

    ``is_certain`` means that the entry was seen, because the probe's condition already needed it.
    """

    name: str
    type: CType
    at_entry: bool = False
    is_certain: bool = False


class System(Node):
    """System variable with its name in RPN, such as ``pid`` or ``time``. ``is_certain`` is as for registers."""

    name: str
    type: CType
    is_certain: bool = False


class Local(Node):
    """A variable on the RPN stack; ``slot`` is its number in the handler or function, negative for parameters."""

    slot: int
    type: CType


class VariableKind(Enum):
    """The kind of a variable; the enum value is the name of its instructions' operand."""

    LOCAL = "lv"
    GLOBAL = "gv"
    PER_CPU = "cv"
    THREAD = "tv"


class Variable(Node):
    """A variable of the program, or the element ``index`` of an array that begins at ``first``."""

    kind: VariableKind
    first: int
    type: CType
    index: Value | None = None


class Memory(Node):
    """A value in the target's memory at an address."""

    address: Value
    type: CType


class BitField(Node):
    """A bit field: ``bits`` bits of a unit in memory, from bit ``shift`` on."""

    unit: Memory
    bits: int
    shift: int
    type: CType


Place = Register | Local | Variable | Memory | BitField
"""Nodes that an assignment can have as its target."""


class Arithmetic(Node):
    """Operation on two values of its type. The right operand of a shift may have another type."""

    operator: str
    left: Value
    right: Value
    type: Integer


class Negation(Node):
    """The operation ``-x``, or with ``is_complement`` ``~x``."""

    operand: Value
    type: Integer
    is_complement: bool = False


class Comparison(Node):
    """Comparison of two values of one type by ``==``, ``<`` or ``<=``. The result is 0 or 1."""

    operator: str
    left: Value
    right: Value
    is_signed: bool
    type: CType


class Not(Node):
    """The logical operation ``!x``, whose value is 0 or 1."""

    operand: Value
    type: CType


class Both(Node):
    """The logical operation ``left && right``, whose value is 0 or 1."""

    left: Value
    right: Value
    type: CType


class Either(Node):
    """The logical operation ``left || right``, whose value is 0 or 1."""

    left: Value
    right: Value
    type: CType


class Convert(Node):
    """A value converted to ``type``, as by a cast in C."""

    operand: Value
    type: CType


class Assign(Node):
    """Assignment. Its value is the value of the target afterwards."""

    target: Place
    value: Value
    type: CType


class Step(Node):
    """``++`` or ``--``: ``amount`` is added. With ``is_postfix``, the value is the previous one."""

    target: Place
    amount: int
    is_postfix: bool
    type: CType


class Choice(Node):
    """The conditional operator, ``condition ? yes : no``."""

    condition: Value
    yes: Value
    no: Value
    type: CType


class Sequence(Node):
    """Comma operator, ``left, right``. Its value is the value of ``right``."""

    left: Value
    right: Value
    type: CType


class FunctionCall(Node):
    """A call of a function that the program defines."""

    name: str
    arguments: tuple[Value, ...]
    type: CType
    span: Span


class TableValue(Node):
    """The number in the entry of the keys in a keyed table."""

    table: str
    keys: tuple[Argument, ...]
    type: CType


class TextTest(Node):
    """A test if the string at an address is ``text``, or begins with it if ``is_prefix``."""

    address: Value
    text: str
    is_prefix: bool
    type: CType


class CommTest(Node):
    """A test if the process name is ``text``, or begins with it if ``is_prefix``."""

    text: str
    is_prefix: bool
    type: CType


class KeptTest(Node):
    """A test if the string in a table is ``text``, or begins with it; an empty ``text`` tests for a missing value."""

    kept: Kept
    text: str
    is_prefix: bool
    type: CType


class ItemTest(Node):
    """A test if a field of a loop's item is ``text``, or begins with it; both kinds as in ``KeptTest``."""

    field: ItemText
    text: str
    is_prefix: bool
    type: CType


Value = (
    Constant | Symbol | Register | System | Local | Variable | Memory | BitField | Arithmetic | Negation | Comparison
    | Not | Both | Either | Convert | Assign | Step | Choice | Sequence | FunctionCall | TextTest | CommTest
    | TableValue | KeptTest | ItemTest
)  # fmt: skip


# Nodes that can only be logged


class Text(Node):
    """The string at an address, at most ``limit`` bytes of it."""

    address: Value
    limit: int
    type: CType


class Bytes(Node):
    """An argument of ``printf`` or a key that is ``size`` bytes of the target's memory."""

    address: Value
    size: Value
    type: CType


class Literal(Node):
    """A string literal; a table has room for ``limit`` bytes of it as a value or key field."""

    text: str
    limit: int
    type: CType


class ItemText(Node):
    """
    A string of the item that the loop ``number`` of a block visits; ``index`` is that of the field among the strings.

    A table has room for ``limit`` bytes of it.
    """

    number: int
    index: int
    limit: int
    type: CType


class TextChoice(Node):
    """A choice of string literals by a condition; choices may be nested."""

    condition: Value
    yes: Literal | TextChoice
    no: Literal | TextChoice
    type: CType


class CommName(Node):
    """The process name, which is in the header of each record."""

    type: CType


class StackTrace(Node):
    """
    The call stack of the process or, with ``is_kernel``, of the kernel.

    ``frames`` is the maximum, None for the default.
    """

    is_kernel: bool
    frames: int | None
    type: CType


class Kept(Node):
    """
    The string or call stack in the entry of the keys in a keyed table; it takes ``cells`` on the RPN stack.

    ``padding`` is the number of zero cells after it, if the destination is larger.
    """

    table: str
    keys: tuple[Argument, ...]
    cells: int
    type: CType
    padding: int = 0


class NetworkAddress(Node):
    """
    An IP address: ``size`` bytes of memory at ``value``, in network byte order.

    If ``size`` is None, ``value`` is an IPv4 address, as the number that a load from memory gives.
    """

    value: Value
    size: Value | None
    type: CType


Argument = Value | Text | Bytes | Literal | ItemText | TextChoice | CommName | StackTrace | Kept | NetworkAddress
