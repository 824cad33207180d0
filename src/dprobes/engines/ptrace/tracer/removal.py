"""Taking probepoints away while the processes run: those that ended by themselves, and those that somebody removes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer.detachment import give_back_pages
from dprobes.engines.ptrace.tracer.processes import ThreadGoneError
from dprobes.engines.ptrace.wire import ProbeStatus, Removed
from dprobes.resolve.probestate import ProbeState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.ptrace.tracer.connection import Connection
    from dprobes.engines.ptrace.tracer.processes import AddressSpace
    from dprobes.engines.ptrace.tracer.processtree import ProcessTree
    from dprobes.engines.ptrace.tracer.programs import InsertedProgram, Probe
    from dprobes.engines.ptrace.tracer.stopper import Stopper
    from dprobes.engines.ptrace.tracer.watchpoints import Watching

__all__ = ["Remover"]


class Remover:
    """Take the breakpoints and watchpoints of probepoints out of all address spaces."""

    def __init__(self, connection: Connection, tree: ProcessTree, stopper: Stopper, watching: Watching) -> None:
        self._connection = connection
        self._tree = tree
        self._stopper = stopper
        self._watching = watching

    def withdraw(self, probe: Probe) -> list[tuple[AddressSpace, list[int]]]:
        """
        Take a probepoint away that is not active any more, and say so.

        Return the address spaces that had breakpoints of it, and where nothing else needs them. No thread has to stop
        for a byte; one that has just run into it finds the address among the ``former`` ones.
        """
        self._watching.withdraw(probe)
        emptied = []
        for space in self._tree.spaces():
            addresses = [b.address for b in space.drop(probe)]
            if addresses:
                emptied.append((space, addresses))
                for pid in space.pids:
                    self._connection.send(Removed(pid, tuple(addresses)))
        self._connection.send(ProbeStatus(probe.program.number, (probe.number,), 0, probe.state))
        return emptied

    def withdraw_program(self, program: InsertedProgram) -> None:
        """Take away all that a program has, without a word about it, and give back what was only for that."""
        for probe in program.probes.values():
            if probe.is_active:
                probe.state = ProbeState.REMOVED
        emptied = {}
        for space in self._tree.spaces():
            self._watching.withdraw_program(space, program)
            addresses = [b.address for b in space.drop_program(program)] if space.is_open else []
            if addresses:
                emptied[space] = addresses
                for pid in space.pids:
                    self._connection.send(Removed(pid, tuple(addresses)))
        for space, addresses in emptied.items():
            self._give_back(space, addresses)

    def remove(self, probes: Iterable[Probe]) -> None:
        """Remove probepoints that were not removed before, and give back the pages of code that were only for them."""
        emptied: dict[AddressSpace, list[int]] = {}
        for probe in probes:
            if probe.state is not ProbeState.REMOVED:
                probe.state = ProbeState.REMOVED
                for space, addresses in self.withdraw(probe):
                    emptied.setdefault(space, []).extend(addresses)
        for space, addresses in emptied.items():
            self._give_back(space, addresses)

    def _give_back(self, space: AddressSpace, addresses: list[int]) -> None:
        """Let a thread that stops for nothing else drop the pages; if there is none, they stay until the end."""
        threads = [t for t in self._tree.threads.values() if t.space is space]
        held = self._stopper.stop(threads)
        for thread in held[:1]:
            try:
                self._stopper.waits.hide_interruption(thread)
                give_back_pages(space, thread, addresses)
            except ThreadGoneError as gone:
                self._stopper.defer(thread.tid, gone.status)
                held.remove(thread)
            except ProcessLookupError:
                held.remove(thread)  # its end is still to be reported
        for thread in held:
            with contextlib.suppress(ProcessLookupError):
                self._stopper.release(thread)
