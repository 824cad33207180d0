"""The part of a session by which its probepoints are in the target, beside those of others at the same stub."""

from __future__ import annotations

import contextlib
import math
import os
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Literal

from dprobes.engines import engine_interface
from dprobes.engines.core_notices import no_core_notice, written_notice
from dprobes.engines.engine_interface import Notice, Pause, RecordBatch, StateEvent, carry_out
from dprobes.engines.gdb.stub_stepper import Stepper
from dprobes.engines.hits.probe_hits import CORE_DUMP, HANDING_OVER, HandlerRunner
from dprobes.errors import EngineError, reason_of
from dprobes.resolve.probe_state import ProbeState

if TYPE_CHECKING:
    import threading
    from collections import deque
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dprobes.arch import Architecture
    from dprobes.engines.engine_interface import Counts
    from dprobes.engines.gdb.placed_probes import PlacedProbes
    from dprobes.engines.gdb.shared_stub import SharedStub
    from dprobes.engines.gdb.stub_context import AwaitedReturns, StubContext
    from dprobes.engines.gdb.stub_process import StubProcess
    from dprobes.engines.gdb.stub_program import Resolved, StubProbe, StubProgram
    from dprobes.engines.gdb.stub_registers import Registers, StubProcessor, TargetDescription
    from dprobes.engines.gdb.stub_requests import Stub
    from dprobes.engines.gdb.stub_target import StubTarget
    from dprobes.engines.gdb.stub_transports import DebuggerRelay
    from dprobes.engines.hits.probe_hits import Emitter, Handled
    from dprobes.keyed.table_entries import KeyedStore
    from dprobes.keyed.table_layout import TableContents
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.rpn_program import Point

__all__ = ["StubMember"]

# What other threads ask of a run behind a stub while it goes on.


class StubControls(engine_interface.Attachment):
    """The part of a session by which others look at it; all is done between two hits, or before the next one."""

    _program: StubProgram
    _tables: Sequence[KeyedStore]
    _lock: threading.Lock
    _is_stopping: bool
    _shared: SharedStub[Any]
    _removals: list[int]
    _events: deque[engine_interface.Event]
    _records: list[tuple[int, bytes]]
    _reported: set[tuple[int, ProbeState]]

    def _taken(self) -> Iterator[engine_interface.Event]:
        while self._events:
            yield self._events.popleft()
        if self._records:
            records, self._records = self._records, []
            yield RecordBatch(records)

    def _report(self, states: Mapping[ProbeState, Sequence[int]], pid: int) -> None:
        """Tell what has become of probepoints, each state of one once."""
        for state, numbers in states.items():
            if (new := tuple(number for number in numbers if (number, state) not in self._reported)) != ():
                self._reported.update((number, state) for number in new)
                self._events.append(StateEvent(new, pid, state))

    def send_record(self, program: int, probe: int, record: bytes) -> bool:  # noqa: ARG002 - of one program
        """Take a record of a probepoint."""
        self._records.append((probe, record))
        return True

    def warn(self, message: str, hint: str | None = None) -> None:
        """Tell the user something, and what to do about it."""
        self._warn(message, hint)

    def _warn(self, message: str, hint: str | None) -> None:
        self._events.append(Notice(message, hint))

    def stop(self) -> None:
        """Ask for the end."""
        self._is_stopping = True

    @property
    def program(self) -> StubProgram:
        """The program, with its variables."""
        return self._program

    @property
    def stores(self) -> Sequence[KeyedStore]:
        """The keyed tables."""
        return self._tables

    @property
    def shared(self) -> SharedStub[Any]:
        """What it shares with others at the same stub."""
        return self._shared

    @property
    def is_stopping(self) -> bool:
        """Whether the end was asked for."""
        return self._is_stopping

    @property
    def wants_stop(self) -> bool:
        """Whether the target has to stop for what was asked."""
        return self._is_stopping or bool(self._removals)

    @property
    def due(self) -> float:
        """When it will want the target to stop by itself, by the clock that never goes back: never."""
        return math.inf

    def remove_soon(self, probe: int) -> None:
        """Have a probepoint removed behind this hit."""
        self._removals.append(probe)

    def counts(self) -> tuple[Counts, ...]:
        """Return what happened so far."""
        return tuple(each.copy() for each in self._program.tallies)

    def remove(self, probes: Sequence[int]) -> None:
        """Have probepoints removed."""
        with self._lock:
            self._removals += probes

    def local_variables(self) -> list[int]:
        """Return the local variables."""
        return list(self._program.local_variables)

    def cpu_variables(self) -> list[list[int]]:
        """Return the variables of the one CPU that there is."""
        return [list(self._program.cpu_variables)]

    def tables(self) -> tuple[TableContents, ...]:
        """Return what the keyed tables hold."""
        with self._lock:
            return tuple(store.contents() for store in self._tables)

    def change(self, changes: Sequence[engine_interface.Change]) -> None:
        """Change local variables and tables between two hits."""
        with self._lock:
            carry_out(changes, self._program.local_variables, self._tables)

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """Set local and CPU variables to zero."""
        with self._lock:
            for cells in (self._program.local_variables, self._program.cpu_variables):
                count = len(cells[first : None if last is None else last + 1])
                cells[first : first + count] = [0] * count


# What ``exit 1`` and ``exit 3`` have done with a process behind a stub: a debugger takes over, or its core is written.
#
# Both happen before the probed instruction, while the process stands still, with the probepoint removed.


_LOOK = 0.1
"""Seconds after which somebody's wish to end is seen at the latest."""


class StubExits(StubControls):
    """The part of a session by which a process is left to others."""

    probes: Sequence[Probepoint]
    _stub: Stub
    _target: StubTarget
    _context: StubContext
    _emitter: Emitter
    _process: StubProcess
    _processor: StubProcessor
    _resolved: Resolved
    _core_directory: str

    @abstractmethod
    def _count(self, handled: Sequence[Handled[StubProgram]]) -> None:
        """Count hits, and take out what has become inactive by that."""

    def _hand_over(self, handled: Sequence[Handled[StubProgram]], at: int, registers: Registers) -> bool:
        """Do what handlers want to be done with the target before it goes on; return whether the run is over then."""
        code = self._deciding_code(handled)
        if code is None or code == CORE_DUMP:
            return False
        where = next((self._shared.owner(each.probe).probes[each.probe.number].where for each in handled), "")
        self._count(handled)
        self._target.write_back(self._context.thread, registers)
        self._target.clear()
        relay = self._shared.relay = self._stub.relay()
        text = f"the process stands still at {at:#x} ({where}) until a debugger takes over, or the run is ended"
        self._warn(text, f"gdb {self._process.program} -ex 'target remote {relay.path}'")
        return True

    def _deciding_code(self, handled: Sequence[Handled[StubProgram]]) -> int | None:
        """Return how the first handler ended that hands the process over, None if none does; warn of the others."""
        codes = [each.outcome.exit_code for each in handled if each.outcome is not None]
        handing_over = [code for code in codes if code in HANDING_OVER]
        first = handing_over[0] if handing_over else None
        for code in handing_over[1:]:
            self._warn(
                f"'exit {code}' was not carried out in process {self._process.pid}: another handler ended with "
                f"'exit {first}' at the same moment",
                None,
            )
        return first

    def _leave_core(
        self, handled: Sequence[Handled[StubProgram]], at: int, registers: Registers
    ) -> Sequence[Handled[StubProgram]]:
        """Write the core of the process if a handler wants that; return the hits that are still to be counted."""
        if not any(each.outcome is not None and each.outcome.exit_code == CORE_DUMP for each in handled):
            return handled
        self._count(handled)
        self._target.write_back(self._context.thread, registers)
        self._events.append(self._write_core(at, registers))
        return ()

    def _write_core(self, at: int, registers: Registers) -> engine_interface.Notice:
        from dprobes.engines.gdb.stub_core import StubCore
        from dprobes.platform.core.core_writer import create_core_file

        process = self._process
        name = os.fsdecode(process.name)
        path = os.path.join(self._core_directory, f"core.dprobes.{process.pid}")
        try:
            path, output = create_core_file(path)
        except OSError as error:
            return no_core_notice(process.pid, name, path, reason_of(error))
        core = StubCore(
            self._target,
            self._processor,
            self._resolved.architecture.name,
            process,
            self._context.thread,
            registers,
            at,
        )
        is_complete = False
        try:
            size = core.write(output)
            is_complete = True
        except OSError as error:
            return no_core_notice(process.pid, name, path, reason_of(error))
        finally:
            os.close(output)
            if not is_complete:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        return written_notice(process.pid, name, path, size)

    def _serve_debugger(self, relay: DebuggerRelay) -> Iterator[engine_interface.Event]:
        """Pass on what a debugger says until the stub or the run comes to its end."""
        try:
            while not self._is_stopping:
                is_there = relay.serve(_LOOK)
                if relay.has_served or not is_there:
                    self._target.is_over = True  # what becomes of it is the debugger's business
                    self._target.tell("end")
                if not is_there:
                    break
                yield Pause()
        finally:
            relay.close()

    @property
    def is_debugging(self) -> bool:
        """Whether a debugger has taken the stub over, and is still there."""
        relay = self._shared.relay
        return relay is not None and relay.is_serving


class StubMember(StubExits):
    """
    A member of the sessions at one stub.

    The first one finds out what stands behind it, which the others use as well.
    """

    _job: engine_interface.Job
    _runner: HandlerRunner
    _stepper: Stepper
    _placed: PlacedProbes
    _returns: AwaitedReturns
    _has_withdrawn = False
    """Whether the probepoints were taken out while those of others stay."""

    @abstractmethod
    def begin(self) -> None:
        """Insert the breakpoints."""

    @property
    @abstractmethod
    def own_places(self) -> set[int]:
        """Where breakpoints of the engine's own are, at which modules may have come or gone."""

    @abstractmethod
    def forget_request(self) -> None:
        """Take notice that the target has stopped: whoever wants it to stop again has to ask again."""

    @abstractmethod
    def _placement(self) -> PlacedProbes:
        """Return probepoints that are nowhere yet."""

    @abstractmethod
    def _target_of(
        self, order: Literal["little", "big"], default: TargetDescription, tell: Callable[[str], None]
    ) -> StubTarget:
        """Return the target behind the stub."""

    @abstractmethod
    def _context_of(self, architecture: Architecture, processor: StubProcessor) -> StubContext:
        """Return what handlers see of the target."""

    # Coming and going

    def enter(self) -> None:
        """Place the probepoints in what the stub stands for."""
        shared = self._shared
        if shared.members:
            with shared.standing_still():
                self._join()
            return
        try:
            shared.members.append(self)
            self._set_up(shared.connection.open())
        except BaseException:
            shared.members.clear()
            shared.connection.abandon()
            raise

    def _set_up(self, stub: Stub) -> None:
        """Take notice of what the stub stands for, and place the probepoints of all in it."""
        architecture, processor, connection = self._resolved.architecture, self._processor, self._shared.connection
        self._stub = stub
        self._target = self._target_of(architecture.byte_order, processor.default_description(), connection.tell)
        connection.target = self._target
        self._context = self._context_of(architecture, processor)
        self._runner = HandlerRunner(self._context)
        self._stepper = Stepper(self._target, processor, architecture, self._context.names)
        for each in self._shared.members:
            each.take_over(self)
        for each in self._shared.members:
            each.begin()

    def take_over(self, leader: StubMember) -> None:
        """Use what stands behind the stub as another session has found it."""
        self._stub, self._target, self._context = leader._stub, leader._target, leader._context
        self._runner, self._stepper = leader._runner, leader._stepper
        self._placed = self._placement()

    def _join(self) -> None:
        """Place the probepoints beside those of others, while the target stands still."""
        self.take_over(self._shared.members[0])
        self._shared.members.append(self)
        try:
            self.begin()
        except BaseException:
            self.withdraw()
            raise
        replaced = self._job.replaces
        if isinstance(replaced, StubMember) and replaced in self._shared.members:
            replaced.withdraw()

    def withdraw(self) -> None:
        """Take the probepoints out, while the target stands still; those of others stay."""
        self._returns.clear()
        self._forget_places()
        self._has_withdrawn = True
        self._shared.members.remove(self)
        self._remove_unneeded()

    def _forget_places(self) -> None:
        for probe in self._program.probes:
            self._placed.drop(probe)

    def close(self) -> None:
        """Take the probepoints out; the last member closes the connection."""
        shared = self._shared
        if self not in shared.members:
            return
        if len(shared.members) > 1 and not shared.is_over:
            self._is_stopping = True
            # Where the target does not stop, it is withdrawn when that does.
            with contextlib.suppress(EngineError), shared.standing_still():
                if not self._has_withdrawn:
                    self.withdraw()
            return
        try:
            if shared.members == [self]:
                shared.connection.close()
        finally:
            shared.members.remove(self)

    # Where it has probepoints

    @property
    def own_needed(self) -> set[int]:
        """Where breakpoints have to be for this program."""
        return self._placed.at.keys() | self._placed.entries.keys() | self._returns.addresses | self.own_places

    @property
    def _needed(self) -> set[int]:
        """Where breakpoints have to be."""
        return self._shared.needed

    @property
    def watches(self) -> bool:
        """Whether some of the target's memory is watched."""
        return bool(self._placed.watched)

    def raw_at(self, at: int) -> bytes | None:
        """Return the instruction of a probepoint; None if there is none."""
        return self._placed.raw.get(at)

    def _raw(self, at: int) -> bytes | None:
        """Return the instruction under a breakpoint, as whoever has a probepoint there knows it."""
        return next((raw for each in self._shared.members if (raw := each.raw_at(at)) is not None), None)

    def owners_at(self, at: int) -> Sequence[tuple[StubProbe, Point]]:
        """Return the probepoints at an instruction."""
        return self._placed.at.get(at, ())

    def concerned(self, address: int, reason: str) -> Sequence[tuple[StubProbe, Point]]:
        """Return the probepoints whom an access to memory concerns."""
        return self._placed.watched.concerned(address, reason)

    def forget_calls(self) -> None:
        """Await no returns of calls any longer."""
        self._returns.clear()

    def leave_places(self) -> None:
        """Take notice that the module is nowhere, and calls do not return."""
        self._returns.clear()
        self._placed.move(None)

    def _remove_unneeded(self) -> None:
        for address in sorted(self._target.inserted - self._needed):
            self._target.remove(address, self._breakpoint_size)

    @property
    def _breakpoint_size(self) -> int:
        return len(self._processor.breakpoint)

    # Behind a hit

    def _count(self, handled: Sequence[Handled[StubProgram]], *, has_faulted: bool = False) -> None:
        """Count hits, each for its program, and take out what has become inactive by that."""
        for each in self._shared.members:
            each.count(handled, has_faulted=has_faulted)

    def count(self, handled: Sequence[Handled[StubProgram]], *, has_faulted: bool) -> None:
        """Count those hits that are of the program."""
        if len(self._shared.members) > 1:
            handled = [each for each in handled if each.probe.program is self._program]
        self._drop(self._emitter.count(handled, has_faulted=has_faulted))

    def _drop(self, gone: Sequence[StubProbe]) -> None:
        """Take out the breakpoints of probepoints that have become inactive."""
        for probe in gone:
            self._placed.drop(probe)
            self._returns.drop(probe)
            self._events.append(StateEvent((probe.number,), 0, probe.state))
        if gone:
            self._remove_unneeded()

    def _carry_out_wishes(self) -> None:
        """Remove what is to be removed, and those programs whose end was asked for while others stay."""
        members = self._shared.members
        for each in members:
            each.carry_out_removals()
        if len(members) > 1:
            for each in [each for each in members if each.is_stopping]:
                if len(members) > 1:
                    each.withdraw()

    def carry_out_removals(self) -> None:
        """Remove the probepoints whose removal was asked for."""
        numbers, self._removals = self._removals, []
        gone = [self._program.probes[number] for number in numbers if self._program.probes[number].is_active]
        for probe in gone:
            probe.state = ProbeState.REMOVED
        self._drop(gone)
