"""The tree of a DProbes C program: its syntax, before names and types have a meaning."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from dprobes.tree_nodes import Node

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
    "ForEach",
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


class Number(Node):
    """A number or character constant; ``suffix`` is the text after the digits in lower case, or ``char``."""

    value: int
    suffix: str
    is_decimal: bool
    span: Span


class StringLiteral(Node):
    """A string literal, possibly of several adjacent ones; ``value`` has its escapes resolved."""

    value: str
    span: Span


class Name(Node):
    """A name; ``::`` before it means a symbol of the module. ``module`` is the module written before that, or empty."""

    name: str
    span: Span
    module: str = ""


class Unary(Node):
    """A prefix operator with its operand: ``- + ~ ! * &``."""

    operator: str
    operand: Expression
    span: Span


class Increment(Node):
    """``++`` or ``--``. With ``is_postfix``, its value is the previous one."""

    amount: int
    operand: Expression
    is_postfix: bool
    span: Span


class Binary(Node):
    """An operator between its operands, ``&&`` and ``||`` included."""

    operator: str
    left: Expression
    right: Expression
    span: Span


class Conditional(Node):
    """The conditional operator, ``condition ? yes : no``."""

    condition: Expression
    yes: Expression
    no: Expression
    span: Span


class Assignment(Node):
    """``target = value``; ``operator`` is the operator before ``=``, or empty."""

    operator: str
    target: Expression
    value: Expression
    span: Span


class Comma(Node):
    """The comma operator, ``left, right``."""

    left: Expression
    right: Expression
    span: Span


class Call(Node):
    """A call of a function of the program or of the language."""

    function: str
    arguments: tuple[Expression, ...]
    span: Span


class Index(Node):
    """An array element, ``base[index]``."""

    base: Expression
    index: Expression
    span: Span


class MemberAccess(Node):
    """A member, ``base.name``, or with ``is_arrow`` ``base->name``."""

    base: Expression
    name: str
    is_arrow: bool
    span: Span


class Cast(Node):
    """A cast, ``(type)operand``."""

    type: TypeName
    operand: Expression
    span: Span


class SizeOf(Node):
    """``sizeof`` of a type or an expression, or with ``member`` ``offsetof(type, member)``."""

    operand: TypeName | Expression
    member: tuple[str, ...]
    span: Span


class TableAccess(Node):
    """A keyed table with the keys of one value, ``@name[keys]``."""

    name: str
    keys: tuple[Expression, ...]
    span: Span


Expression = (
    Number | StringLiteral | Name | Unary | Increment | Binary | Conditional | Assignment | Comma | Call | Index
    | MemberAccess | Cast | SizeOf | TableAccess
)  # fmt: skip


# Types and declarations


class EnumeratorSyntax(Node):
    """An enumerator, with its value or None."""

    name: str
    value: Expression | None
    span: Span


class Specifier(Node):
    """
    Beginning of a declaration: ``words`` (``unsigned long``, a name of ``typedef``), or a tagged type.

    ``kind`` is ``struct``, ``union`` or ``enum`` for a tagged type, otherwise empty. ``members`` and ``enumerators``
    are None if the type is only named.
    """

    words: tuple[str, ...]
    span: Span
    kind: str = ""
    tag: str = ""
    members: tuple[Declaration, ...] | None = None
    enumerators: tuple[EnumeratorSyntax, ...] | None = None


class Declarator(Node):
    """Declarator: stars, name, and dimensions (None for an omitted one). ``bits`` is the width of a bit field."""

    name: str
    pointers: int
    dimensions: tuple[Expression | None, ...]
    span: Span
    bits: Expression | None = None
    value: Expression | None = None


class TypeName(Node):
    """A type without a declared name, as in casts."""

    specifier: Specifier
    declarator: Declarator
    span: Span


class Storage(Enum):
    """The storage of a variable; ``extern`` and ``typedef`` declare none."""

    AUTO = "auto"
    STATIC = "static"
    GLOBAL = "global"
    PERCPU = "percpu"
    THREAD = "thread"
    EXTERN = "extern"
    TYPEDEF = "typedef"


class Declaration(Node):
    """A declaration of variables, members or types."""

    storage: Storage
    specifier: Specifier
    declarators: tuple[Declarator, ...]
    span: Span


# Statements


class ExpressionStatement(Node):
    """An expression that is computed for its side effects."""

    expression: Expression
    span: Span


class Block(Node):
    """A block: the statements in a pair of braces."""

    statements: tuple[Statement, ...]
    span: Span


class If(Node):
    """An ``if`` statement, possibly with ``else``."""

    condition: Expression
    then: Statement
    otherwise: Statement | None
    span: Span


class While(Node):
    """A loop ``while (condition) body``."""

    condition: Expression
    body: Statement
    span: Span


class DoWhile(Node):
    """A loop ``do body while (condition);``."""

    body: Statement
    condition: Expression
    span: Span


class For(Node):
    """Loop ``for (first; condition; step) body``. Each of the three parts may be None."""

    first: Declaration | ExpressionStatement | None
    condition: Expression | None
    step: Expression | None
    body: Statement
    span: Span


class ForEach(Node):
    """A loop ``for (name : items) body`` of a block of the tool; ``items`` is a word, or a call of it."""

    name: str
    items: Expression
    body: Statement
    span: Span


class Case(Node):
    """A label ``case value:`` of a ``switch``, or ``default:`` if ``value`` is None."""

    value: Expression | None
    span: Span


class Switch(Node):
    """``switch``; the labels are among the statements of its block."""

    value: Expression
    body: Block
    span: Span


class Break(Node):
    """The statement ``break;`` in a loop or ``switch``."""

    span: Span


class Continue(Node):
    """The statement ``continue;`` in a loop."""

    span: Span


class Return(Node):
    """The statement ``return value;``, or ``return;`` with None as value."""

    value: Expression | None
    span: Span


class Try(Node):
    """``try { } catch (code, address) { }``; the two names are optional."""

    body: Block
    names: tuple[str, ...]
    handler: Block
    span: Span


Statement = (
    Declaration | ExpressionStatement | Block | If | While | DoWhile | For | ForEach | Case | Switch | Break | Continue
    | Return | Try
)  # fmt: skip


# The program

PERIOD_MIN, PERIOD_MAX = 10_000_000, 86_400_000_000_000
"""Minimum and maximum period of a block in nanoseconds: 10 ms and one day."""


class PointKind(Enum):
    """The syntax of a probepoint, which decides what its ``place`` means."""

    CODE = "code"
    INLINE = "inline"
    WATCH = "watch"
    SAMPLE = "sample"
    USDT = "usdt"
    TRACEPOINT = "tracepoint"
    SYSTEM_CALL = "syscall"


class Parameter(Node):
    """A parameter of a point or a function; ``type`` is None if only its name is given."""

    name: str
    type: TypeName | None
    span: Span


class Point(Node):
    """
    Probepoint: a place to probe.

    ``module`` is empty if the program or the command line sets it. ``place`` is the text after the module's colon.
    ``number`` is the frequency of a sampler in hertz. If ``place`` is the name of a performance counter, it is the
    number of the counter's events from one sample to the next. ``access`` has the accesses that a watchpoint detects,
    as in RPN. ``parameters`` is None without parentheses.
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


class Attribute(Node):
    """An attribute with its value, in brackets before a probepoint or in the ``module`` statement."""

    name: str
    value: int | str | None
    span: Span


class Probe(Node):
    """
    Probepoints, their condition, and the block that is executed there.

    ``line`` is the source line of the probepoints, 0 for other places; ``order`` is the position of the probe in the
    source.
    """

    points: tuple[Point, ...]
    attributes: tuple[Attribute, ...]
    condition: Expression | None
    body: Block
    span: Span
    line: int = 0
    order: int = 0


class BlockKind(Enum):
    """The time at which the tool executes one of its blocks."""

    BEGIN = "begin"
    EVERY = "every"
    END = "end"


class ToolBlock(Node):
    """A block that the tool executes; ``period`` is in nanoseconds, ``written`` its name in messages."""

    kind: BlockKind
    body: Block
    span: Span
    written: str
    period: int = 0
    order: int = 0


class Function(Node):
    """A function that the program defines: return type, name, parameters and body."""

    name: str
    type: TypeName
    parameters: tuple[Parameter, ...]
    body: Block
    span: Span


class ProgramTree(Node):
    """Whole program. ``module`` and ``attributes`` are those of its ``module`` statement."""

    module: str = ""
    attributes: tuple[Attribute, ...] = ()
    declarations: Sequence[Declaration] = ()
    functions: Sequence[Function] = ()
    probes: Sequence[Probe] = ()
    blocks: Sequence[ToolBlock] = ()

    @property
    def parts(self) -> list[Probe | ToolBlock]:
        """The probes and blocks in the order of the source."""
        return sorted((*self.probes, *self.blocks), key=lambda each: each.order)
