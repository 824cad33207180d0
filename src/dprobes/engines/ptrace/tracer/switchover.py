"""
The switch-over from a program to another one, without a moment in which a hit is lost.

Handlers run here, one at a time. So the exchange happens between two hits: what threads have run into, and nobody has
looked at yet, is for the new program. A hit whose instruction may or may not have been executed is settled before, with
all threads stopped: it is counted, or given up, and then the thread hits again. Breakpoints that both need stay, and
other programs notice nothing.

Whatever can be found out to be wrong with the new program is found out before anything is changed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.engines.hits.lifecycle import HitState
from dprobes.engines.ptrace.reports import InPlace, NotInserted, ProbeStatus, Removed, Replaced
from dprobes.engines.ptrace.sites import Role
from dprobes.engines.ptrace.tracer.hitcounter import has_hit_of
from dprobes.engines.ptrace.tracer.insertions import prepared
from dprobes.engines.ptrace.tracer.placement import awaits_jump, note_placement, note_written
from dprobes.engines.ptrace.tracer.removal import tell_lowered
from dprobes.engines.ptrace.tracer.state import ThreadState
from dprobes.errors import EngineError
from dprobes.resolve.probestate import ProbeState

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.ptrace.requests import Replace
    from dprobes.engines.ptrace.sites import Site
    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.breakpoints import Breakpoint
    from dprobes.engines.ptrace.tracer.hitcounter import Settler
    from dprobes.engines.ptrace.tracer.modulebreakpoints import ModuleBreakpoints
    from dprobes.engines.ptrace.tracer.native.jumpabsence import JumpAbsence
    from dprobes.engines.ptrace.tracer.programs import InsertedProgram, Probe
    from dprobes.engines.ptrace.tracer.state import Thread, TracerState
    from dprobes.engines.ptrace.tracer.stopper import Stopper
    from dprobes.engines.ptrace.tracer.watchpoints import Watchpoints

__all__ = ["Replacer"]

_Owner = tuple["Site", "Probe | None"]
"""What a breakpoint is for: a site, and its probepoint unless it is the engine's own."""


class Replacer:
    """The exchange of a program for another one."""

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
        """Exchange a program, or tell the client why not; then nothing has changed. ``go_on`` handles stops."""
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
                for thread in held:
                    if thread.state is ThreadState.STOPPED:
                        with contextlib.suppress(ProcessLookupError):
                            self._stopper.release(thread)
        for space in spaces:
            note_written(space, program)

    # Bringing hits to their end

    def _stop_all(self) -> list[Thread]:
        threads = list(self._threads.values())
        for thread in threads:
            if thread.state is ThreadState.LISTENING and thread.hit.state is not HitState.NONE:
                # It can be looked at in a real stop only; an interrupt ends the listening, and the group stop lasts.
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
            # One that cannot stop now will execute the instruction by itself.
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
        """Let the new program have the returns that are still to come of functions that both probe."""
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
        owners = self._owners(space, program)
        for probe in [probe for probe in space.by_probe if probe.program is former]:
            del space.by_probe[probe]
        gone = []
        for breakpoint_ in (*space.breakpoints.values(), *space.awaited):
            breakpoint_.drop_program(former)
            breakpoint_.waiting |= {
                p.probe
                for t in threads
                for p in t.returns
                if p.address == breakpoint_.address and p.probe.program is program
            }
        for breakpoint_ in space.breakpoints.values():
            for site, owner in owners.get(breakpoint_.address, ()):
                breakpoint_.add(program, site, owner)
            if not breakpoint_.is_needed:
                gone.append(breakpoint_)
        space.lower_unneeded()
        for breakpoint_ in gone:
            space.withdraw(breakpoint_)
        tell_lowered(self._connection, space)
        for pid in space.pids if gone else ():
            self._connection.send(Removed(pid, tuple(b.address for b in gone)))
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
        active |= self._watchpoints.pass_on(space, former, self._modules.watchpoints(space, program))
        for probe in active:
            probe.state = ProbeState.ACTIVE
        if active:
            numbers = tuple(sorted(probe.number for probe in active))
            self._connection.send(ProbeStatus(program.number, numbers, threads[0].pid, ProbeState.ACTIVE))
        self._modules.place_missing(space, threads[0], program)

    def _is_left_out(
        self, space: AddressSpace, breakpoint_: Breakpoint, mine: set[Probe], native: frozenset[int]
    ) -> bool:
        """Return whether a breakpoint is needed for nothing, as a jump comes, for which all threads can wait."""
        others = {(probe.program.number, probe.number) for probe in breakpoint_.probes() - mine}
        known = space.patches.known_at([breakpoint_.address]) if others else []
        if others and not any(others <= jump.probes_at(breakpoint_.address) for jump in known):
            return False
        return awaits_jump(breakpoint_, native, mine) and self._jump_absence.is_still(space)

    def _owners(self, space: AddressSpace, program: InsertedProgram) -> dict[int, list[_Owner]]:
        """Return what a program needs breakpoints for, by their addresses."""
        owners: dict[int, list[_Owner]] = {}
        for site, address, _ in self._modules.places(space, program):
            probe = program.probe(site.probe)
            if probe is None or probe.is_active:
                owners.setdefault(address, []).append((site, probe))
        return owners
