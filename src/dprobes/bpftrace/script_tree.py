"""The syntax tree of a bpftrace script: expressions, statements, probes, with their places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.tree_nodes import Node

if TYPE_CHECKING:
    from dprobes.source_text import Span

__all__ = [
    "Assignment",
    "Binary",
    "Call",
    "Cast",
    "Conditional",
    "Do",
    "Expression",
    "Field",
    "If",
    "Index",
    "Jump",
    "Map",
    "Name",
    "Number",
    "Parameter",
    "Point",
    "Probe",
    "Script",
    "SizeOf",
    "Statement",
    "Step",
    "String",
    "Tuple",
    "Unary",
    "Unroll",
    "Variable",
    "While",
]


class Number(Node):
    """An integer constant; a suffix such as ``ms`` is already applied."""

    value: int
    span: Span


class String(Node):
    """A string literal as written, without its quotes."""

    text: str
    span: Span


class Name(Node):
    """A builtin of bpftrace, such as ``pid``, or a constant of an included header."""

    name: str
    span: Span


class Variable(Node):
    """A variable of a probe, without its dollar sign."""

    name: str
    span: Span


class Parameter(Node):
    """A parameter of the script: ``$1``, ``$#``."""

    name: str
    span: Span


class Map(Node):
    """A map, ``@name[keys]``: its name without ``@``, and its keys, which are empty for a map without brackets."""

    name: str
    keys: tuple[Expression, ...]
    span: Span


class Call(Node):
    """A call of a function of bpftrace."""

    function: str
    arguments: tuple[Expression, ...]
    span: Span


class Field(Node):
    """A member of a structure, ``base.name``, or with ``is_arrow`` ``base->name``."""

    base: Expression
    name: str
    is_arrow: bool
    span: Span


class Index(Node):
    """An element of an array, ``base[index]``."""

    base: Expression
    index: Expression
    span: Span


class Unary(Node):
    """A prefix operator, such as ``-`` or ``*``, and its operand."""

    operator: str
    operand: Expression
    span: Span


class Step(Node):
    """``++`` or ``--``; ``is_postfix`` if it follows its operand."""

    operator: str
    operand: Expression
    is_postfix: bool
    span: Span


class Binary(Node):
    """An operator between two operands, such as ``+`` or ``&&``."""

    operator: str
    left: Expression
    right: Expression
    span: Span


class Conditional(Node):
    """``condition ? then : otherwise``."""

    condition: Expression
    then: Expression
    otherwise: Expression
    span: Span


class Cast(Node):
    """A cast to a type, whose text is as written."""

    type: str
    operand: Expression
    span: Span


class SizeOf(Node):
    """The size of a type, whose text is as written."""

    type: str
    span: Span


class Tuple(Node):
    """Several values in parentheses, ``(1, pid)``, which bpftrace treats as one value."""

    values: tuple[Expression, ...]
    span: Span


Expression = (
    Number | String | Name | Variable | Parameter | Map | Call | Field | Index | Unary | Step | Binary | Conditional
    | Cast | SizeOf | Tuple
)  # fmt: skip


class Assignment(Node):
    """``target operator= value``; the operator is empty for a plain assignment."""

    target: Variable | Map
    operator: str
    value: Expression
    span: Span


class Do(Node):
    """A statement that consists of an expression: a call, ``++`` or ``--``."""

    expression: Expression
    span: Span


class If(Node):
    """An ``if`` statement: its condition, and the statements of both branches."""

    condition: Expression
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]
    span: Span


class While(Node):
    """A loop: ``while (condition)`` with its body."""

    condition: Expression
    body: tuple[Statement, ...]
    span: Span


class Unroll(Node):
    """``unroll (count) { … }``: a block that is executed a number of times."""

    count: Expression
    body: tuple[Statement, ...]
    span: Span


class Jump(Node):
    """``return``, ``break`` or ``continue``."""

    word: str
    span: Span


Statement = Assignment | Do | If | While | Unroll | Jump


class Point(Node):
    """The location of a probe: the parts of its name, between colons."""

    parts: tuple[str, ...]
    span: Span


class Probe(Node):
    """A probe: the points at which it hits, its condition or None, and the statements that each hit executes."""

    points: tuple[Point, ...]
    condition: Expression | None
    body: tuple[Statement, ...]
    span: Span


class Script(Node):
    """The probes of a script, and the structure definitions before them, as written."""

    probes: tuple[Probe, ...]
    structures: tuple[str, ...]
