"""Session of a program at a stub, from the connection to the removal of the last breakpoint."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

from dprobes.engines import engine_interface
from dprobes.engines.engine_interface import Begun, Finished, Pause, apply_changes, make_changes
from dprobes.engines.gdb.stub_member import RunEvents
from dprobes.engines.gdb.stub_program import StubProgram
from dprobes.errors import EngineError
from dprobes.extensions.extension_registry import called_extensions, load_extensions
from dprobes.keyed.table_entries import stores_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.engines.engine_interface import Counts
    from dprobes.engines.gdb.shared_stub import SharedStub
    from dprobes.engines.gdb.stub_member import StubMember
    from dprobes.engines.gdb.stub_program import Resolved
    from dprobes.engines.gdb.stub_transports import DebuggerRelay
    from dprobes.keyed.table_layout import TableContents
    from dprobes.resolve.probepoints import LeftOutProbe, Probepoint

__all__ = ["StubSession"]

ResolvedT = TypeVar("ResolvedT", bound="Resolved")

_LOOK = 0.1
"""Maximum number of seconds between a request to end and its detection."""


class StubSession(engine_interface.Attachment):
    """
    Session of one probe program at a ``shared`` stub, from its insertion to its removal.

    ``probed`` creates the member of the stub: a process, or a machine. Requests of clients are carried out between two
    hits.
    """

    probes: Sequence[Probepoint] = ()
    left_out: Sequence[LeftOutProbe] = ()

    def __init__(
        self,
        job: engine_interface.Job,
        resolved: ResolvedT,
        shared: SharedStub,
        probed: Callable[[engine_interface.Job, ResolvedT, StubProgram, RunEvents], StubMember],
    ) -> None:
        self.probes, self.left_out = resolved.probepoints, resolved.left_out
        self.shared = shared
        self._replaced = job.replaces
        self._events = RunEvents()
        principal: StubProgram | None = job.principal.program if isinstance(job.principal, StubSession) else None
        tables = stores_of(job.program.tables) if principal is None else principal.keyed_tables
        extensions = load_extensions(called_extensions(job.program))
        self.program: StubProgram = StubProgram(job, resolved, extensions, tables, self._events.warn, principal)
        self._member = probed(job, resolved, self.program, self._events)

    def enter(self) -> None:
        """Connect to the target through the stub, and insert the program's probepoints into it."""
        shared, member = self.shared, self._member
        if shared.members:
            with shared.standing_still():
                shared.join(member)
                if isinstance(self._replaced, StubSession) and self._replaced._member in shared.members:  # noqa: SLF001
                    shared.withdraw(self._replaced._member)  # noqa: SLF001
            return
        try:
            shared.members.append(member)
            shared.driver.set_up(shared.connection.open())
        except BaseException:
            shared.members.clear()
            shared.connection.abandon()
            raise

    def close(self) -> None:
        """Remove the probepoints; the last member closes the connection."""
        shared, member = self.shared, self._member
        if member not in shared.members:
            return
        if len(shared.members) > 1 and not shared.is_over:
            member.is_stopping = True
            # If the target does not stop, the member is withdrawn when it does.
            with contextlib.suppress(EngineError), shared.standing_still():
                if not member.has_withdrawn:
                    shared.withdraw(member)
            return
        try:
            if shared.members == [member]:
                shared.connection.close()
        finally:
            shared.members.remove(member)

    def poll(self) -> Iterator[engine_interface.Event]:
        """Iterate over events until the target has ended, or the end is requested."""
        yield from self._events.take()
        yield Begun()
        shared = self.shared
        shared.begin()
        while not (shared.is_over or self._member.has_withdrawn):
            has_come = shared.turn()
            yield from self._events.take()
            if not has_come:
                yield Pause()
        self._member.finish()
        yield from self._events.take()
        if shared.relay is not None and shared.members[:1] == [self._member]:
            yield from self._serve_debugger(shared.relay)
        yield Finished(self.counts(), shared.status)

    def _serve_debugger(self, relay: DebuggerRelay) -> Iterator[engine_interface.Event]:
        """Relay a debugger's packets until the connection to the stub, or the run, ends."""
        target = self.shared.target
        try:
            while not self._member.is_stopping:
                is_there = relay.serve(_LOOK)
                if relay.has_served or not is_there:
                    target.is_over = True  # the debugger determines what the target does from now on
                    target.tell("end")
                if not is_there:
                    break
                yield Pause()
        finally:
            relay.close()

    @property
    def is_debugging(self) -> bool:
        """True if a debugger has taken over the stub, and is still connected."""
        relay = self.shared.relay
        return relay is not None and relay.is_serving

    def stop(self) -> None:
        """Request the end of the run: the next ``poll`` removes the probepoints."""
        self._member.is_stopping = True

    def counts(self) -> tuple[Counts, ...]:
        """Return the current counts."""
        return tuple(each.copy() for each in self.program.tallies)

    def remove(self, probes: Sequence[int]) -> None:
        """Request the removal of the probepoints with these numbers, which happens when the target is stopped next."""
        with self.shared.lock:
            self.program.removals += probes

    def local_variables(self) -> list[int]:
        """Return the local variables."""
        return list(self.program.local_variables)

    def cpu_variables(self) -> list[list[int]]:
        """Return the CPU variables of all CPUs."""
        with self.shared.lock:
            return self._member.cpu_variables()

    def tables(self) -> tuple[TableContents, ...]:
        """Return the contents of the keyed tables."""
        with self.shared.lock:
            return tuple(store.contents() for store in self.program.keyed_tables)

    def change(self, changes: Sequence[engine_interface.Change]) -> None:
        """Make changes of variables, tables and probepoints in their order (``make_changes``)."""
        make_changes(self, changes)

    def change_values(self, changes: Sequence[engine_interface.ValueChange]) -> None:
        """Change local variables and tables between two hits."""
        with self.shared.lock:
            apply_changes(changes, self.program.local_variables, self.program.keyed_tables)

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """Set local and CPU variables to zero, from index ``first`` to ``last`` inclusive."""
        with self.shared.lock:
            self.program.reset_variables(first, last)
