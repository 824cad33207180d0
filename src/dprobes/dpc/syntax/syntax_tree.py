"""The tree of a program in DProbes C: what is written, before names and types have a meaning."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.source_text import Span

__all__ = [
    "PERIOD_MAX",
    "PERIOD_MIN",
    "Assignment",
    "Attribute",
    "Binary",
    "Block",
    "BlockKind",
    "Break",
    "Call",
    "Case",
    "Cast",
    "Comma",
    "Conditional",
    "Continue",
    "Declaration",
    "Declarator",
    "DoWhile",
    "Expression",
    "ExpressionStatement",
    "For",
    "Function",
    "If",
    "Increment",
    "Index",
    "MemberAccess",
    "Name",
    "Number",
    "Parameter",
    "Point",
    "PointKind",
    "Probe",
    "ProgramTree",
    "Return",
    "SizeOf",
    "Statement",
    "Storage",
    "StringLiteral",
    "Switch",
    "TableAccess",
    "ToolBlock",
    "Try",
    "TypeName",
    "Unary",
    "While",
]

# Expressions


@dataclass(frozen=True, slots=True)
class Number:
    """A constant; ``suffix`` is what stands behind its digits, in lower case."""

    value: int
    suffix: str
    is_decimal: bool
    span: Span


@dataclass(frozen=True, slots=True)
class StringLiteral:
    """A string in quotes, several of which may follow each other; ``value`` is without escapes."""

    value: str
    span: Span


@dataclass(frozen=True, slots=True)
class Name:
    """
    A name: of a parameter, a variable, a value that every probe has, or a symbol of the module.

    That begins with ``::``; ``module`` is written before it, or empty.
    """

    name: str
    span: Span
    module: str = ""


@dataclass(frozen=True, slots=True)
class Unary:
    """An operator before its operand: ``- + ~ ! * &``."""

    operator: str
    operand: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class Increment:
    """``++`` or ``--``; its value is that before if ``is_postfix``."""

    amount: int
    operand: Expression
    is_postfix: bool
    span: Span


@dataclass(frozen=True, slots=True)
class Binary:
    """An operator between its operands, ``&&`` and ``||`` included."""

    operator: str
    left: Expression
    right: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class Conditional:
    """``condition ? yes : no``."""

    condition: Expression
    yes: Expression
    no: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class Assignment:
    """``target = value``, or with an operator before the ``=``, which is ``operator`` then."""

    operator: str
    target: Expression
    value: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class Comma:
    """``left, right``."""

    left: Expression
    right: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function of the program, or of what the language provides."""

    function: str
    arguments: tuple[Expression, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Index:
    """``base[index]``."""

    base: Expression
    index: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class MemberAccess:
    """``base.name``, or with ``is_arrow`` ``base->name``."""

    base: Expression
    name: str
    is_arrow: bool
    span: Span


@dataclass(frozen=True, slots=True)
class Cast:
    """``(type)operand``."""

    type: TypeName
    operand: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class SizeOf:
    """``sizeof`` of a type or an expression, or with ``member`` ``offsetof(type, member)``."""

    operand: TypeName | Expression
    member: tuple[str, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class TableAccess:
    """``@name[keys]``."""

    name: str
    keys: tuple[Expression, ...]
    span: Span


Expression = (
    Number | StringLiteral | Name | Unary | Increment | Binary | Conditional | Assignment | Comma | Call | Index
    | MemberAccess | Cast | SizeOf | TableAccess
)  # fmt: skip


# Types and declarations


@dataclass(frozen=True, slots=True)
class EnumeratorSyntax:
    """An enumerator, with its value if that is written."""

    name: str
    value: Expression | None
    span: Span


@dataclass(frozen=True, slots=True)
class Specifier:
    """
    What a declaration begins with: ``words`` (``unsigned long``, a name of ``typedef``), or a tagged type.

    ``kind`` is ``struct``, ``union`` or ``enum`` for a tagged type, else empty; ``members`` and ``enumerators`` are
    None where it is only named.
    """

    words: tuple[str, ...]
    span: Span
    kind: str = ""
    tag: str = ""
    members: tuple[Declaration, ...] | None = None
    enumerators: tuple[EnumeratorSyntax, ...] | None = None


@dataclass(frozen=True, slots=True)
class Declarator:
    """
    What is declared: ``pointers`` stars, the name, then dimensions; ``bits`` is the width of a bit field.

    A dimension is None where it is left out.
    """

    name: str
    pointers: int
    dimensions: tuple[Expression | None, ...]
    span: Span
    bits: Expression | None = None
    value: Expression | None = None


@dataclass(frozen=True, slots=True)
class TypeName:
    """A type where no name is declared, as in casts."""

    specifier: Specifier
    declarator: Declarator
    span: Span


class Storage(Enum):
    """Say where a variable is."""

    AUTO = "auto"
    STATIC = "static"
    GLOBAL = "global"
    PERCPU = "percpu"
    THREAD = "thread"
    EXTERN = "extern"
    TYPEDEF = "typedef"


@dataclass(frozen=True, slots=True)
class Declaration:
    """A declaration of variables, members or types."""

    storage: Storage
    specifier: Specifier
    declarators: tuple[Declarator, ...]
    span: Span


# Statements


@dataclass(frozen=True, slots=True)
class ExpressionStatement:
    """An expression for what it does."""

    expression: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class Block:
    """Statements in braces."""

    statements: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class If:
    """``if``, with ``else`` where there is one."""

    condition: Expression
    then: Statement
    otherwise: Statement | None
    span: Span


@dataclass(frozen=True, slots=True)
class While:
    """``while``."""

    condition: Expression
    body: Statement
    span: Span


@dataclass(frozen=True, slots=True)
class DoWhile:
    """``do … while``."""

    body: Statement
    condition: Expression
    span: Span


@dataclass(frozen=True, slots=True)
class For:
    """``for``; each of its three parts may be left out."""

    first: Declaration | ExpressionStatement | None
    condition: Expression | None
    step: Expression | None
    body: Statement
    span: Span


@dataclass(frozen=True, slots=True)
class Case:
    """A label of ``switch``: ``value`` is None for ``default``."""

    value: Expression | None
    span: Span


@dataclass(frozen=True, slots=True)
class Switch:
    """``switch``; the labels are among the statements of its block."""

    value: Expression
    body: Block
    span: Span


@dataclass(frozen=True, slots=True)
class Break:
    """``break``."""

    span: Span


@dataclass(frozen=True, slots=True)
class Continue:
    """``continue``."""

    span: Span


@dataclass(frozen=True, slots=True)
class Return:
    """``return``."""

    value: Expression | None
    span: Span


@dataclass(frozen=True, slots=True)
class Try:
    """``try { } catch (code, address) { }``; the two names may be left out."""

    body: Block
    names: tuple[str, ...]
    handler: Block
    span: Span


Statement = (
    Declaration | ExpressionStatement | Block | If | While | DoWhile | For | Case | Switch | Break | Continue | Return
    | Try
)  # fmt: skip


# The tree of a whole program: its declarations and functions, and the points with their blocks.


PERIOD_MIN, PERIOD_MAX = 10_000_000, 86_400_000_000_000
"""How many nanoseconds there are between two executions of a block, from 10ms to one day."""


class PointKind(Enum):
    """Say what a point before a block is."""

    CODE = "code"
    INLINE = "inline"
    WATCH = "watch"
    SAMPLE = "sample"
    USDT = "usdt"
    TRACEPOINT = "tracepoint"
    SYSTEM_CALL = "syscall"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a point or a function; ``type`` is None where only its name is given."""

    name: str
    type: TypeName | None
    span: Span


@dataclass(frozen=True, slots=True)
class Point:
    """
    A place before a block.

    ``module`` is empty where the program or the command line says it; ``place`` is what stands behind its colon.
    ``number`` is a frequency, ``access`` that of a watchpoint, ``parameters`` is None
    where there are no parentheses.
    """

    kind: PointKind
    span: Span
    module: str = ""
    place: str = ""
    at_return: bool = False
    parameters: tuple[Parameter, ...] | None = None
    number: int = 0
    access: str = ""
    type: TypeName | None = None


@dataclass(frozen=True, slots=True)
class Attribute:
    """A word in brackets before a point, with its value."""

    name: str
    value: int | str | None
    span: Span


@dataclass(frozen=True, slots=True)
class Probe:
    """
    Points, their condition, and the block that is executed there.

    ``line`` is the line of the source that the points are at, 0 if they are at none; ``order`` is where among probes it
    is written.
    """

    points: tuple[Point, ...]
    attributes: tuple[Attribute, ...]
    condition: Expression | None
    body: Block
    span: Span
    line: int = 0
    order: int = 0


class BlockKind(Enum):
    """Say when the tool executes a block of its own."""

    BEGIN = "begin"
    EVERY = "every"
    END = "end"


@dataclass(frozen=True, slots=True)
class ToolBlock:
    """A block that the tool executes; ``period`` is in nanoseconds, and how it is ``written`` stands in messages."""

    kind: BlockKind
    body: Block
    span: Span
    written: str
    period: int = 0
    order: int = 0


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the program."""

    name: str
    type: TypeName
    parameters: tuple[Parameter, ...]
    body: Block
    span: Span


@dataclass(frozen=True, slots=True)
class ProgramTree:
    """A whole program; ``module`` and ``attributes`` are those of its ``module`` statement."""

    module: str = ""
    attributes: tuple[Attribute, ...] = ()
    declarations: Sequence[Declaration] = field(default=())
    functions: Sequence[Function] = field(default=())
    probes: Sequence[Probe] = field(default=())
    blocks: Sequence[ToolBlock] = field(default=())

    @property
    def parts(self) -> list[Probe | ToolBlock]:
        """Its probes and blocks in the order in which they are written."""
        return sorted((*self.probes, *self.blocks), key=lambda each: each.order)
