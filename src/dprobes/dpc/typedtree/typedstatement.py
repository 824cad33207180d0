"""The typed tree of statements: what handlers and functions do, with all names resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.quickenum import Enum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.dpc.typedtree.typed import Argument, Local, Value
    from dprobes.source import Span

__all__ = [
    "Clear",
    "End",
    "Ending",
    "Evaluate",
    "Jump",
    "Jumping",
    "Log",
    "Loop",
    "Quit",
    "Result",
    "Select",
    "Show",
    "Skip",
    "Statement",
    "Steps",
    "Switch",
    "Tally",
    "Test",
    "TryCatch",
    "Untally",
    "goes_on",
    "statements_in",
]


@dataclass(frozen=True, slots=True)
class Evaluate:
    """A value for what it does."""

    value: Value
    span: Span


@dataclass(frozen=True, slots=True)
class Log:
    """A ``printf``: what it logs, and the template for that; ``number`` counts those of a handler from 1."""

    number: int
    items: tuple[Argument, ...]
    template: str
    span: Span


@dataclass(frozen=True, slots=True)
class Tally:
    """What is put into a keyed table; ``value`` is None where only occurrences count."""

    table: str
    keys: tuple[Argument, ...]
    value: Argument | None
    span: Span


@dataclass(frozen=True, slots=True)
class Untally:
    """``delete``: keys that are taken out of a table."""

    table: str
    keys: tuple[Argument, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Show:
    """``print`` in a block of the tool: at most ``rows`` rows of a table, all with None."""

    table: str
    rows: int | None
    span: Span


@dataclass(frozen=True, slots=True)
class Clear:
    """``clear`` in a block of the tool: a table without anything in it."""

    table: str
    span: Span


@dataclass(frozen=True, slots=True)
class Cat:
    """``cat`` in a block of the tool: what a file says."""

    path: str
    span: Span


@dataclass(frozen=True, slots=True)
class Quit:
    """``exit()`` in a block of the tool: the end of the run."""

    span: Span


@dataclass(frozen=True, slots=True)
class Select:
    """``if``."""

    condition: Value
    then: Statement
    otherwise: Statement | None
    span: Span


@dataclass(frozen=True, slots=True)
class Loop:
    """``while``, ``for`` and ``do``: the condition is tested before the body but in ``do``; ``step`` is behind it."""

    condition: Value | None
    step: Value | None
    body: Statement
    tests_first: bool
    span: Span


@dataclass(frozen=True, slots=True)
class Test:
    """A ``case``: the value, or None for ``default``, and which of the statements it leads to."""

    value: int | None
    position: int


@dataclass(frozen=True, slots=True)
class Switch:
    """``switch``: its statements, and the labels among them."""

    value: Value
    statements: tuple[Statement, ...]
    tests: tuple[Test, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Steps:
    """Statements one after the other."""

    statements: tuple[Statement, ...]


class Jumping(Enum):
    """Say where a statement jumps to."""

    BREAK = "break"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True)
class Jump:
    """``break`` or ``continue``."""

    kind: Jumping
    span: Span


@dataclass(frozen=True, slots=True)
class Result:
    """``return`` in a function."""

    value: Value | None
    span: Span


class Ending(Enum):
    """Say how a hit ends."""

    RETURN = "return"
    REMOVE = "remove"
    DEBUGGER = "exit 1"
    CRASH = "exit 2"
    CORE = "exit 3"


@dataclass(frozen=True, slots=True)
class End:
    """The end of the handler."""

    kind: Ending
    span: Span


@dataclass(frozen=True, slots=True)
class Skip:
    """The end of the handler, and of the function that begins at the probepoint: it returns the value."""

    value: Value
    span: Span


@dataclass(frozen=True, slots=True)
class TryCatch:
    """``try``: ``code`` and ``address`` are where the exception is stored, None where it has no name."""

    body: Statement
    code: Local | None
    address: Local | None
    handler: Statement
    span: Span


Statement = (
    Evaluate | Log | Tally | Untally | Show | Clear | Cat | Quit | Select | Loop | Switch | Steps | Jump | Result | End
    | Skip | TryCatch
)  # fmt: skip


def statements_in(statement: Statement | None) -> Iterator[Statement]:
    """Iterate over a statement and all in it."""
    if statement is None:
        return
    yield statement
    match statement:
        case Steps(statements) | Switch(_, statements):
            for each in statements:
                yield from statements_in(each)
        case Select(_, then, otherwise):
            yield from statements_in(then)
            yield from statements_in(otherwise)
        case Loop(_, _, body):
            yield from statements_in(body)
        case TryCatch(body, _, _, handler):
            yield from statements_in(body)
            yield from statements_in(handler)


def goes_on(statement: Statement) -> bool:
    """Return whether control may come to the end of a statement."""
    match statement:
        case Steps(statements):
            return all(goes_on(each) for each in statements)
        case Select(_, then, otherwise):
            return otherwise is None or goes_on(then) or goes_on(otherwise)
        case Jump() | Result() | End() | Skip():
            return False
    return True
