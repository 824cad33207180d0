"""
Putting a program in the place of another one, without a moment in which a hit is lost.

Handlers run here, one at a time. So the exchange happens between two hits: what threads have run into, and nobody has
looked at yet, is for the new program. A hit whose instruction may or may not have been executed is settled before, with
all threads stopped: it is counted, or given up, and then the thread hits again. Breakpoints that both need stay.

Whatever can be found out to be wrong with the new program is found out before anything is changed.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.engines.base import ProbeState
from dprobes.engines.ptrace.emulate import is_emulated
from dprobes.engines.ptrace.processes import ThreadState
from dprobes.engines.ptrace.programs import InsertedProgram
from dprobes.engines.ptrace.slots import Placement
from dprobes.engines.ptrace.wire import InPlace, NotReplaced, ProbeStatus, Removed, Replaced, Role
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from dprobes.engines.ptrace.connection import Connection
    from dprobes.engines.ptrace.context import ThreadContext
    from dprobes.engines.ptrace.coredump import CoreDumps
    from dprobes.engines.ptrace.family import Family
    from dprobes.engines.ptrace.hits import HitHandler
    from dprobes.engines.ptrace.modules import ModuleWatcher
    from dprobes.engines.ptrace.probes import Probe
    from dprobes.engines.ptrace.processes import AddressSpace, Breakpoint, Thread
    from dprobes.engines.ptrace.stopping import Stopper
    from dprobes.engines.ptrace.watching import Watching
    from dprobes.engines.ptrace.wire import Replace, Site

__all__ = ["Replacer"]

_Owner = tuple["Site", "Probe | None"]
"""What a breakpoint is for: a site, and its probepoint unless it is the engine's own."""


class Replacer:
    """Exchange the program of a tracer."""

    def __init__(
        self,
        connection: Connection,
        context: ThreadContext,
        family: Family,
        modules: ModuleWatcher,
        stopper: Stopper,
        watching: Watching,
        hits: HitHandler,
        dumps: CoreDumps,
    ) -> None:
        self._connection = connection
        self._context = context
        self._family = family
        self._modules = modules
        self._stopper = stopper
        self._watching = watching
        self._hits = hits
        self._dumps = dumps

    def __call__(self, message: Replace) -> None:
        """Exchange the program, or tell the client why not; then nothing has changed."""
        try:
            ledger = self._connection.open(message.start.ledger)
            program = InsertedProgram.of(replace(message.start, ledger=ledger), self._modules.program)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            self._connection.send(NotReplaced(f"the tracer cannot share memory with dprobes: {reason}"))
            return
        except EngineError as error:
            self._connection.send(NotReplaced(error.message))
            return
        for key, sites in message.known.items():
            program.known[key] = sites
            self._modules.enter(program, sites, key)
        if not self._modules.complete(program, self._spaces()):
            self._connection.send(NotReplaced("dprobes was stopped, and could not be asked about the program's files"))
            return
        obstacle = self._modules.obstacle_to(program, self._spaces())
        if obstacle is not None:
            self._connection.send(NotReplaced(obstacle=obstacle))
            return
        held = self._stop_all()
        try:
            self._settle_all()
            self._hits.finish()
            self._connection.send(Replaced(program.number))
            self._exchange(program)
            self._dumps.directory = message.start.core_directory
            self._connection.send(InPlace(program.number))
        finally:
            for thread in held:
                if thread.state is ThreadState.STOPPED:
                    with contextlib.suppress(ProcessLookupError):
                        self._stopper.release(thread)

    def _spaces(self) -> list[AddressSpace]:
        return list(self._family.spaces())

    # Bringing hits to their end

    def _stop_all(self) -> list[Thread]:
        threads = list(self._family.threads.values())
        for thread in threads:
            if thread.state is ThreadState.LISTENING and (thread.pending or thread.unfinished):
                # It can be looked at in a real stop only; an interrupt ends the listening, and the group stop lasts.
                thread.state = ThreadState.RUNNING
        return self._stopper.stop(threads)

    def _settle_all(self) -> None:
        for thread in self._family.threads.values():
            if thread.pending is None and thread.unfinished is None:
                continue
            status = self._stopper.deferred.get(thread.tid)
            try:
                if thread.state is ThreadState.STOPPED or status is not None:
                    self._hits.settle(thread, status)
            except OSError:
                pass  # killed meanwhile
            # What is left of those that cannot stop now: they will execute the instruction by themselves.
            self._hits.count_now(thread)

    # The exchange

    def _exchange(self, program: InsertedProgram) -> None:
        former = self._modules.exchange(program)
        self._context.use(program.ledger.variables, program.global_variables, program.extensions)
        self._carry_returns_over(program)
        for probe in former.probes.values():
            probe.state = ProbeState.REMOVED
        for space in self._spaces():
            self._exchange_in(space, program)

    def _carry_returns_over(self, program: InsertedProgram) -> None:
        """Let the new program have the returns that are still to come of functions that both probe."""
        jumps: dict[tuple[tuple[int, int], int], _Owner] = {}
        for key, sites in program.known.items():
            for site in sites.sites:
                if site.role is Role.JUMP:
                    jumps.setdefault((key[:2], site.offset), (site, program.probe(site.probe)))
        for thread in self._family.threads.values():
            kept = []
            for pending in thread.returns:
                match jumps.get((pending.probe.file, pending.site.offset)):
                    case site, probe if probe is not None and probe.is_active:
                        pending.site, pending.probe = site, probe
                        kept.append(pending)
            thread.returns = kept

    def _exchange_in(self, space: AddressSpace, program: InsertedProgram) -> None:
        threads = [t for t in self._family.threads.values() if t.space is space]
        if not threads or not space.is_open:
            return
        owners = self._owners(space, program)
        active: set[Probe] = set()
        space.by_probe.clear()
        for breakpoint_ in space.breakpoints.values():
            _give_to(breakpoint_, owners.get(breakpoint_.address, []))
        for breakpoint_ in (*space.breakpoints.values(), *space.awaited):
            breakpoint_.waiting = {p.probe for t in threads for p in t.returns if p.address == breakpoint_.address}
        gone = [breakpoint_ for breakpoint_ in space.breakpoints.values() if not breakpoint_.is_needed]
        for breakpoint_ in gone:
            space.withdraw(breakpoint_)
        for pid in space.pids if gone else ():
            self._connection.send(Removed(pid, tuple(b.address for b in gone)))
        for breakpoint_ in space.breakpoints.values():
            space.register(breakpoint_)
            active |= breakpoint_.probes()
            _note_placement(space, breakpoint_)
        active |= self._watching.pass_on(space, self._modules.watchpoints(space, program))
        for probe in active:
            probe.state = ProbeState.ACTIVE
        if active:
            numbers = tuple(sorted(probe.number for probe in active))
            self._connection.send(ProbeStatus(numbers, threads[0].pid, ProbeState.ACTIVE))
        self._modules.place_missing(space, threads[0])

    def _owners(self, space: AddressSpace, program: InsertedProgram) -> dict[int, list[_Owner]]:
        """Return what a program needs breakpoints for, by their addresses."""
        owners: dict[int, list[_Owner]] = {}
        for site, address, _ in self._modules.places(space, program):
            probe = program.probe(site.probe)
            if probe is None or probe.is_active:
                owners.setdefault(address, []).append((site, probe))
        return owners


def _give_to(breakpoint_: Breakpoint, owners: list[_Owner]) -> None:
    """Use a breakpoint for others than before; of the instruction there is known what was known."""
    known = breakpoint_.site
    breakpoint_.probe = None
    breakpoint_.exits = []
    breakpoint_.own = set()
    for site, probe in owners:
        breakpoint_.add(replace(site, original=known.original, emulation=known.emulation, copy=known.copy), probe)


def _note_placement(space: AddressSpace, breakpoint_: Breakpoint) -> None:
    """Note where the instruction of a breakpoint is executed that was there before."""
    slot = space.slots.by_site.get((breakpoint_.address, breakpoint_.site.original))
    placement = slot.placement if slot is not None else None
    if is_emulated(breakpoint_.site.emulation):
        placement = Placement.EMULATED
    if placement is not None:
        for probe in breakpoint_.probes():
            probe.counts.note(placement)
