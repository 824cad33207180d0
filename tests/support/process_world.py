"""
The simulated context of hits in a real process, for the interpreter.

It is a ``FakeContext``, with the process's values where these cannot be simulated.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from dprobes.fake_context import PAGE, FakeContext, header_of
from dprobes.keyed.table_entries import TableStore, stores_of
from dprobes.record.log_record import Item, LogRecord
from dprobes.rpn.instruction_encoding import encode
from dprobes.vm import Ending, Interpreter
from integration.puppet_process import FIXED_FLAGS, FREE_FLAGS, SELECTORS, TAKEN, PuppetProcess
from support.differential_runs import NotedPages, mapped_pages
from support.random_programs import SYMBOLS
from support.specified_outcomes import results, specified_results

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, MutableSequence, Sequence

    from dprobes.arch import Architecture
    from dprobes.rpn.rpn_program import Program
    from dprobes.vm import Outcome, Point

__all__ = ["ITEMS", "STACK_PAGES", "STACK_TOP", "Scene", "World", "unused_stack"]

ITEMS = Item.MAJOR | Item.MINOR | Item.CPU | Item.PID | Item.UID | Item.IP | Item.SP | Item.TID | Item.PROCESS_NAME
"""The header items of records."""

STACK, STACK_TOP = 0x10000, 0x11800
"""The stack of a hit: start of its memory, and stack pointer; memory below the red zone is not compared."""

RED_ZONE = 128
STACK_PAGES = (STACK // PAGE, STACK // PAGE + 1)


def unused_stack(page: int) -> int:
    """Return the number of bytes at the start of a page that a hit may overwrite: those below the red zone."""
    return min(max(STACK_TOP - RED_ZONE - page * PAGE, 0), PAGE) if page in STACK_PAGES else 0


@dataclass(frozen=True)
class Scene:
    """The state before a hit: registers, and pages by number; None as ``pages`` keeps those of the last hit."""

    registers: Mapping[str, int]
    pages: Mapping[int, bytes | bytearray] | None = None
    read_only: Iterable[int] = frozenset()


class _Snapshot(NamedTuple):
    """The parts of a ``World`` that a hit may change."""

    variables: tuple[list[int], ...]
    pages: dict[int, bytes]
    registers: dict[int, int]
    tables: list[bytes]


class World:
    """The simulated context of the hits of one program, with the state between hits."""

    def __init__(
        self, target: Architecture, program: Program, puppet: PuppetProcess, global_values: Sequence[int]
    ) -> None:
        self._target = target
        self._process = str(puppet.pid)
        self._image = encode(program, target)
        self._interpreter = Interpreter(self._image, target)
        self.context = context = FakeContext(target.name, memory={STACK: bytes(2 * PAGE)})
        self._pages = context._pages = NotedPages(context._pages)
        context._registers[True] = context._registers[False]  # a thread has its registers once
        context.ids |= {"pid": puppet.pid, "tid": puppet.pid, "uid": os.getuid(), "cpu": puppet.cpu}
        context.comm = Path(f"/proc/{puppet.pid}/comm").read_text().rstrip("\n")
        context.symbols = dict.fromkeys(SYMBOLS, puppet.data)
        context.keyed_tables = stores_of(program.tables)
        for values, count in zip(self._variables(), (program.vars, 0, program.cvars, program.tvars), strict=True):
            values[:] = [0] * count
        context.global_variables[:] = global_values

    def _variables(self) -> tuple[MutableSequence[int], ...]:
        context = self.context
        return (
            context.local_variables,
            context.global_variables,
            context.cpu_variables(),
            context.thread_variables(),
        )

    def registers(self) -> dict[str, int]:
        """Return the registers that the process loads before a hit and reports after it."""
        return {name: self.context.value_of(name) for name in TAKEN[self._target.word_size]}

    def set(self, scene: Scene, site: int) -> None:
        """Set the state before the next hit at the address ``site``."""
        context = self.context
        for name in TAKEN[self._target.word_size]:
            context.set_value(name, scene.registers.get(name, 0))
        cs, ss = SELECTORS[self._target.word_size]
        for name, value in (("cs", cs), ("ss", ss), ("eip", site), ("esp", STACK_TOP)):
            context.set_value(name, value)
        context.set_value("eflags", context.value_of("eflags") & FREE_FLAGS | FIXED_FLAGS)
        if scene.pages is not None:
            stack = {page: self._pages[page] for page in STACK_PAGES}
            self._pages.clear()
            self._pages.update({page: bytearray(data) for page, data in scene.pages.items()} | stack)
            context._read_only = set(scene.read_only)

    def memory(self) -> dict[int, bytes]:
        """Return the contents of all pages."""
        return {page: bytes(data) for page, data in self._pages.items()}

    def outcome(self, number: int, point: Point) -> Outcome | None:
        """
        Interpret a hit of the handler with index ``number``, and return its outcome.

        Return None, without a change, if the behaviour is not specified, or if it accesses memory that only the process
        has.
        """
        before, start = self._snapshot(), self._image.handlers[number]
        self._pages.missing.clear()
        found = results(self._interpreter, [(start, point)], self.context)[0]
        after = self._snapshot()
        self._restore(before)
        is_specified = specified_results(self._image, self._target, [(start, point)], self.context) == [found]
        is_there = self._pages.missing and any(
            page in span for span in mapped_pages(self._process) for page in self._pages.missing
        )
        if not is_specified or is_there:
            self._restore(before)
            return None
        self._restore(after)
        return found[0]

    def _snapshot(self) -> _Snapshot:
        tables = [bytes(cast("TableStore", store)._cells) for store in self.context.keyed_tables]
        variables = tuple(list(each) for each in self._variables())
        return _Snapshot(variables, self.memory(), dict(self.context._registers[False]), tables)

    def _restore(self, snapshot: _Snapshot) -> None:
        for values, old in zip(self._variables(), snapshot.variables, strict=True):
            values[:] = old
        for page, data in snapshot.pages.items():
            self._pages[page][:] = data
        self.context._registers[False].update(snapshot.registers)
        self.context.keyed_tables = [
            TableStore.taken_over(store.table, memoryview(bytearray(cells)).cast("Q"))
            for store, cells in zip(self.context.keyed_tables, snapshot.tables, strict=True)
        ]

    def records_of(self, outcome: Outcome, site: int) -> list[LogRecord]:
        """Return the records of a hit at the address ``site``, none after ``abort``; a stack trace is a second one."""
        if outcome.ending is Ending.ABORT:
            return []
        context = self.context
        header = header_of(context, ITEMS)._replace(ip=site, sp=STACK_TOP, process_name=context.comm)
        found = [header._replace(major=outcome.major, minor=outcome.minor, data=outcome.log, is_cut=outcome.is_cut)]
        if outcome.trace:
            found.append(header._replace(is_stack_trace=True, data=outcome.trace))
        return found
