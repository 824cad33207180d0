"""
Which ``printf`` statements a hit may execute, in which order: each such sequence is a kind of record with a template.

A sequence is numbered so that the number of a longer one follows from that of the shorter one: n * (logs + 1) + log. So
a handler that does not know its way beforehand keeps the number of the sequence so far in a cell.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from dprobes.dpc.typedtree import typedstatement
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.diagnostics import Diagnostics

__all__ = ["LogPaths", "find_log_paths", "is_mixed"]

Sequence = tuple[int, ...]
_SEQUENCES_MAX = 64


@dataclass(frozen=True, slots=True)
class LogPaths:
    """
    The sequences of a handler: those that its hits may end with, and those that may lead to each ``printf``.

    ``logs`` is how many ``printf`` the handler has; ``at`` has the sequences that may lead to a statement, by its id;
    ``last`` those that may lead to the end of the handler's code, ``returns`` those to each ``return``.
    """

    logs: int
    ends: frozenset[Sequence]
    before: dict[int, frozenset[Sequence]]
    at: dict[int, frozenset[Sequence]] = field(default_factory=dict)
    last: frozenset[Sequence] = frozenset()
    returns: tuple[frozenset[Sequence], ...] = ()

    def number_of(self, sequence: Sequence) -> int:
        """Return the number of a sequence, 0 for the empty one."""
        number = 0
        for log in sequence:
            number = number * (self.logs + 1) + log
        return number

    @property
    def is_known(self) -> bool:
        """Whether it is known before each ``printf`` what was logged before, and at each end whether something was."""
        ends = (self.last, *self.returns)
        return all(len(each) <= 1 for each in self.before.values()) and not any(map(is_mixed, ends))


def is_mixed(sequences: frozenset[Sequence]) -> bool:
    """Return whether it depends on the hit if something was printed."""
    return () in sequences and len(sequences) > 1


class _TooManyError(Exception):
    pass


class _Walk:
    """Follow a handler: sequences go in, and come out where control goes on, breaks, continues or ends."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self.before: dict[int, set[Sequence]] = {}
        self.ends: set[Sequence] = set()
        self.at: dict[int, set[Sequence]] = {}
        self.returns: list[frozenset[Sequence]] = []
        self._breaks: list[set[Sequence]] = []
        self._continues: list[set[Sequence]] = []

    def through(self, statement: typedstatement.Statement, given: set[Sequence]) -> set[Sequence]:
        if not given:
            return given
        self.at.setdefault(id(statement), set()).update(given)
        match statement:
            case typedstatement.Log(number):
                known = self.before.setdefault(number, set())
                known |= given
                if len(known) > _SEQUENCES_MAX:
                    raise _TooManyError
                return {(*sequence, number) for sequence in given}
            case typedstatement.Steps(statements):
                for each in statements:
                    given = self.through(each, given)
                return given
            case typedstatement.Select(_, then, otherwise):
                other = given if otherwise is None else self.through(otherwise, given)
                return self.through(then, given) | other
            case typedstatement.Loop():
                return self._through_loop(statement, given)
            case typedstatement.Switch():
                return self._through_switch(statement, given)
            case typedstatement.TryCatch(body, _, _, handler):
                after = self.through(body, given)
                # An exception may come behind any printf of the block.
                inside = given | after | {(*s, n) for n, before in self.before.items() for s in before if _has(body, n)}
                return after | self.through(handler, inside)
            case typedstatement.Jump(kind):
                (self._breaks if kind is typedstatement.Jumping.BREAK else self._continues)[-1].update(given)
                return set()
            case typedstatement.End() | typedstatement.Skip():
                self.ends |= given
                if isinstance(statement, typedstatement.End) and statement.kind is typedstatement.Ending.RETURN:
                    self.returns.append(frozenset(given))
                return set()
        return given

    def _through_loop(self, loop: typedstatement.Loop, given: set[Sequence]) -> set[Sequence]:
        if (log := next(_logs_in(loop.body), None)) is not None:
            hint = "a record has one template: count in a table, or log the values as one memory item"
            self._diagnostics.error(log.span, "'printf' cannot stand in a loop", hint=hint)
            return given
        self._breaks.append(set())
        self._continues.append(set())
        after = self.through(loop.body, given)
        return after | given | self._breaks.pop() | self._continues.pop()

    def _through_switch(self, switch: typedstatement.Switch, given: set[Sequence]) -> set[Sequence]:
        self._breaks.append(set())
        labels = {test.position for test in switch.tests}
        current: set[Sequence] = set()
        for position, statement in enumerate(switch.statements):
            if position in labels:
                current = current | given
            current = self.through(statement, current)
        has_default = any(test.value is None for test in switch.tests)
        return current | self._breaks.pop() | (set() if has_default else given)


def _logs_in(statement: typedstatement.Statement) -> Iterator[typedstatement.Log]:
    """Give the printf statements in a statement."""
    match statement:
        case typedstatement.Log():
            yield statement
        case typedstatement.Steps(statements) | typedstatement.Switch(_, statements):
            for each in statements:
                yield from _logs_in(each)
        case typedstatement.Select(_, then, otherwise):
            yield from _logs_in(then)
            if otherwise is not None:
                yield from _logs_in(otherwise)
        case typedstatement.Loop(_, _, body):
            yield from _logs_in(body)
        case typedstatement.TryCatch(body, _, _, handler):
            yield from _logs_in(body)
            yield from _logs_in(handler)


def _has(statement: typedstatement.Statement, number: int) -> bool:
    return any(log.number == number for log in _logs_in(statement))


def find_log_paths(body: typedstatement.Statement, logs: int, diagnostics: Diagnostics) -> LogPaths:
    """Return the sequences of ``printf`` that a handler may execute; report where they cannot be told apart."""
    walk = _Walk(diagnostics)
    last: set[Sequence] = set()
    try:
        last = walk.through(body, {()})
    except _TooManyError:
        first = next(_logs_in(body))
        diagnostics.error(first.span, f"there are more than {_SEQUENCES_MAX} ways through the printf of this probe")
    before = {number: frozenset(each) for number, each in walk.before.items()}
    at = {key: frozenset(each) for key, each in walk.at.items()}
    ends = frozenset(last | walk.ends)
    return LogPaths(logs, ends, before, at, frozenset(last), tuple(walk.returns))
