"""What a script of bpftrace says, as it was written: expressions, statements, probes, with their places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

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


@dataclass(frozen=True, slots=True)
class Number:
    """A number."""

    value: int
    span: Span


@dataclass(frozen=True, slots=True)
class String:
    """A text in quotes, as it was written, without them."""

    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class Name:
    """A name that bpftrace provides, or a constant of a header."""

    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a probe, without its dollar sign."""

    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the script: ``$1``, ``$#``."""

    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class Map:
    """A map, without its ``@``, and its keys."""

    name: str
    keys: tuple[Expression, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Call:
    """A call of what bpftrace provides."""

    function: str
    arguments: tuple[Expression, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Field:
    """A member of a structure: ``is_arrow`` if it is one that is pointed to."""

    base: Expression
    name: str
    is_arrow: bool
    span: Span


@dataclass(frozen=True, slots=True)
class Index:
    """An element of an array."""

    base: Expression
    index: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class Unary:
    """An operator before an operand."""

    operator: str
    operand: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class Step:
    """``++`` or ``--``; where it is behind its operand, ``is_postfix``."""

    operator: str
    operand: Expression
    is_postfix: bool
    span: Span


@dataclass(frozen=True, slots=True)
class Binary:
    """An operator between two operands."""

    operator: str
    left: Expression
    right: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class Conditional:
    """``condition ? then : otherwise``."""

    condition: Expression
    then: Expression
    otherwise: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast to a type, whose text is as it was written."""

    type: str
    operand: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class SizeOf:
    """The size of a type, whose text is as it was written."""

    type: str
    span: Span


@dataclass(frozen=True, slots=True)
class Tuple:
    """Several values as one."""

    values: tuple[Expression, ...]
    span: Span


Expression: TypeAlias = (
    "Number | String | Name | Variable | Parameter | Map | Call | Field | Index | Unary | Step | Binary | Conditional"
    " | Cast | SizeOf | Tuple"
)


@dataclass(frozen=True, slots=True)
class Assignment:
    """``target operator= value``; the operator is empty for a plain one."""

    target: Variable | Map
    operator: str
    value: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class Do:
    """An expression as a statement: a call, ``++``."""

    expression: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class If:
    """A condition and its two branches."""

    condition: Expression
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class While:
    """A loop."""

    condition: Expression
    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Unroll:
    """A block that is carried out a number of times."""

    count: Expression
    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Jump:
    """``return``, ``break`` or ``continue``."""

    word: str
    span: Span


Statement: TypeAlias = "Assignment | Do | If | While | Unroll | Jump"


@dataclass(frozen=True, slots=True)
class Point:
    """Where a probe is: the parts of its name, between colons."""

    parts: tuple[str, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Probe:
    """Points, the condition behind them, and what a hit does."""

    points: tuple[Point, ...]
    condition: Expression | None
    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Script:
    """The probes of a script, and the definitions of structures before them, as they were written."""

    probes: tuple[Probe, ...]
    structures: tuple[str, ...]
