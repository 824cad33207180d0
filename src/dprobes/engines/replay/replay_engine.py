"""Replay engine: finds the probepoints of recorded hits, and runs their handlers."""

from __future__ import annotations

import json
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dprobes.engines import engine_interface
from dprobes.engines.engine_interface import Counts, RecordBatch, StateEvent, apply_changes, make_changes
from dprobes.errors import DprobesError, EngineError, reason_of
from dprobes.extensions.extension_registry import called_extensions, load_extensions
from dprobes.fake_context import FakeContext, header_of
from dprobes.keyed.table_entries import stores_of
from dprobes.record.log_record import Item, encode_record
from dprobes.resolve.probepoints import ProbeKind, ProbeState
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.instruction_set import ExceptionCode
from dprobes.rpn.rpn_program import Point
from dprobes.vm import Ending
from dprobes.vm.translate import Translator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.engines.engine_interface import EngineOptions
    from dprobes.keyed.table_layout import TableContents
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint
    from dprobes.vm import Outcome

__all__ = ["RecordedHit", "read_recording"]

# A recording: hits in a text file, one JSON object a line (docs/reference/engine-replay.md).


class RecordedHit(NamedTuple):
    """
    Hit in a recording.

    ``where`` is its file and line, for messages. ``place`` is the field that identifies its probepoint, with its value;
    ``fields`` are the other fields.
    """

    where: str
    place: tuple[str, int | str]
    fields: dict[str, Any]


def read_recording(path: str) -> Iterator[RecordedHit]:
    """Iterate over the hits in a file; raise ``EngineError`` for an invalid line, or if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _hit(line, f"{path}:{number}")
    except OSError as error:
        raise EngineError(f"the recording '{path}' cannot be read: {reason_of(error)}") from None


def _hit(line: bytes, where: str) -> RecordedHit:
    name = "hit"
    try:
        fields = _of(dict, "an object")(json.loads(line))
        for name, value in fields.items():
            fields[name] = _FIELDS[name](value)
    except KeyError:
        raise EngineError(f"{where}: a hit has no field '{name}'; fields are {', '.join(_FIELDS)}") from None
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{where}: '{name}': {error}") from None
    places = [(name, fields.pop(name)) for name in ("probe", "offset", "address", "symbol") if name in fields]
    if len(places) != 1:
        raise EngineError(f"{where}: a hit has one of the fields probe, offset, address, symbol")
    return RecordedHit(where, places[0], fields)


def _number(value: object) -> int:
    number = value
    if isinstance(value, str):
        with suppress(ValueError):
            number = int(value, 0)
    if type(number) is not int or not 0 <= number < 1 << 64:
        raise ValueError(f"expected a number of up to 64 bits, found {json.dumps(value)}")
    return number


def _bytes(value: object) -> bytes:
    text = _TEXT(value)
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ValueError(f"expected bytes in hex, found {json.dumps(text)}") from None


def _of(kind: type, called: str) -> Callable[[Any], Any]:
    def check(value: object) -> Any:
        if type(value) is not kind:
            raise ValueError(f"expected {called}, found {json.dumps(value)}")
        return value

    return check


def _mapping(key: Callable[[Any], Any], item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: {key(name): item(each) for name, each in _of(dict, "an object")(value).items()}


_TEXT = _of(str, "a string")
_FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("probe", "offset", "address", "base", "pid", "tid", "uid", "cpu", "task", "time"), _number),
    **dict.fromkeys(("symbol", "name"), _TEXT),
    "return": _of(bool, "true or false"),
    **dict.fromkeys(("registers", "entry"), _mapping(str, _number)),
    "segments": _mapping(_number, _number),
    **dict.fromkeys(("memory", "read_only"), _mapping(_number, _bytes)),
}


class ReplayEngine(engine_interface.Engine):
    """Engine that runs handlers on the hits in a recording, the endpoint of the scope."""

    name = "replay"

    def __init__(self, options: EngineOptions, scope: engine_interface.Scope) -> None:  # noqa: ARG002 - as the registry asks
        assert scope.endpoint is not None, "the registry says that this engine takes endpoints only"
        self._path = scope.endpoint

    def plan(self, job: engine_interface.Job) -> engine_interface.Plan:
        """Return the plan of a job; raise ``EngineError`` if the module was not found on this machine."""
        if job.resolved is None and not job.compiled.everywhere:
            raise EngineError(f"the replay engine needs the module '{job.program.name}' on this machine")
        return engine_interface.Plan(self, job)

    def attach(self, plan: engine_interface.Plan) -> ReplaySession:
        """Read the recording, and return the session; raise ``EngineError`` for an invalid recording."""
        return ReplaySession(plan.job, self._path)


class ReplaySession(engine_interface.Attachment):
    """Attachment that runs the handlers on the hits of a recording."""

    probes: Sequence[Probepoint] = ()
    left_out: Sequence[LeftOutProbe] = ()

    def __init__(self, job: engine_interface.Job, path: str) -> None:
        compiled = job.compiled
        self._items = job.items | Item.MAJOR | Item.MINOR
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
        self._removed: deque[int] = deque()
        """Indices of the probepoints whose removal has not been reported yet."""
        self._counts = [Counts() for _ in self.probes]
        self._locals = [0] * self._program.vars
        self._of_cpus = [[0] * self._program.cvars]
        self._of_threads: dict[int, list[int]] = {}
        self._tables = stores_of(self._program.tables)
        self._mapped = job.globals.cells() if job.globals is not None else None
        self._globals = self._mapped if self._mapped is not None else [0] * self._program.gvars
        self._is_stopping = False
        self._hits = [(self._probes_at(hit), self._context(hit), hit) for hit in read_recording(path)]

    def close(self) -> None:
        """Release the recorded hits, and unmap global variables that the run shares with others."""
        self._hits.clear()
        if self._mapped is not None:
            self._mapped.close()

    def _probes_at(self, hit: RecordedHit) -> list[int]:
        """Return the indices of a hit's probepoints; raise ``EngineError`` if there are none."""
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
        """Return the context for the handlers of a hit, with the variables of the run."""
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

    def poll(self) -> Iterator[engine_interface.Event]:
        """Iterate over the records of the hits in the order of the file."""
        active = tuple(number for number, state in enumerate(self._states) if state is ProbeState.COMPILED)
        yield StateEvent(active, 0, ProbeState.ACTIVE)
        yield engine_interface.Begun()
        for probes, context, hit in self._hits:
            yield from self._removals()
            for number in probes:
                if self._states[number] is ProbeState.COMPILED and not self._is_stopping:
                    yield from self._on_hit(number, context, hit)
        yield from self._removals()
        yield engine_interface.Finished(self.counts())

    def _removals(self) -> Iterator[StateEvent]:
        """Iterate over the events of removals that have not been reported yet."""
        while self._removed:
            yield StateEvent((self._removed.popleft(),), 0, ProbeState.REMOVED)

    def _on_hit(self, number: int, context: FakeContext, hit: RecordedHit) -> Iterator[engine_interface.Event]:
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
            yield engine_interface.Notice(f"{hit.where}: the handler was ended by {name}, which nothing catches")
        if outcome.exit_code in (1, 3):
            text = f"{hit.where}: 'exit {outcome.exit_code}' removes the probepoint; there is no process to stop"
            yield engine_interface.Notice(text, is_warning=False)
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
        """End the run before the next hit."""
        self._is_stopping = True

    def counts(self) -> tuple[Counts, ...]:
        """Return the counts so far."""
        return tuple(replace(each) for each in self._counts)

    def remove(self, probes: Sequence[int]) -> None:
        """Remove probepoints; ``poll`` reports those that were active."""
        for number in probes:
            if self._states[number] is ProbeState.COMPILED:
                self._states[number] = ProbeState.REMOVED
                self._removed.append(number)

    def local_variables(self) -> list[int]:
        """Return the local variables."""
        return list(self._locals)

    def cpu_variables(self) -> list[list[int]]:
        """Return the CPU variables, a list for each CPU up to the highest one in the recording."""
        return [list(cells) for cells in self._of_cpus]

    def tables(self) -> tuple[TableContents, ...]:
        """Return the contents of the keyed tables."""
        return tuple(store.contents() for store in self._tables)

    def change(self, changes: Sequence[engine_interface.Change]) -> None:
        """Make changes of variables, tables and probepoints in their order (``make_changes``)."""
        make_changes(self, changes)

    def change_values(self, changes: Sequence[engine_interface.ValueChange]) -> None:
        """Change local variables and tables."""
        apply_changes(changes, self._locals, self._tables)

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """Set the local and CPU variables from ``first`` to ``last``, included, to zero; None: to the last one."""
        for cells in (self._locals, *self._of_cpus):
            count = len(cells[first : None if last is None else last + 1])
            cells[first : first + count] = [0] * count
