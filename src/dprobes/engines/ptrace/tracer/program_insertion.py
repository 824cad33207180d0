"""
Insertion and end of programs, and the switch-over from a program to another one, without losing a hit.

Handlers run in the tracer, one at a time, so the exchange happens between two hits. Breakpoints that threads have
executed, but that are not handled yet, count for the new program. A hit whose instruction may or may not have been
executed is settled first, with all threads stopped: it is counted, or it is given up and the thread hits again.
Breakpoints that both programs need are kept, and other programs are not affected.

Errors in the new program are detected before anything is changed, as far as possible.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.engines.hits.hit_lifecycle import HitState
from dprobes.engines.ptrace.breakpoint_sites import Role
from dprobes.engines.ptrace.tracer.breakpoint_placement import awaits_jump, join_jumps, note_placement, note_written
from dprobes.engines.ptrace.tracer.hit_counter import has_hit_of
from dprobes.engines.ptrace.tracer.probe_removal import tell_lowered
from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram
from dprobes.engines.ptrace.tracer.tracer_state import ThreadState
from dprobes.engines.ptrace.tracer_messages import Ended, InPlace, NotInserted, ProbeStatus, Removed, Replaced
from dprobes.errors import EngineError, reason_of
from dprobes.resolve.probepoints import ProbeState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dprobes.engines.ptrace.breakpoint_sites import Site
    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.client_connection import Connection
    from dprobes.engines.ptrace.tracer.detachment import CoreDumps, Detacher
    from dprobes.engines.ptrace.tracer.hit_counter import Settler
    from dprobes.engines.ptrace.tracer.module_breakpoints import ModuleBreakpoints
    from dprobes.engines.ptrace.tracer.native.handler_ends import JumpAbsence
    from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint
    from dprobes.engines.ptrace.tracer.probe_removal import Remover
    from dprobes.engines.ptrace.tracer.process_tree import ProcessTree
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
    from dprobes.engines.ptrace.tracer.thread_watchpoints import Watchpoints
    from dprobes.engines.ptrace.tracer.tracer_programs import Probe
    from dprobes.engines.ptrace.tracer.tracer_state import Thread, TracerState
    from dprobes.engines.ptrace.tracer_messages import Insert, Replace

__all__ = ["Inserter", "Replacer"]

_PATIENCE = 30.0
"""Seconds to wait for jumps, before breakpoints are written instead."""


class Inserter:
    """
    Insertion of programs into processes that are traced, and the end of programs.

    A handler is added to a breakpoint, or a breakpoint is written, between two hits. So no hit of any program is lost,
    and no thread has to stop for it. Where jumps will be written, no breakpoint is written before: threads run
    on unchanged meanwhile. Errors in the program itself are detected before anything is changed.
    """

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
        """Address spaces of programs whose jumps are awaited, and the end of the wait, by the number of the program."""
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
        """Insert a program; if that is not possible, report the reason to the client, with nothing changed."""
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
            self._let_go()
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
                    if not space.patches.memories:
                        self._modules.write_unlisted(space)  # of a descendant that has had no probes yet
                    if space.patches.known:
                        join_jumps(space, program, self._modules.native_probes(space, program))
        for space in spaces:
            note_written(space, program)
        self._pending[number] = spaces, time.monotonic() + _PATIENCE
        self.look_after()

    def look_after(self) -> float | None:
        """Report programs as in place once their jumps are written; return the seconds until the next check or None."""
        if not self._pending:
            return None
        now = time.monotonic()
        for number, (spaces, until) in list(self._pending.items()):
            if now >= until or not any(s.is_open and (s.unwritten or s.joining) for s in spaces):
                self._say_in_place(number)
        return min((until - now for _, until in self._pending.values()), default=None)

    def _say_in_place(self, number: int) -> None:
        """
        Report to the client that the program ``number`` is in place.

        Before that, breakpoints are written for its probepoints that have no jumps by now.
        """
        self._pending.pop(number)
        for space in self._threads.spaces():
            threads = self._threads.in_space(space)
            if threads and not any(thread.awaits_jumps for thread in threads):
                self._modules.write_late(space, threads[0])
            self._jump_absence.end_joining(space)
        self._connection.send(InPlace(number))

    def finish(self) -> None:
        """Report all remaining programs as in place, after their processes were detached."""
        for number in self._pending:
            self._connection.send(InPlace(number))
        self._pending.clear()

    def end_idle(self) -> None:
        """End the programs whose processes are all gone, if other programs still have processes."""
        idle = [program for program in self._programs if not program.reach.pids]
        for program in idle if len(idle) < len(self._programs) else ():
            self.end(program, complete=True)

    def end(
        self, program: InsertedProgram, let_handlers_end: Callable[[], object] | None = None, *, complete: bool = False
    ) -> None:
        """
        Remove a program. Hits that its handlers have seen, and whose instruction was executed, are counted.

        ``let_handlers_end`` waits for handlers in processes; only then are their counts and records complete. The end
        is ``complete`` if the program's processes are gone.
        """
        if program.number in self._pending:
            self._say_in_place(program.number)
        held = self._settle_all(program)
        self._modules.drop(program)
        self._remover.withdraw_program(program)
        for thread in self._threads.values():
            thread.returns = [pending for pending in thread.returns if pending.probe.program is not program]
        self._stopper.release_all(held)
        if let_handlers_end is not None:
            let_handlers_end()
        self._dumps.abandon(program)
        self._let_go()
        self._settler.finish()
        self._connection.send(Ended(program.number, complete))

    def _settle_all(self, program: InsertedProgram) -> list[Thread]:
        """
        Stop the threads with a hit of ``program`` that is not counted yet, and end these hits.

        Return the threads that were stopped for this. The caller resumes them.
        """
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
        """Detach the processes that were only in this program's scope, if they do not share their memory."""
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
    Return the program of a message, with its sites in all files that are mapped now.

    ``principal`` owns its variables and tables. Raise ``EngineError`` if it cannot be created.
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


_Owner = tuple["Site", "Probe | None"]
"""Purpose of a breakpoint: a site, and its probepoint unless it is the engine's own."""


class Replacer:
    """Replacement of an inserted program by another one, without a hit that both or none of them handle."""

    def __init__(
        self,
        state: TracerState,
        modules: ModuleBreakpoints,
        stopper: Stopper,
        watchpoints: Watchpoints,
        settler: Settler,
        jump_absence: JumpAbsence,
    ) -> None:
        self._jump_absence = jump_absence
        self._connection = state.connection
        self._programs = state.programs
        self._threads = state.threads
        self._modules = modules
        self._stopper = stopper
        self._watchpoints = watchpoints
        self._settler = settler

    def replace(self, message: Replace, go_on: Callable[[], int]) -> None:
        """Replace a program, or report to the client why not, with nothing changed; ``go_on`` handles stops."""
        former = self._programs.numbered(message.former)
        number = message.start.number
        if former is None:
            self._connection.send(NotInserted(number, "the program that is to be replaced has ended"))
            return
        spaces = [space for space in self._threads.spaces() if former.reach.covers(space.pids)]
        try:
            program = prepared(message, former, self._connection, self._modules, spaces)
        except EngineError as error:
            self._connection.send(NotInserted(number, error.message))
            return
        with self._jump_absence.everywhere(go_on):
            obstacle = self._modules.obstacle_to(program, spaces)
            if obstacle is not None:
                self._connection.send(NotInserted(number, obstacle=obstacle))
                return
            held = self._stop_all()
            try:
                self._settle_all(former)
                self._settler.finish()
                self._connection.send(Replaced(number))
                self._exchange(former, program)
                self._connection.send(InPlace(number))
            finally:
                self._stopper.release_all(thread for thread in held if thread.state is ThreadState.STOPPED)
        for space in spaces:
            note_written(space, program)

    # Settling hits

    def _stop_all(self) -> list[Thread]:
        threads = list(self._threads.values())
        for thread in threads:
            if thread.state is ThreadState.LISTENING and thread.hit.state is not HitState.NONE:
                # It can be inspected only in a real stop; an interrupt ends the listening, and the group stop lasts.
                thread.state = ThreadState.RUNNING
        return self._stopper.stop(threads)

    def _settle_all(self, former: InsertedProgram) -> None:
        for thread in self._threads.values():
            if not has_hit_of(thread, former):
                continue
            status = self._stopper.deferred.get(thread.tid)
            if thread.state is ThreadState.STOPPED or status is not None:
                with contextlib.suppress(OSError):  # killed meanwhile
                    self._settler.repeat(thread, status, former)
                    continue
            # A thread that cannot stop now will execute the instruction without a stop.
            self._settler.count_now(thread)

    # The exchange

    def _exchange(self, former: InsertedProgram, program: InsertedProgram) -> None:
        self._modules.exchange(former, program)
        self._carry_returns_over(former, program)
        for probe in former.probes.values():
            probe.state = ProbeState.REMOVED
        for space in self._threads.spaces():
            self._exchange_in(space, former, program)

    def _carry_returns_over(self, former: InsertedProgram, program: InsertedProgram) -> None:
        """Transfer the pending returns of functions that both programs probe to the new one."""
        jumps: dict[tuple[tuple[int, int], int], _Owner] = {}
        for key, sites in program.known.items():
            for site in sites.sites:
                if site.role is Role.JUMP:
                    jumps.setdefault((key[:2], site.offset), (site, program.probe(site.probe)))
        for thread in self._threads.values():
            kept = []
            for pending in thread.returns:
                if pending.probe.program is not former:
                    kept.append(pending)
                    continue
                match jumps.get((pending.probe.file, pending.site.offset)):
                    case site, probe if probe is not None and probe.is_active:
                        pending.site, pending.probe = site, probe
                        kept.append(pending)
            thread.returns = kept

    def _exchange_in(self, space: AddressSpace, former: InsertedProgram, program: InsertedProgram) -> None:
        threads = [t for t in self._threads.in_space(space) if t.pid in program.reach.pids]
        if not threads or not space.is_open:
            return
        for probe in [probe for probe in space.by_probe if probe.program is former]:
            del space.by_probe[probe]
        gone = self._exchange_uses(space, former, program, threads)
        space.lower_unneeded()
        for breakpoint_ in gone:
            space.withdraw(breakpoint_)
        tell_lowered(self._connection, space)
        for pid in space.pids if gone else ():
            self._connection.send(Removed(pid, tuple(b.address for b in gone)))
        active = self._use_breakpoints(space, program)
        active |= self._watchpoints.pass_on(space, former, self._modules.watchpoints(space, program))
        for probe in active:
            probe.state = ProbeState.ACTIVE
        if active:
            numbers = tuple(sorted(probe.number for probe in active))
            self._connection.send(ProbeStatus(program.number, numbers, threads[0].pid, ProbeState.ACTIVE))
        self._modules.place_missing(space, threads[0], program)

    def _exchange_uses(
        self, space: AddressSpace, former: InsertedProgram, program: InsertedProgram, threads: Sequence[Thread]
    ) -> list[Breakpoint]:
        """
        Register the breakpoints of ``former`` for ``program``, where that has a probepoint or awaits a return.

        Return the breakpoints that are not needed any more. ``threads`` are all threads of the space.
        """
        owners = self._owners(space, program)
        returns = [p for thread in threads for p in thread.returns if p.probe.program is program]
        for breakpoint_ in (*space.breakpoints.values(), *space.awaited):
            breakpoint_.drop_program(former)
            breakpoint_.waiting |= {p.probe for p in returns if p.address == breakpoint_.address}
        for breakpoint_ in space.breakpoints.values():
            for site, owner in owners.get(breakpoint_.address, ()):
                breakpoint_.add(program, site, owner)
        return [breakpoint_ for breakpoint_ in space.breakpoints.values() if not breakpoint_.is_needed]

    def _use_breakpoints(self, space: AddressSpace, program: InsertedProgram) -> set[Probe]:
        """Start using the breakpoints of a program, unless jumps will replace them. Return its probepoints."""
        active: set[Probe] = set()
        native = self._modules.native_probes(space, program)
        for breakpoint_ in space.breakpoints.values():
            mine = {probe for probe in breakpoint_.probes() if probe.program is program}
            if mine:
                space.register(breakpoint_)
                if self._is_left_out(space, breakpoint_, mine, native):
                    space.restore_byte(breakpoint_.address, breakpoint_.original)
                    space.unwritten.add(breakpoint_.address)
                else:
                    note_placement(space, breakpoint_, mine)
                active |= mine
        return active

    def _is_left_out(
        self, space: AddressSpace, breakpoint_: Breakpoint, mine: set[Probe], native: frozenset[int]
    ) -> bool:
        """
        Return whether no breakpoint must be written, because a jump will replace it and all threads can wait for that.

        ``mine`` are the new program's probepoints, ``native`` the numbers of those for which jumps are requested.
        """
        others = {(probe.program.number, probe.number) for probe in breakpoint_.probes() - mine}
        known = space.patches.known_at([breakpoint_.address]) if others else []
        if others and not any(others <= jump.probes_at(breakpoint_.address) for jump in known):
            return False
        return awaits_jump(breakpoint_, native, mine) and self._jump_absence.is_still(space)

    def _owners(self, space: AddressSpace, program: InsertedProgram) -> dict[int, list[_Owner]]:
        """
        Return the sites of a program in an address space, each with its probepoint, keyed by run-time address.

        The probepoint is None for a breakpoint that the engine itself needs.
        """
        owners: dict[int, list[_Owner]] = {}
        for site, address, _ in self._modules.places(space, program):
            probe = program.probe(site.probe)
            if probe is None or probe.is_active:
                owners.setdefault(address, []).append((site, probe))
        return owners
