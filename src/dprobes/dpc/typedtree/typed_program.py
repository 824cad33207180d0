"""
The typed statements of a program, and the sequences of ``printf`` that a hit may execute.

Each sequence is a kind of record with its own template. The number of a sequence follows from that of its prefix::

    n * (logs + 1) + log

If several sequences are possible, the handler keeps the number of the current one in a cell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from dprobes.tree_nodes import Node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.syntax import syntax_tree
    from dprobes.dpc.typedtree import typed_values
    from dprobes.dpc.typedtree.name_scope import FunctionSignature
    from dprobes.dpc.typedtree.process_items import ItemKind
    from dprobes.dpc.typedtree.typed_values import Argument, Local, Value
    from dprobes.source_text import Span

__all__ = [
    "Addition",
    "Clear",
    "EachItem",
    "End",
    "Ending",
    "Evaluate",
    "Jump",
    "Jumping",
    "Log",
    "LogPaths",
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
    "TypedBlock",
    "TypedFunction",
    "TypedProbe",
    "Untally",
    "find_log_paths",
    "goes_on",
    "is_mixed",
    "logs_in",
    "statements_in",
]


class Evaluate(Node):
    """A value that is computed for its side effects."""

    value: Value
    span: Span


class Log(Node):
    """
    ``printf`` statement: its logged items, and their template.

    ``number`` counts the statements of a handler from 1.
    """

    number: int
    items: tuple[Argument, ...]
    template: str
    span: Span


class Tally(Node):
    """An update of a keyed table; ``value`` is None if only occurrences are counted."""

    table: str
    keys: tuple[Argument, ...]
    value: Argument | None
    span: Span


class Addition(Node):
    """An addition to the number that a keyed table keeps under the keys; other statements set it."""

    table: str
    keys: tuple[Argument, ...]
    value: Value
    span: Span


class Untally(Node):
    """``delete``: the removal of the entry of the keys from a table."""

    table: str
    keys: tuple[Argument, ...]
    span: Span


class Show(Node):
    """``print`` in a block of the tool: at most ``rows`` rows of a table, None for all."""

    table: str
    rows: int | None
    span: Span


class Clear(Node):
    """``clear`` in a block of the tool: the removal of all entries of a table."""

    table: str
    span: Span


class Cat(Node):
    """``cat`` in a block of the tool: the output of a file's contents."""

    path: str
    span: Span


class Quit(Node):
    """``exit()`` in a block of the tool: the end of the run."""

    span: Span


class Select(Node):
    """``if`` statement. ``otherwise`` is None without ``else``."""

    condition: Value
    then: Statement
    otherwise: Statement | None
    span: Span


class Loop(Node):
    """``while``, ``for`` or ``do``. ``do`` tests the condition after the body. ``step`` follows the body."""

    condition: Value | None
    step: Value | None
    body: Statement
    tests_first: bool
    span: Span


class EachItem(Node):
    """
    A loop over the tasks of the system, or the files or mappings of ``process``, in a block of the tool.

    ``number`` is that of the loop in its block. The fields that are numbers are in the slots from ``slot`` on.
    """

    kind: ItemKind
    process: Value | None
    number: int
    slot: int
    body: Statement
    span: Span


class Test(Node):
    """A ``case``: its value, None for ``default``, and the index of the statement to which it jumps."""

    value: int | None
    position: int


class Switch(Node):
    """``switch``: its statements, and the labels among them."""

    value: Value
    statements: tuple[Statement, ...]
    tests: tuple[Test, ...]
    span: Span


class Steps(Node):
    """Statements that are executed in sequence, such as those of a block."""

    statements: tuple[Statement, ...]


class Jumping(Enum):
    """The kind of a jump out of a loop's body: ``break`` or ``continue``."""

    BREAK = "break"
    CONTINUE = "continue"


class Jump(Node):
    """A ``break`` or ``continue`` statement."""

    kind: Jumping
    span: Span


class Result(Node):
    """``return`` in a function of the program, with the returned value or None."""

    value: Value | None
    span: Span


class Ending(Enum):
    """The way in which a statement ends the hit."""

    RETURN = "return"
    REMOVE = "remove"
    DEBUGGER = "exit 1"
    CRASH = "exit 2"
    CORE = "exit 3"


class End(Node):
    """A statement that ends the hit's handler, such as ``remove`` or ``exit 1``."""

    kind: Ending
    span: Span


class Skip(Node):
    """``skip``: the end of the handler; the probed function returns the value at once, without executing its code."""

    value: Value
    span: Span


class TryCatch(Node):
    """
    ``try`` statement.

    ``code`` and ``address`` store the exception, or are None if the ``catch`` names no variable.
    """

    body: Statement
    code: Local | None
    address: Local | None
    handler: Statement
    span: Span


Statement = (
    Evaluate | Log | Tally | Addition | Untally | Show | Clear | Cat | Quit | Select | Loop | EachItem | Switch | Steps
    | Jump | Result | End | Skip | TryCatch
)  # fmt: skip


def statements_in(statement: Statement) -> Iterator[Statement]:
    """Iterate over a statement and, recursively, the statements in it."""
    return (each for each in statement.walk() if isinstance(each, Statement))


def logs_in(statement: Statement) -> Iterator[Log]:
    """Iterate over the ``printf`` statements in a statement."""
    return (each for each in statement.walk() if isinstance(each, Log))


def goes_on(statement: Statement) -> bool:
    """Return whether control can reach the statement after ``statement``, or False after ``return`` and ``exit``."""
    match statement:
        case Steps(statements):
            return all(goes_on(each) for each in statements)
        case Select(_, then, otherwise):
            return otherwise is None or goes_on(then) or goes_on(otherwise)
        case Jump() | Result() | End() | Skip():
            return False
    return True


LogSequence = tuple[int, ...]
_SEQUENCES_MAX = 64


@dataclass(frozen=True, slots=True)
class LogPaths:
    """
    Sequences of ``printf`` in a handler: those at its ends, and those before each ``printf``.

    ``logs`` is the number of ``printf`` statements in the handler. ``at`` maps the id of a statement to the sequences
    that may precede it. ``last`` has the sequences at the end of the handler's code, ``returns`` those at each
    ``return``.
    """

    logs: int
    ends: frozenset[LogSequence]
    before: dict[int, frozenset[LogSequence]]
    at: dict[int, frozenset[LogSequence]] = field(default_factory=dict)
    last: frozenset[LogSequence] = frozenset()
    returns: tuple[frozenset[LogSequence], ...] = ()

    def number_of(self, sequence: LogSequence) -> int:
        """
        Return the number that stands for a sequence of ``printf`` in the handler's cell.

        Return 0 for the empty sequence.
        """
        number = 0
        for log in sequence:
            number = number * (self.logs + 1) + log
        return number

    @property
    def is_known(self) -> bool:
        """True if the sequence before each ``printf`` is fixed, and no end is reached both with and without output."""
        ends = (self.last, *self.returns)
        return all(len(each) <= 1 for each in self.before.values()) and not any(map(is_mixed, ends))


def is_mixed(sequences: frozenset[LogSequence]) -> bool:
    """Return whether one of the sequences is empty and another one is not."""
    return () in sequences and len(sequences) > 1


class _TooManyError(Exception):
    pass


class _Walk:
    """A walk through a handler: it computes the sequences after a statement and at its exits from those before it."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self.before: dict[int, set[LogSequence]] = {}
        self.ends: set[LogSequence] = set()
        self.at: dict[int, set[LogSequence]] = {}
        self.returns: list[frozenset[LogSequence]] = []
        self._breaks: list[set[LogSequence]] = []
        self._continues: list[set[LogSequence]] = []

    def through(self, statement: Statement, given: set[LogSequence]) -> set[LogSequence]:
        if not given:
            return given
        self.at.setdefault(id(statement), set()).update(given)
        match statement:
            case Log(number):
                known = self.before.setdefault(number, set())
                known |= given
                if len(known) > _SEQUENCES_MAX:
                    raise _TooManyError
                return {(*sequence, number) for sequence in given}
            case Steps(statements):
                for each in statements:
                    given = self.through(each, given)
                return given
            case Select(_, then, otherwise):
                other = given if otherwise is None else self.through(otherwise, given)
                return self.through(then, given) | other
            case Loop():
                return self._through_loop(statement, given)
            case Switch():
                return self._through_switch(statement, given)
            case TryCatch(body, _, _, handler):
                after = self.through(body, given)
                # Any printf of the block may precede the exception.
                inside = given | after | {(*s, n) for n, before in self.before.items() for s in before if _has(body, n)}
                return after | self.through(handler, inside)
            case Jump(kind):
                (self._breaks if kind is Jumping.BREAK else self._continues)[-1].update(given)
                return set()
            case End() | Skip():
                self.ends |= given
                if isinstance(statement, End) and statement.kind is Ending.RETURN:
                    self.returns.append(frozenset(given))
                return set()
        return given

    def _through_loop(self, loop: Loop, given: set[LogSequence]) -> set[LogSequence]:
        if (log := next(logs_in(loop.body), None)) is not None:
            hint = "a record has one template: count in a table, or log the values as one memory item"
            self._diagnostics.error(log.span, "'printf' cannot be in a loop", hint=hint)
            return given
        self._breaks.append(set())
        self._continues.append(set())
        after = self.through(loop.body, given)
        return after | given | self._breaks.pop() | self._continues.pop()

    def _through_switch(self, switch: Switch, given: set[LogSequence]) -> set[LogSequence]:
        self._breaks.append(set())
        labels = {test.position for test in switch.tests}
        current: set[LogSequence] = set()
        for position, statement in enumerate(switch.statements):
            if position in labels:
                current = current | given
            current = self.through(statement, current)
        has_default = any(test.value is None for test in switch.tests)
        return current | self._breaks.pop() | (set() if has_default else given)


def _has(statement: Statement, number: int) -> bool:
    return any(log.number == number for log in logs_in(statement))


def find_log_paths(body: Statement, logs: int, diagnostics: Diagnostics) -> LogPaths:
    """
    Return the sequences of its ``logs`` ``printf`` statements that a handler may execute.

    Report too many sequences, and a ``printf`` in a loop.
    """
    walk = _Walk(diagnostics)
    last: set[LogSequence] = set()
    try:
        last = walk.through(body, {()})
    except _TooManyError:
        first = next(logs_in(body))
        diagnostics.error(first.span, f"there are more than {_SEQUENCES_MAX} ways through the printf of this probe")
    before = {number: frozenset(each) for number, each in walk.before.items()}
    at = {key: frozenset(each) for key, each in walk.at.items()}
    ends = frozenset(last | walk.ends)
    return LogPaths(logs, ends, before, at, frozenset(last), tuple(walk.returns))


class TypedFunction(NamedTuple):
    """A typed function of the program; ``slots`` is the number of variables of its blocks."""

    signature: FunctionSignature
    body: Statement
    slots: int


class TypedProbe(NamedTuple):
    """Typed probe with its sequences of ``printf``, for those of its points at which names have the same types."""

    probe: syntax_tree.Probe
    at: tuple[syntax_tree.Point, ...]
    condition: typed_values.Value | None
    body: Statement
    slots: int
    paths: LogPaths


class TypedBlock(NamedTuple):
    """A typed block of the tool; ``slots`` is the number of its variables."""

    block: syntax_tree.ToolBlock
    body: Statement
    slots: int
