"""
Comparisons of an engine's sessions in a process (``programs/puppet.c``) with the interpreter, hit by hit.

Each program replaces the previous one. After a hit the process reports its registers and memory; after the end of a
program, its variables, tables, records and counts are compared.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import Finished, RecordBatch, Scope, StateEvent
from dprobes.engines.inline.inline_engine import InlineHandlers
from dprobes.engines.shared_globals import GlobalVariables
from dprobes.record.log_record import decode_record
from dprobes.resolve.local_module import resolve
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.rpn_program import Expression, ModuleType, Offset
from dprobes.target.probed_module import Module
from dprobes.vm import Ending, Point
from integration.puppet_process import PuppetProcess
from integration.support import TIMEOUT, await_true
from support.attachments import job_of
from support.process_world import ITEMS, Scene, World, unused_stack

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.arch import Architecture
    from dprobes.engines.engine_interface import Event
    from dprobes.engines.ptrace.ptrace_engine import PtraceEngine, PtraceSession
    from dprobes.record.log_record import LogRecord
    from dprobes.resolve.probepoints import ResolvedModule
    from dprobes.rpn.rpn_program import Program

__all__ = ["GLOBALS", "Agreement"]

GLOBALS = 16
"""The maximum number of global variables of a program."""


@dataclass
class _Expected:
    """The expected counts and records of a probepoint."""

    hits: int = 0
    passed: int = 0
    is_removed: bool = False
    records: list[LogRecord] = field(default_factory=list)


class _Run:
    """A session with a thread that collects its events, and the expected results."""

    def __init__(
        self, session: PtraceSession, program: Program, resolved: ResolvedModule, world: World, name: str
    ) -> None:
        self.session = session
        self.program = program
        self.offsets = [probe.offset for probe in resolved.in_code]
        self.world = world
        self.name = name
        self.expected = [_Expected() for _ in self.offsets]
        self._events: list[Event] = []
        self.records: dict[int, list[LogRecord]] = defaultdict(list)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for event in self.session.poll():
                if isinstance(event, RecordBatch):
                    for probe, record in event.records:
                        self.records[probe].append(decode_record(record))
                else:
                    self._events.append(event)
        except BaseException as error:
            self._failure = error
            raise

    def await_end(self) -> Finished:
        """Wait for the end of the session, and return its last event."""
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        assert self._failure is None, self._failure
        return next(event for event in self._events if isinstance(event, Finished))

    def has_placed(self, count: int) -> bool:
        """Return whether all ``count`` probepoints have reached their final state: a jump, a refusal, or active."""
        native = self.session.native
        if isinstance(native, InlineHandlers):
            return len({*native.jumps, *native.refused}) == count
        active = [e.probes for e in self._events if isinstance(e, StateEvent) and e.state is ProbeState.ACTIVE]
        return sum(map(len, active)) == count


class Agreement:
    """
    A process in which programs are run one after the other and compared; the context manager ends both.

    ``ways`` counts how the probed instructions were executed; ``hits`` is the number of compared hits.
    """

    def __init__(self, engine: PtraceEngine, program: Path, target: Architecture) -> None:
        self._engine = engine
        self._target = target
        self._puppet = PuppetProcess(program, reports=True)
        self.sites = len(self._puppet.addresses)
        self._module = Module.load(program)
        self._globals = GlobalVariables(GLOBALS)
        self._global_values = [0] * GLOBALS
        self._last: _Run | None = None
        self.ways: Counter[str] = Counter()
        self.hits = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._last is not None:
            self._last.session.close()
        self._puppet.__exit__(*exception)
        self._globals.close()

    @property
    def jumps(self) -> int:
        """The number of executions through jumps, in programs that have ended."""
        return sum(number for way, number in self.ways.items() if way.startswith("inline"))

    def finish(self) -> None:
        """Stop the last program, and compare its results with the expected ones."""
        assert self._last is not None
        self._last.session.stop()
        self._compare(self._last)

    def begin(self, program: Program, name: str) -> None:
        """Replace the running program by ``program``; its n-th handler is for the n-th site."""
        sites = self._puppet.addresses
        definitions = tuple(
            replace(definition, location=Offset(Expression(address - sites[0], "first_site")))
            for definition, address in zip(program.definitions, sites, strict=False)
        )
        program = replace(
            program, name=self._puppet.path, modtype=ModuleType.USER, definitions=definitions, groups=(), types=()
        )
        resolved = resolve(program, self._module, Diagnostics(), allow_write=True)
        last = self._last
        scope, replaces = Scope(pid=self._puppet.pid), None if last is None else last.session
        job = job_of(program, scope, resolved=resolved, items=ITEMS, globals=self._globals, replaces=replaces)
        session = self._engine.session(self._engine.plan(job).job)
        session.begin()
        if last is not None:
            self._global_values[: last.program.gvars] = last.world.context.global_variables
        world = World(self._target, program, self._puppet, self._global_values[: program.gvars])
        run = self._last = _Run(session, program, resolved, world, name)
        if last is not None:
            self._compare(last)
            last.session.close()
        await_true(lambda: run.has_placed(len(definitions)), "all probepoints", TIMEOUT)

    def hit(self, number: int, scene: Scene) -> None:
        """
        Let the process hit the site with index ``number``, and compare registers and memory with the interpreter's.

        ``scene`` is the state before the hit.
        """
        run = self._last
        assert run is not None
        world, expected, site = run.world, run.expected[number], self._puppet.addresses[number]
        definition, where = run.program.definitions[number], f"{run.name}, handler {number}, hit {expected.hits}"
        world.set(scene, site)
        registers, memory = world.registers(), world.memory()
        if not expected.is_removed and expected.hits < definition.passcount:
            expected.hits += 1
            expected.passed += 1
        elif not expected.is_removed:
            outcome = world.outcome(number, Point.of(run.program, definition, run.offsets[number]))
            if outcome is None:
                return
            expected.hits += 1
            expected.records += world.records_of(outcome, site)
            is_last = expected.hits == definition.passcount + definition.maxhits if definition.maxhits else False
            expected.is_removed = is_last or outcome.ending is Ending.REMOVE
        self._puppet.hit(number, list(registers.values()), memory, world.context._read_only)
        found, after = self._puppet.report(memory)
        self.hits += 1
        wanted = world.registers()
        if number % 3 == 1:
            wanted["eax"] &= 0xFFFF_FFFF  # what the instruction does
        assert found == wanted, where
        for page, data in world.memory().items():
            start = unused_stack(page)
            assert after[page][start:] == data[start:], f"{where}, page {page:#x}"

    def _compare(self, run: _Run) -> None:
        """Compare counts, records, variables and tables of an ended program with the expected ones."""
        finished, context = run.await_end(), run.world.context
        for number, (counts, expected) in enumerate(zip(finished.counts, run.expected, strict=True)):
            where = f"{run.name}, handler {number}"
            assert (counts.hits, counts.passed) == (expected.hits, expected.passed), (
                f"{where}: {counts}, not {expected}"
            )
            assert run.records[number] == expected.records, f"{where}: {run.records[number]}, not {expected.records}"
            assert (counts.lost, counts.missed) == (0, 0), where
            self.ways.update(counts.executed)
        session = run.session
        assert session.local_variables() == list(context.local_variables), run.name
        assert session.cpu_variables()[self._puppet.cpu] == list(context.variables_of_cpu), run.name
        found = [(sorted(each.rows), each.lost) for each in session.tables()]
        wanted = [(sorted(each.rows), each.lost) for each in (store.contents() for store in context.keyed_tables)]
        assert found == wanted, run.name
