"""
The watchpoints of address spaces: placing them, taking them away, and what must not slip past them.

All threads that run in an address space are stopped while its watchpoints change. One that cannot be stopped now is
armed when it next stops, which is before it runs code of its own again.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer.processes import ThreadState
from dprobes.engines.ptrace.wire import ProbeStatus, Watched
from dprobes.resolve.probestate import ProbeState

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.connection import Connection
    from dprobes.engines.ptrace.tracer.debugregisters import Armer, Refusal
    from dprobes.engines.ptrace.tracer.processes import AddressSpace, FileKey, Thread, Watchpoint
    from dprobes.engines.ptrace.tracer.programs import InsertedProgram, Probe
    from dprobes.engines.ptrace.tracer.stopper import Stopper
    from dprobes.engines.x86.emulation import StackMemory

__all__ = ["UnwatchedMemory", "Watching"]


class Watching:
    """Change the watchpoints of address spaces; ``threads`` is the tracer's table of all threads."""

    def __init__(self, threads: dict[int, Thread], connection: Connection, stopper: Stopper, armer: Armer) -> None:
        self._threads = threads
        self._connection = connection
        self._stopper = stopper
        self._armer = armer

    def update(
        self, space: AddressSpace, pid: int, program: InsertedProgram, file: FileKey, wanted: list[Watchpoint]
    ) -> None:
        """
        Let ``space`` have exactly these watchpoints of a program because of a file.

        ``pid`` is a process that runs in it.
        """
        mine = {
            (w.probe.number, w.watch): w for w in space.watchpoints if w.file == file and w.probe.program is program
        }
        kept = [mine.get((w.probe.number, w.watch), w) for w in wanted]
        watchpoints = (*(w for w in space.watchpoints if w not in mine.values()), *kept)
        if watchpoints != space.watchpoints:
            self._change(space, pid, watchpoints)

    def pass_on(self, space: AddressSpace, program: InsertedProgram, wanted: list[Watchpoint]) -> set[Probe]:
        """
        Let ``space`` have other watchpoints than those of a program, whose place another one takes.

        Return the probepoints of those that were there already. They keep their registers, and hits that nobody has
        looked at yet are theirs.
        """
        former = [w for w in space.watchpoints if w.probe.program is program]
        others = [w for w in space.watchpoints if w.probe.program is not program]
        watchpoints = []
        kept = set()
        has_new = False
        for watchpoint in wanted:
            same = next((w for w in former if (w.watch, w.file) == (watchpoint.watch, watchpoint.file)), None)
            if same is None:
                watchpoints.append(watchpoint)
                has_new = True
                continue
            former.remove(same)
            same.probe, same.point = watchpoint.probe, watchpoint.point
            kept.add(same.probe)
            watchpoints.append(same)
        if former or has_new:
            self._change(space, None, (*others, *watchpoints))
        return kept

    def withdraw(self, probe: Probe) -> None:
        """Take a probepoint's watchpoints away everywhere."""
        for space in {id(t.space): t.space for t in self._threads.values()}.values():
            left = tuple(w for w in space.watchpoints if w.probe is not probe)
            if left != space.watchpoints:
                self._change(space, None, left)

    def withdraw_program(self, space: AddressSpace, program: InsertedProgram) -> None:
        """Take a program's watchpoints away in one address space."""
        left = tuple(w for w in space.watchpoints if w.probe.program is not program)
        if left != space.watchpoints:
            self._change(space, None, left)

    def _change(self, space: AddressSpace, pid: int | None, watchpoints: tuple[Watchpoint, ...]) -> None:
        before, space.watchpoints = space.watchpoints, watchpoints
        pids = space.pids if pid is None else {pid, *space.pids}
        self._tell_bystander(space, pids)
        threads = [t for t in self._threads.values() if t.space is space]
        held = self._stopper.stop(threads)
        try:
            refused = self._arm(threads)
            if refused:
                # All threads or none: half a watchpoint would give wrong counts.
                space.watchpoints = tuple(w for w in watchpoints if w not in refused)
                self._arm(threads)
                self._tell_bystander(space, pids)
        finally:
            for thread in held:
                self._stopper.release(thread)
        first = min(pids, default=0)
        for watchpoint, (state, reason) in refused.items():
            probe = watchpoint.probe
            status = ProbeStatus(probe.program.number, (probe.number,), pid or first, state, reason=reason)
            self._connection.send(status)
        placed: dict[int, list[int]] = {}
        for watchpoint in space.watchpoints:
            if watchpoint not in before:
                probe = watchpoint.probe
                probe.state = ProbeState.ACTIVE
                placed.setdefault(probe.program.number, []).append(probe.number)
        for number, probes in placed.items():
            self._connection.send(ProbeStatus(number, tuple(probes), pid or first, ProbeState.ACTIVE))

    def _arm(self, threads: list[Thread]) -> dict[Watchpoint, Refusal]:
        refused: dict[Watchpoint, Refusal] = {}
        for thread in threads:
            if thread.state is ThreadState.STOPPED or thread.tid in self._stopper.deferred:
                with contextlib.suppress(ProcessLookupError):
                    refused.update(self._armer.arm(thread))
        return refused

    def _tell_bystander(self, space: AddressSpace, pids: set[int]) -> None:
        """Say what will be watched before it is, so that the bystander never misses a register."""
        for pid in pids:
            self._connection.send(Watched(pid, tuple(w.watch for w in space.watchpoints)))


class UnwatchedMemory:
    """
    Give an emulation the stack, but not where it is watched.

    The tracer's own accesses are not seen by debug registers. An emulation that would make one fails here, and the
    thread makes the access itself, in a step.
    """

    def __init__(self, memory: StackMemory, space: AddressSpace) -> None:
        self._memory = memory
        self._space = space

    def read_word(self, address: int, size: int) -> int:
        """Return a word; raise OSError also if reading it is watched for."""
        self._refuse_watched(address, size, writes=False)
        return self._memory.read_word(address, size)

    def write_word(self, address: int, size: int, value: int) -> None:
        """Store a word; raise OSError also if writing it is watched for."""
        self._refuse_watched(address, size, writes=True)
        self._memory.write_word(address, size, value)

    def _refuse_watched(self, address: int, size: int, *, writes: bool) -> None:
        if any(w.watch.is_touched(address, size, writes=writes) for w in self._space.watchpoints):
            raise PermissionError("the word is watched")
