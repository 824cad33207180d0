"""RPN of statements, and of the end of a hit, which has a record if something was printed (``log_emitter``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from dprobes.dpc.emitters.log_emitter import FaultExits, LogEmitter
from dprobes.dpc.typedtree import typed_program, typed_values
from dprobes.dpc.typedtree.value_properties import integer_of
from dprobes.dpc.types.c_types import LONG_RANK, Integer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.dpc.emitters.log_emitter import MinorCodes
    from dprobes.dpc.emitters.rpn_writer import Writer
    from dprobes.dpc.emitters.value_emitter import ValueEmitter
    from dprobes.dpc.typedtree.typed_program import LogPaths
    from dprobes.source_text import Span

__all__ = ["StatementEmitter"]

_TABLE_MIN = 5
"""Minimum number of ``switch`` labels for which a binary search takes fewer instructions than a linear one."""


class StatementEmitter:
    """
    Writer of the statements of a function or, if ``paths`` is given, of a handler.

    ``slots`` is the number of variables of its blocks. ``paths`` has the handler's sequences of ``printf``.
    """

    def __init__(
        self,
        writer: Writer,
        values: ValueEmitter,
        slots: int,
        *,
        paths: LogPaths | None = None,
        codes: MinorCodes | None = None,
        minor: int = 0,
        result: int | None = None,
        word_size: int = 8,
    ) -> None:
        self._w = writer
        self._values = values
        self._slots = slots
        self._paths = paths
        self._codes = codes
        self._minor = minor
        self._result = result
        self._word_size = word_size
        self._trail: int | None = None
        self.faults = None if paths is None else FaultExits(writer, paths, lambda: values.exact(self._trail_cell()))
        self._items = LogEmitter(writer, values, self.faults, word_size)
        self._done: set[int] = set()
        """Ids of statements that are already written."""
        self._breaks: list[str] = []
        self._continues: list[str] = []

    def handler(self, condition: typed_values.Value | None, body: typed_program.Statement, place: Span) -> None:
        """
        Write a handler: its condition (None for always), its statements, and the end of the hit.

        ``place`` is the span of the condition, or of the probepoint if there is none.
        """
        w, paths, codes, first = self._w, self._paths, self._codes, len(self._w.lines)
        assert self.faults is not None
        assert paths is not None
        assert codes is not None
        if codes.is_computed:
            self._trail = self._slots
        if condition is not None:
            otherwise = w.new_label()
            self.faults.guard_condition(condition, place)
            self._values.branch(condition, otherwise, when=False)
        self._make_room(body)
        self.statement(body)
        if typed_program.goes_on(body):
            self._end("exit", paths.last)
        if condition is not None:
            w.label(otherwise)
            w.op("abort")
        self.faults.write()
        w.drop_needless_handlers(first)

    def function(self, body: typed_program.Statement) -> None:
        """Write the body of a function as an RPN procedure: stack frame, variables, statements, and the return."""
        self._w.op("save tsp", 1)
        self._w.op("restore sbp", -1)
        self._make_room(body)
        self.statement(body)
        if typed_program.goes_on(body):
            self._leave()

    def _make_room(self, body: typed_program.Statement) -> None:
        """
        Write code that pushes a cell for each variable of the blocks.

        Leading declarations push their initial values, and are done then; all other variables are 0.
        """
        made = 0
        for statement in _first_statements(body):
            match statement:
                case typed_program.Evaluate(typed_values.Assign(typed_values.Local(slot), value), span) if (
                    slot == made and not self._values.wide.is_wide(value.type)
                ):
                    with self._w.at(span):
                        if self.faults is not None:
                            self.faults.guard(statement, span)
                        self._w.comment(_shown(span.text))
                        self._values.exact(value)
                    self._done.add(id(statement))
                    made += 1
                case _:
                    break
        for _ in range(made, self._slots + (self._trail is not None)):
            self._w.op("push 0", 1)

    def _leave(self) -> None:
        depth = self._w.depth
        self._w.drop(depth)
        self._w.op("ret")
        self._w.depth = depth

    def statement(self, statement: typed_program.Statement) -> None:
        """Write the code of a statement and of the statements in it."""
        w = self._w
        if id(statement) in self._done:
            return
        if self.faults is not None and not isinstance(statement, typed_program.Steps):
            self.faults.guard(statement, statement.span)
        match statement:
            case typed_program.Steps(statements):
                for each in statements:
                    self.statement(each)
            case typed_program.Select():
                self._select(statement)
            case typed_program.Loop():
                self._loop(statement)
            case typed_program.Switch():
                self._switch(statement)
            case typed_program.TryCatch():
                self._try(statement)
            case typed_program.Jump(kind, span):
                with w.at(span):
                    w.op(f"jmp {(self._breaks if kind is typed_program.Jumping.BREAK else self._continues)[-1]}")
            case typed_program.End(kind, span):
                with w.at(span):
                    given = self._paths.at.get(id(statement), frozenset()) if self._paths is not None else frozenset()
                    self._end("exit" if kind is typed_program.Ending.RETURN else kind.value, given)
            case (
                typed_program.Show() | typed_program.Clear() | typed_program.Cat() | typed_program.Quit()
                | typed_program.EachItem()
            ):  # fmt: skip
                pass  # only the tool executes them
            case _:
                with w.at(statement.span):
                    w.comment(_shown(statement.span.text))
                    self._simple(statement)

    def _simple(
        self,
        statement: typed_program.Evaluate
        | typed_program.Log
        | typed_program.Tally
        | typed_program.Addition
        | typed_program.Untally
        | typed_program.Result
        | typed_program.Skip,
    ) -> None:
        w = self._w
        match statement:
            case typed_program.Evaluate(value):
                self._values.effect(value)
            case typed_program.Log():
                self._items.log(statement.items, statement.span.line)
                self._name_record(statement)
            case typed_program.Tally(table, keys, tallied):
                parts = keys if tallied is None else (*keys, tallied)
                w.op(f"tally {table}", -self._values.tables.cells(parts))
            case typed_program.Addition(table, keys, added):
                w.op(f"add table, {table}", -self._values.tables.cells((*keys, added)))
            case typed_program.Untally(table, keys):
                w.op(f"delete {table}", -self._values.tables.cells(keys))
            case typed_program.Result(result):
                if result is not None:
                    self._values.exact(result)
                    for cell in range(self._values.wide.width(result.type)):
                        w.op(f"pop sbp, {(self._result or 0) + cell}", -1)
                self._leave()
            case typed_program.Skip(value):
                self._values.exact(value)
                w.op("skip", -1)
            case _:
                assert_never(statement)

    def _end(self, instruction: str, given: frozenset[tuple[int, ...]]) -> None:
        """
        End the hit with ``instruction`` after one of the sequences ``given``.

        ``exit`` becomes ``abort`` for the empty sequence, so that no record is written.
        """
        w = self._w
        if instruction != "exit" or () not in given:
            w.op(instruction)
        elif len(given) == 1:
            w.op("abort")
        else:
            silent = w.new_label()
            self._values.exact(self._trail_cell())
            w.op(f"jz {silent}")
            w.op("exit")
            w.label(silent)
            w.op("abort")
            w.depth -= 1

    def _trail_cell(self) -> typed_values.Local:
        assert self._trail is not None
        return typed_values.Local(
            self._trail, Integer("unsigned long", self._word_size, is_signed=False, rank=LONG_RANK)
        )

    # Control

    def _select(self, statement: typed_program.Select) -> None:
        w = self._w
        otherwise, end = w.new_label(), w.new_label()
        with w.at(statement.span):
            self._values.branch(statement.condition, otherwise, when=False)
        self.statement(statement.then)
        if typed_program.goes_on(statement.then):
            w.op(f"jmp {end}")
        self._values.landing(otherwise)
        if statement.otherwise is not None:
            self.statement(statement.otherwise)
        w.label(end)

    def _loop(self, loop: typed_program.Loop) -> None:
        w = self._w
        start, following, left, end = (w.new_label() for _ in range(4))
        self._breaks.append(end)
        self._continues.append(following)
        w.label(start)
        with w.at(loop.span):
            if loop.condition is not None and loop.tests_first:
                self._values.branch(loop.condition, left, when=False)
        self.statement(loop.body)
        w.label(following)
        with w.at(loop.span):
            if loop.step is not None:
                self._values.effect(loop.step)
            if loop.condition is not None and not loop.tests_first:
                self._values.branch(loop.condition, left, when=False)
            w.op(f"jmp {start}")
            if loop.condition is not None:
                self._values.landing(left)
        w.label(end)
        self._breaks.pop()
        self._continues.pop()

    def _switch(self, switch: typed_program.Switch) -> None:
        w = self._w
        end = w.new_label()
        labels = {test.position: w.new_label() for test in switch.tests}
        default = next((labels[test.position] for test in switch.tests if test.value is None), end)
        cases = sorted((test.value, labels[test.position]) for test in switch.tests if test.value is not None)
        integer = integer_of(switch.value.type)
        with w.at(switch.span):
            self._values.exact(switch.value)
            width = self._values.wide.width(switch.value.type)
            if width > 1:
                found = self._values.wide.search(cases, default)
            else:
                found = self._search(cases, default, is_signed=integer is not None and integer.is_signed)
            w.depth -= width
            for stub, label in found:
                w.label(stub)
                w.depth += width + 1
                w.drop(width + 1)
                w.op(f"jmp {label}")
        self._breaks.append(end)
        for position, statement in enumerate((*switch.statements, None)):
            if position in labels:
                w.label(labels[position])
            if statement is not None:
                self.statement(statement)
        self._breaks.pop()
        w.label(end)

    def _search(self, cases: Sequence[tuple[int, str]], default: str, *, is_signed: bool) -> list[tuple[str, str]]:
        """
        Search for the top cell among cases. If it is equal to none, drop it and jump to ``default``.

        Return the labels to jump to on a match, each with the label of its case. At such a label, the stack has one
        more cell than before the search.
        """
        w = self._w
        if len(cases) < _TABLE_MIN:
            found = []
            for number, label in cases:
                stub = w.new_label()
                found.append((stub, label))
                w.op("push tsp, 0", 1)
                w.number(number)
                w.op("eq", -1)
                w.op(f"jnz {stub}")
                w.drop()
            w.op("ros 1")
            w.op(f"jmp {default}")
            return found
        middle = len(cases) // 2
        below = w.new_label()
        w.number(cases[middle][0])
        w.op("push tsp, 1", 1)
        w.op("lt" if is_signed else "ltu", -1)
        w.op(f"jnz {below}")
        w.drop()
        found = self._search(cases[middle:], default, is_signed=is_signed)
        self._values.landing(below)
        return found + self._search(cases[:middle], default, is_signed=is_signed)

    def _try(self, statement: typed_program.TryCatch) -> None:
        w = self._w
        caught, end = w.new_label(), w.new_label()
        depth = w.depth
        with w.at(statement.span), w.catching(caught):
            self.statement(statement.body)
        w.op(f"jmp {end}")
        w.label(caught)
        w.settle(depth)
        w.restore_handler()
        if statement.code is not None:
            w.op("push x", 3)
            self._values.places.store(statement.code, is_wanted=False)
            if statement.address is not None:
                self._values.places.store(statement.address, is_wanted=False)
            w.drop(w.depth - depth)
        self.statement(statement.handler)
        w.label(end)

    # Records

    def _name_record(self, log: typed_program.Log) -> None:
        """Write code that sets the record's minor code to that of the ``printf`` sequence that ends with ``log``."""
        w, paths, codes = self._w, self._paths, self._codes
        assert paths is not None
        assert codes is not None
        if self._trail is None:
            before = next(iter(paths.before.get(log.number, frozenset())), ())
            if code := codes.of.get((*before, log.number), 0):  # the probe's header sets the first code
                w.op(f"setmin {self._minor + code}")
            return
        cell = self._trail_cell()
        if paths.logs == 1:  # there is one template: store only that a record is needed
            w.number(1)
            self._values.places.store(cell, is_wanted=False)
            return
        self._values.exact(cell)
        w.number(paths.logs + 1)
        w.op("mul", -1)
        w.number(log.number)
        w.op("add", -1)
        self._values.places.store(cell, is_wanted=True)
        if self._minor != 1:
            w.number(self._minor - 1)
            w.op("add", -1)
        w.op("setmin", -1)


def _shown(text: str) -> str:
    """Return a part of C source on one line and without the end of a comment, to be written as a comment of RPN."""
    return " ".join(text.split()).replace("*/", "* /")


def _first_statements(statement: typed_program.Statement) -> Iterator[typed_program.Statement]:
    """Iterate over the leading statements of a body in their order; control structures are not entered."""
    if isinstance(statement, typed_program.Steps):
        for each in statement.statements:
            yield from _first_statements(each)
    else:
        yield statement
