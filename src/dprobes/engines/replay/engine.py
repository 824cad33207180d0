"""The engine: it finds the probepoints of recorded hits, and runs their handlers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self

from dprobes.engines import interface
from dprobes.engines.interface import Counts, RecordBatch, StateEvent, carry_out
from dprobes.engines.replay.recordedhits import read_recording
from dprobes.errors import DprobesError, EngineError
from dprobes.extensions.registry import called_extensions, load_extensions
from dprobes.fakecontext import FakeContext, header_of
from dprobes.keyed.store import stores_of
from dprobes.record.codec import encode_record
from dprobes.record.layout import Item
from dprobes.resolve.probepoints import ProbeKind
from dprobes.resolve.probestate import ProbeState
from dprobes.rpn.encoder import encode
from dprobes.rpn.isa import ExceptionCode
from dprobes.rpn.point import Point
from dprobes.vm import Ending
from dprobes.vm.translate import Translator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.options import EngineOptions
    from dprobes.engines.replay.recordedhits import RecordedHit
    from dprobes.keyed.contents import TableContents
    from dprobes.resolve.localmodule import Compiled
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint
    from dprobes.vm import Outcome

__all__ = ["ReplayEngine"]


class ReplayEngine(interface.Engine):
    """Run handlers on the hits in the recording that is the endpoint of the scope."""

    name = "replay"

    def __init__(self, options: EngineOptions, scope: interface.Scope) -> None:  # noqa: ARG002 - as the registry asks
        assert scope.endpoint is not None, "the registry says that this engine takes endpoints only"
        self._path = scope.endpoint

    def prepare(self, compiled: Compiled) -> None:
        """Take the places; raise ``EngineError`` if the module is not on this machine."""
        if compiled.resolved is None and not compiled.everywhere:
            raise EngineError(f"the replay engine needs the module '{compiled.program.name}' on this machine")
        self._compiled = compiled

    def run(self, job: interface.Job) -> ReplaySession:
        """Return the session; entering it reads the recording."""
        return ReplaySession(job, self._compiled, self._path)


class ReplaySession(interface.ControlledSession):
    """One run through a recording."""

    probes: Sequence[Probepoint] = ()
    left_out: Sequence[LeftOutProbe] = ()

    def __init__(self, job: interface.Job, compiled: Compiled, path: str) -> None:
        self._items, self._path = job.items | Item.MAJOR | Item.MINOR, path
        self._program, self._architecture, resolved = compiled.program, compiled.architecture, compiled.resolved
        image = resolved.image if resolved is not None else encode(self._program, self._architecture)
        self.probes, self._symbols = compiled.everywhere, dict[str, int]()
        if resolved is not None:
            self.probes = resolved.probepoints
            self.left_out = resolved.left_out
            self._symbols = dict(resolved.symbols)
        self._starts, self._translator = image.handlers, Translator(image, self._architecture)
        self._extensions = load_extensions(called_extensions(self._program))
        self._states = [probe.state for probe in self.probes]
        self._counts = [Counts() for _ in self.probes]
        self._locals = [0] * self._program.vars
        self._of_cpus = [[0] * self._program.cvars]
        self._of_threads: dict[int, list[int]] = {}
        self._tables = stores_of(self._program.tables)
        self._globals = job.globals.cells() if job.globals is not None else [0] * self._program.gvars
        self._hits: list[tuple[list[int], FakeContext, RecordedHit]] = []
        self._is_stopping = False

    def __enter__(self) -> Self:
        self._hits = [(self._probes_at(hit), self._context(hit), hit) for hit in read_recording(self._path)]
        return self

    def __exit__(self, *exception: object) -> None:
        self._hits.clear()

    def _probes_at(self, hit: RecordedHit) -> list[int]:
        """Return the numbers of the probepoints that a hit is of."""
        key, wanted = hit.place
        at_return = hit.fields.get("return", False)
        found = []
        for number, probe in enumerate(self.probes):
            places: dict[str, int | str] = {"probe": number, "symbol": probe.where}
            if probe.is_in_code:
                places |= {"offset": probe.offset, "address": probe.instruction.address}
            if places.get(key) == wanted and (key == "probe" or probe.at_return == at_return):
                found.append(number)
        if not found:
            shown = f"{wanted:#x}" if key in ("offset", "address") else wanted
            raise EngineError(f"{hit.where}: the program has no probepoint at {key} {shown}")
        return found

    def _context(self, hit: RecordedHit) -> FakeContext:
        """Return what the handlers of a hit see; variables are those of the run."""
        symbols = {name: address + hit.fields.get("base", 0) for name, address in self._symbols.items()}
        state = {name: value for name, value in hit.fields.items() if name not in ("base", "name", "return")}
        state["comm"] = hit.fields.get("name", "")
        try:
            context = FakeContext(self._architecture.name, symbols=symbols, extensions=self._extensions, **state)
        except DprobesError as error:
            raise EngineError(f"{hit.where}: {error.message}") from None
        for name, value in hit.fields.get("registers", {}).items():
            if value > self._architecture.word_mask:
                raise EngineError(f"{hit.where}: register '{name}' cannot hold {value:#x}")
        context.local_variables, context.global_variables = self._locals, self._globals
        self._of_cpus += [[0] * self._program.cvars for _ in range(len(self._of_cpus), context.cpu() + 1)]
        context.variables_of_cpu = self._of_cpus[context.cpu()]
        context.variables_of_thread = self._of_threads.setdefault(context.tid(), [0] * self._program.tvars)
        context.keyed_tables = self._tables
        return context

    def events(self) -> Iterator[interface.Event]:
        """Iterate over the records of the hits in the order of the file."""
        active = tuple(number for number, state in enumerate(self._states) if state is ProbeState.COMPILED)
        yield StateEvent(active, 0, ProbeState.ACTIVE)
        yield interface.Begun()
        for probes, context, hit in self._hits:
            for number in probes:
                if self._states[number] is ProbeState.COMPILED and not self._is_stopping:
                    yield from self._on_hit(number, context, hit)
        yield interface.Finished(self.counts())

    def _on_hit(self, number: int, context: FakeContext, hit: RecordedHit) -> Iterator[interface.Event]:
        probe, counts = self.probes[number], self._counts[number]
        definition, place = probe.definition, 0
        counts.hits += 1
        if counts.hits <= definition.passcount:
            counts.passed += 1
            return
        if probe.is_in_code:
            place = probe.offset
            if not context.value_of("pc"):
                context.set_value("pc", hit.fields.get("base", 0) + probe.instruction.address)
        elif probe.kind is ProbeKind.WATCHPOINT:
            place = probe.memory.address
        point = Point.of(self._program, definition, place, self.probes[number].arguments)
        outcome = self._translator.run(self._starts[probe.number], point, context)
        if records := [(number, record) for record in self._records(outcome, context, hit)]:
            counts.records += len(records)
            yield RecordBatch(records)
        if outcome.unhandled:
            name = ExceptionCode(outcome.unhandled).name
            yield interface.Notice(f"{hit.where}: the handler was ended by {name}, which nothing catches")
        if outcome.exit_code in (1, 3):
            text = f"{hit.where}: 'exit {outcome.exit_code}' removes the probepoint; there is no process to stop"
            yield interface.Notice(text, is_warning=False)
        if outcome.ending is Ending.REMOVE or outcome.exit_code in (1, 3):
            self._states[number] = ProbeState.REMOVED
        elif definition.maxhits and counts.hits - definition.passcount >= definition.maxhits:
            self._states[number] = ProbeState.DISABLED
        if self._states[number] is not ProbeState.COMPILED:
            yield StateEvent((number,), 0, self._states[number])

    def _records(self, outcome: Outcome, context: FakeContext, hit: RecordedHit) -> Iterator[bytes]:
        if outcome.ending is Ending.ABORT:
            return
        name = hit.fields.get("name", "") if self._items & Item.PROCESS_NAME else None
        header = header_of(context, self._items)._replace(process_name=name)
        yield encode_record(header._replace(major=outcome.major, minor=outcome.minor, data=outcome.log))
        if outcome.trace:
            yield encode_record(header._replace(data=outcome.trace, is_stack_trace=True))

    def stop(self) -> None:
        """End before the next hit."""
        self._is_stopping = True

    def counts(self) -> tuple[Counts, ...]:
        """Return what happened so far."""
        return tuple(replace(each) for each in self._counts)

    def remove(self, probes: Sequence[int]) -> None:
        """Remove probepoints."""
        for number in probes:
            self._states[number] = ProbeState.REMOVED

    def local_variables(self) -> list[int]:
        """Return the local variables."""
        return list(self._locals)

    def cpu_variables(self) -> list[list[int]]:
        """Return the variables of the CPUs, up to the last one that was recorded."""
        return [list(cells) for cells in self._of_cpus]

    def tables(self) -> tuple[TableContents, ...]:
        """Return what the keyed tables hold."""
        return tuple(store.contents() for store in self._tables)

    def change(self, changes: Sequence[interface.Change]) -> None:
        """Change local variables and tables."""
        carry_out(changes, self._locals, self._tables)

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """Set local and CPU variables to zero."""
        for cells in (self._locals, *self._of_cpus):
            count = len(cells[first : None if last is None else last + 1])
            cells[first : first + count] = [0] * count
