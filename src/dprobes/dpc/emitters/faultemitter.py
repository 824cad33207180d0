"""
Exceptions that a handler does not catch: they end the hit, and are counted by code and line of the program.

A statement that may raise one sets the exception handler to a label at the end of the handler's code, which puts the
code and the line into a keyed table, and ends the hit: with its record if something was printed before, else without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.typedtree import typed, typedstatement
from dprobes.dpc.typedtree.logpaths import is_mixed
from dprobes.dpc.typedtree.valueproperties import operands_of, reads_memory_itself
from dprobes.rpn.isa import ExceptionCode
from dprobes.rpn.tables import FAULTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.dpc.emitters.writer import Writer
    from dprobes.dpc.typedtree.logpaths import LogPaths, Sequence
    from dprobes.source import Span

__all__ = ["FaultExits", "fault_sequences", "needs_trail"]


def may_raise(statement: typedstatement.Statement) -> bool:
    """Return whether a statement itself, without those in it, may raise an exception that a program can cause."""
    match statement:
        case typedstatement.Evaluate(value) | typedstatement.Switch(value) | typedstatement.Skip(value):
            return _raises(value)
        case typedstatement.Tally(_, keys, value):
            return any(map(_raises, keys)) or (value is not None and _raises(value))
        case typedstatement.Untally(_, keys):
            return any(map(_raises, keys))
        case typedstatement.Select(condition):
            return _raises(condition)
        case typedstatement.Loop():
            return True  # there is a limit to jumps
    return False


def _raises(value: typed.Argument) -> bool:
    match value:
        case typed.Text() | typed.Bytes() | typed.NetworkAddress():
            return True
        case typed.Kept(_, keys):
            return any(map(_raises, keys))
        case typed.CommName() | typed.StackTrace() | typed.Literal():
            return False
        case typed.TextChoice(condition, yes, no):
            return any(map(_raises, (condition, yes, no)))
        case typed.Assign(target, operand):
            return _is_risky(target) or _raises(operand)
        case typed.Step(target):
            return _is_risky(target)
    return reads_memory_itself(value) or any(map(_raises, operands_of(value)))


def _is_risky(place: typed.Place) -> bool:
    match place:
        case typed.Memory() | typed.BitField() | typed.Register():
            return True
        case typed.Variable(_, _, _, index):
            return index is not None
    return False


def fault_sequences(paths: LogPaths, body: typedstatement.Statement) -> frozenset[Sequence]:
    """Return the sequences of ``printf`` after which an exception may end the hit."""
    found: set[Sequence] = set()
    for statement in typedstatement.statements_in(body):
        before = paths.at.get(id(statement), frozenset())
        if not before <= found and may_raise(statement):
            found |= before
    return frozenset(found)


def needs_trail(paths: LogPaths, body: typedstatement.Statement) -> bool:
    """Return whether an exception may end the hit where it depends on the hit if something was printed."""
    return any(
        is_mixed(paths.at.get(id(statement), frozenset())) and may_raise(statement)
        for statement in typedstatement.statements_in(body)
    )


class FaultExits:
    """
    Write what exceptions lead to in a handler.

    ``is_silent`` pushes what tells at the hit whether something was printed: 0 if nothing was.
    """

    def __init__(self, writer: Writer, paths: LogPaths, push_trail: Callable[[], None]) -> None:
        self._w = writer
        self._paths = paths
        self._push_trail = push_trail
        self._labels: dict[tuple[int, str], tuple[str, Span]] = {}
        self.counts = False
        """Whether exceptions are counted."""

    def guard(self, statement: typedstatement.Statement, span: Span) -> None:
        """Let exceptions of a statement lead to the end of the hit, unless a ``try`` catches them."""
        if may_raise(statement):
            self._guard(self._paths.at.get(id(statement), frozenset({()})), span)

    def guard_condition(self, condition: typed.Value, span: Span) -> None:
        """Let exceptions of the condition of a probe lead to the end of the hit."""
        if _raises(condition):
            self._guard(frozenset({()}), span)

    def _guard(self, before: frozenset[Sequence], span: Span) -> None:
        if self._w.is_catching:
            return
        ending = "exit" if () not in before else "abort" if len(before) == 1 else ""
        label, _ = self._labels.setdefault((span.line, ending), (self._w.new_label(), span))
        self.counts = True
        self._w.guard(label)

    def count(self, line: int) -> None:
        """Count an exception that has happened, of a kind that its record does not tell; the handler goes on."""
        w = self._w
        is_told, rest = w.new_label(), w.new_label()
        self._push_code()
        w.depth += 1
        w.op("push tsp, 0", 1)
        w.number(ExceptionCode.INVALID_ADDR)
        w.op("eq", -1)
        w.op(f"jnz {is_told}")
        w.drop()
        w.op(f"push {line}", 1)
        w.op(f"tally {FAULTS}", -2)
        w.op(f"jmp {rest}")
        w.label(is_told)
        w.depth += 2
        w.drop(2)
        w.label(rest)
        self.counts = True

    def _push_code(self) -> None:
        """Push the code of the last exception, and not its two parameters, which are below it."""
        self._w.op("push x")
        for _ in range(2):
            self._w.op("xchg")
            self._w.op("ros 1")

    def write(self) -> None:
        """Write the ends that exceptions lead to."""
        w = self._w
        for (line, ending), (label, span) in self._labels.items():
            with w.at(span):
                w.label(label)
                self._push_code()
                w.op(f"push {line}")
                w.op(f"tally {FAULTS}")
                if ending:
                    w.op(ending)
                    continue
                silent = w.new_label()
                self._push_trail()
                w.op(f"jz {silent}")
                w.op("exit")
                w.label(silent)
                w.op("abort")
