"""
The insertion of a program among those that a tracer has, and the end of one while others stay.

A handler is added to a breakpoint, or a breakpoint is written, between two hits; so no hit of any program is lost, and
no thread has to stop for it. Where jumps come, no breakpoint is written before: threads run on as they are meanwhile.
What is wrong with the program itself is found out before anything is changed.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.reports import Ended, InPlace, NotInserted
from dprobes.engines.ptrace.tracer.hitcounter import has_hit_of
from dprobes.engines.ptrace.tracer.placement import join_jumps, note_written
from dprobes.engines.ptrace.tracer.programs import InsertedProgram
from dprobes.engines.ptrace.tracer.state import ThreadState
from dprobes.errors import EngineError, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dprobes.engines.ptrace.requests import Insert, Replace
    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.connection import Connection
    from dprobes.engines.ptrace.tracer.coredump import CoreDumps
    from dprobes.engines.ptrace.tracer.detachment import Detacher
    from dprobes.engines.ptrace.tracer.hitcounter import Settler
    from dprobes.engines.ptrace.tracer.modulebreakpoints import ModuleBreakpoints
    from dprobes.engines.ptrace.tracer.native.jumpabsence import JumpAbsence
    from dprobes.engines.ptrace.tracer.processtree import ProcessTree
    from dprobes.engines.ptrace.tracer.removal import Remover
    from dprobes.engines.ptrace.tracer.state import Thread, TracerState
    from dprobes.engines.ptrace.tracer.stopper import Stopper

__all__ = ["Inserter", "prepared"]

_PATIENCE = 30.0
"""Seconds for which jumps are awaited, before breakpoints are written instead."""


class Inserter:
    """The insertion of programs into processes that are traced, and their end."""

    def __init__(
        self,
        state: TracerState,
        tree: ProcessTree,
        modules: ModuleBreakpoints,
        stopper: Stopper,
        remover: Remover,
        settler: Settler,
        dumps: CoreDumps,
        detacher: Detacher,
        jump_absence: JumpAbsence,
    ) -> None:
        self._jump_absence = jump_absence
        self._pending: dict[int, tuple[list[AddressSpace], float]] = {}
        """By program for whose jumps is waited: the spaces that it came into, and until when."""
        self._connection = state.connection
        self._programs = state.programs
        self._threads = state.threads
        self._tree = tree
        self._modules = modules
        self._stopper = stopper
        self._remover = remover
        self._settler = settler
        self._dumps = dumps
        self._detacher = detacher

    def insert(self, message: Insert) -> None:
        """Insert a program, or tell the client why not; then nothing has changed."""
        number = message.start.number
        pids = self._tree.tree_of(message.pid)
        if not pids:
            self._connection.send(NotInserted(number))
            return
        if not message.start.follow:
            pids = {message.pid}
        spaces = [space for space in self._threads.spaces() if not pids.isdisjoint(space.pids)]
        try:
            principal = self._programs.numbered(message.start.principal)
            program = prepared(message, None, self._connection, self._modules, spaces, principal)
        except EngineError as error:
            self._connection.send(NotInserted(number, error.message))
            return
        program.reach.pids |= pids
        self._programs.append(program)
        self._tree.rescope()
        with self._jump_absence.everywhere():
            for space in spaces:
                thread = next((t for t in self._threads.in_space(space) if t.pid in pids), None)
                if thread is not None and space.is_open and not space.shared_with:
                    self._modules.place_missing(space, thread, program)
                    self._modules.watch_missing(space, thread, program)
                    if space.patches.known:
                        join_jumps(space, program, self._modules.native_probes(space, program))
        for space in spaces:
            note_written(space, program)
        self._pending[number] = spaces, time.monotonic() + _PATIENCE
        self.look_after()

    def look_after(self) -> float | None:
        """Say that programs are in place once their jumps are there; return in how many seconds to ask again."""
        if not self._pending:
            return None
        now = time.monotonic()
        for number, (spaces, until) in list(self._pending.items()):
            if now >= until or not any(s.is_open and (s.unwritten or s.joining) for s in spaces):
                self._say_in_place(number)
        return min((until - now for _, until in self._pending.values()), default=None)

    def _say_in_place(self, number: int) -> None:
        """Say that a program is in place; what has had no jump by now has its breakpoint."""
        self._pending.pop(number)
        for space in self._threads.spaces():
            threads = self._threads.in_space(space)
            if threads and not any(thread.awaits_jumps for thread in threads):
                self._modules.write_late(space, threads[0])
            self._jump_absence.end_joining(space)
        self._connection.send(InPlace(number))

    def finish(self) -> None:
        """Say so of all programs, whose processes have been let go."""
        for number in self._pending:
            self._connection.send(InPlace(number))
        self._pending.clear()

    def end_idle(self) -> None:
        """End the programs whose processes are all gone, if others still have some."""
        idle = [program for program in self._programs if not program.reach.pids]
        for program in idle if len(idle) < len(self._programs) else ():
            self.end(program, complete=True)

    def end(
        self, program: InsertedProgram, let_handlers_end: Callable[[], object] | None = None, *, complete: bool = False
    ) -> None:
        """
        Take a program away; hits that its handlers have seen, and whose instruction was executed, are counted.

        ``let_handlers_end`` waits for those in processes: only then is all there that they count and record. The end is
        ``complete`` if its processes are gone.
        """
        if program.number in self._pending:
            self._say_in_place(program.number)
        held = self._settle_all(program)
        self._modules.drop(program)
        self._remover.withdraw_program(program)
        for thread in self._threads.values():
            thread.returns = [pending for pending in thread.returns if pending.probe.program is not program]
        for thread in held:
            with contextlib.suppress(ProcessLookupError):
                self._stopper.release(thread)
        if let_handlers_end is not None:
            let_handlers_end()
        self._dumps.abandon(program)
        self._let_go()
        self._settler.finish()
        self._connection.send(Ended(program.number, complete))

    def _settle_all(self, program: InsertedProgram) -> list[Thread]:
        """Settle what is not counted yet, and return the threads that were stopped for that."""
        concerned = [thread for thread in self._threads.values() if has_hit_of(thread, program)]
        held = self._stopper.stop(concerned)
        for thread in concerned:
            status = self._stopper.deferred.get(thread.tid)
            with contextlib.suppress(OSError):  # killed meanwhile
                if thread.state is ThreadState.STOPPED or status is not None:
                    self._settler.drop(thread, status, program)
            self._settler.forget(thread, program)
        return held

    def _let_go(self) -> None:
        """Detach the processes that were in this program's scope only, as far as they have memory of their own."""
        for pid in self._tree.rescope():
            if self._threads.of_process(pid)[0].space.pids == {pid}:
                self._detacher.detach_process(pid)


def prepared(
    message: Insert | Replace,
    former: InsertedProgram | None,
    connection: Connection,
    modules: ModuleBreakpoints,
    spaces: Iterable[AddressSpace],
    principal: InsertedProgram | None = None,
) -> InsertedProgram:
    """
    Return the program of a message, which knows what it has in all files that are mapped now.

    ``principal`` has its variables and tables. Raise ``EngineError`` if it cannot be made.
    """
    native, state = message.start.native, None
    try:
        counters = connection.open(message.start.counters)
        if native is not None:
            state = native.opened(connection.open(native.descriptor))
    except OSError as error:
        reason = reason_of(error)
        raise EngineError(f"the tracer cannot share memory with dprobes: {reason}") from error
    if principal is None and message.start.principal >= 0:
        raise EngineError("the program whose variables it uses has ended")
    program = InsertedProgram.of(replace(message.start, counters=counters), former, principal, state)
    if not modules.complete(program, message.known, spaces):
        raise EngineError("dprobes was stopped, and could not be asked about the program's files")
    return program
