"""
Jumps in the place of breakpoints, on the client's request, and breakpoints again where jumps cannot stay.

The client plans and generates code; here it is written. A breakpoint is always there first: so a jump is nothing but a
faster way to the same handler, and whatever it is not good for is left to the breakpoint. All threads of the address
space are stopped when code changes, none of them at the place or in the middle of a hit there.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.restorerwire import JumpsPlanned
from dprobes.engines.ptrace.sites import Role
from dprobes.engines.ptrace.tracer.breakpoints import INT3
from dprobes.engines.ptrace.tracer.injection import InjectionError, may_inject
from dprobes.engines.ptrace.tracer.nativecalls import add_calls
from dprobes.engines.ptrace.tracer.nativememory import map_code, share_memory
from dprobes.engines.ptrace.tracer.nativeremoval import is_outside
from dprobes.engines.ptrace.tracer.state import ThreadGoneError
from dprobes.engines.ptrace.wire import MemoryReleased, MemoryShared, PatchSites, ShareMemory, SitesPatched
from dprobes.errors import reason_of
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.breakpoints import Breakpoint
    from dprobes.engines.ptrace.tracer.entries import Entry
    from dprobes.engines.ptrace.tracer.patches import NativeMemory
    from dprobes.engines.ptrace.tracer.programs import Probe
    from dprobes.engines.ptrace.tracer.state import Thread, TracerState
    from dprobes.engines.ptrace.tracer.stopper import Stopper
    from dprobes.engines.ptrace.wire import ReleaseMemory, SitePatch

__all__ = ["Patcher"]

_GONE = "the process is not traced any more"
_ANOTHER = "the process executes another program"
_BUSY = "no thread of the process can make a system call for it now"
_TRIES = 20
"""How often threads are looked at that may be in handlers: of a program that does little else many are."""
_NOT_ALLOWED = "the process may not be made to do system calls"

_FIRST_WAIT, _TRIES = 0.005, 10
"""Seconds until a request is tried again, which become twice as many each time, and how often that is done."""


class _Later(NamedTuple):
    """A request, when it is to be tried again, and how often it was."""

    when: float
    message: ShareMemory | PatchSites
    tries: int


class Patcher:
    """The writer of jumps."""

    def __init__(self, state: TracerState, stopper: Stopper) -> None:
        self._connection = state.connection
        self._threads = state.threads
        self._stopper = stopper
        self._later: list[_Later] = []
        """What was asked at a moment when no thread could make a system call."""

    def look_after(self) -> float | None:
        """Try again what could not be done at once; return in how many seconds to ask again, None if there is none."""
        if not self._later:
            return None
        now = time.monotonic()
        due = [each for each in self._later if each.when <= now]
        self._later = [each for each in self._later if each.when > now]
        for _, message, tries in due:
            if isinstance(message, ShareMemory):
                self.share(message, tries)
            else:
                self.patch(message, tries)
        return max(0, min((each.when for each in self._later), default=now) - now) if self._later else None

    def _try_later(self, message: ShareMemory | PatchSites, tries: int) -> bool:
        """Note what is to be tried again, after a while that becomes longer; return False if it was tried enough."""
        if tries < _TRIES:
            self._later.append(_Later(time.monotonic() + _FIRST_WAIT * 2**tries, message, tries + 1))
        return tries < _TRIES

    def share(self, message: ShareMemory, tries: int = 0) -> None:
        """Let a process map the client's memory, and say where."""
        number, pid = message.program, message.pid
        with self._held(pid) as held:
            known = held[0].space.patches.memories.get(number) if held else None
            if known is not None:  # a copy of its parent's
                self._connection.send(MemoryShared(number, pid, known.page, known.region))
                return
            if (problem := self._obstacle(pid, held)) is None:
                try:
                    descriptor = self._connection.open(message.descriptor)
                    try:
                        memory = share_memory(held[0], descriptor, message.size, message.calls)
                    finally:
                        os.close(descriptor)
                except InjectionError as error:
                    problem = str(error)
                except OSError as error:
                    problem = reason_of(error)
                else:
                    held[0].space.patches.memories[number] = memory
                    self._tell_restorer(held[0].space, memory)
                    self._connection.send(MemoryShared(number, pid, memory.page, memory.region))
                    return
        if problem is _BUSY and self._try_later(message, tries):
            return
        self._write_breakpoints(pid)
        self._connection.send(MemoryShared(number, pid, problem=problem))

    def _write_breakpoints(self, pid: int) -> None:
        """Write the breakpoints of a process in whose place no jumps come."""
        for thread in self._threads.of_process(pid)[:1]:
            thread.space.write_unwritten()

    def patch(self, message: PatchSites, tries: int = 0) -> None:
        """Write code and jumps into a process, and say which."""
        number, pid = message.program, message.pid
        done: set[int] = set()
        refused: list[tuple[int, str]] = []
        with self._held(pid) as held:
            problem = self._obstacle(pid, held)
            if held and not _is_current(held[0], message):
                refused = [(probe, _ANOTHER) for patch in message.patches for probe in patch.probes]
                self._connection.send(SitesPatched(number, pid, (), tuple(refused), is_outdated=True))
                return
            if problem is None:
                space = held[0].space
                self._tell_restorer(space, space.patches.memories[number], message.pages, message.patches)
                try:
                    _write_code(held[0], message)
                except InjectionError as error:
                    problem = str(error)
                except OSError as error:
                    problem = reason_of(error)
            if problem is _BUSY and self._try_later(message, tries):
                return
            if problem is not None:
                refused = [(probe, problem) for patch in message.patches for probe in patch.probes]
            else:
                space.patches.fixups.update(message.fixups)
                for patches in _groups(message.patches):
                    probes = {probe for patch in patches for probe in patch.probes}
                    why = self._write_all(number, space, patches)
                    if why is None:
                        done |= probes
                    else:
                        refused += [(probe, why) for probe in sorted(probes)]
            self._write_breakpoints(pid)
        self._connection.send(SitesPatched(number, pid, tuple(sorted(done)), tuple(refused)))

    def _tell_restorer(
        self,
        space: AddressSpace,
        memory: NativeMemory,
        pages: tuple[tuple[int, int], ...] = (),
        patches: tuple[SitePatch, ...] = (),
    ) -> None:
        for pid in space.pids:
            self._connection.tell_restorer(JumpsPlanned(pid, memory, pages, patches))

    def _write_all(self, program: int, space: AddressSpace, patches: Sequence[SitePatch]) -> str | None:
        """Write jumps that belong together; return why not, with nothing changed."""
        written: list[int] = []
        for patch in patches:
            if patch.site in space.patches.by_site:
                continue
            if (why := self._write(program, space, patch)) is not None:
                space.patches.restore(space.memory, written)
                space.renew()
                return why
            written.append(patch.site)
        for site in written:
            _move_calls(program, space, site)
        return None

    def _write(self, program: int, space: AddressSpace, patch: SitePatch) -> str | None:
        """Write one jump; return why not."""
        breakpoint_ = space.breakpoints.get(patch.site)
        if breakpoint_ is None:
            return "there is no breakpoint any more"
        if breakpoint_.waiting or breakpoint_.own or any(site.role is Role.JUMP for _, site in breakpoint_.exits):
            return "the breakpoint is for something else as well"
        if any(probe.program.number != program for probe in breakpoint_.probes()):
            return "several programs have it"
        if {probe.number for probe in breakpoint_.probes()} != set(patch.probes):
            return "the breakpoint is for other probepoints by now"
        for thread in self._threads.in_space(space):
            # Others that have run into the breakpoint stand where they can go on, with it or without.
            if thread.hit.is_late and thread.hit.breakpoint is breakpoint_:
                return "a thread sleeps in the instruction"
        try:
            found = space.read(patch.site, len(patch.rest))
            if found != INT3 + patch.rest[1:]:
                return "memory holds something else than the file"
            space.patches.write(space.memory, patch)
        except OSError as error:
            return reason_of(error)
        return None

    def _obstacle(self, pid: int, held: list[Thread]) -> str | None:
        threads = self._threads.of_process(pid)
        if not threads:
            return _GONE
        if not held:
            return _BUSY
        space = held[0].space
        if not space.is_open or space.shared_with:
            return _GONE
        return None if may_inject(held[0]) else _NOT_ALLOWED

    @contextlib.contextmanager
    def _held(self, pid: int) -> Iterator[list[Thread]]:
        """
        Hold all threads that run in the memory of a process; give one that can make system calls now, if there is any.

        That is one that has stopped for nothing else, or one that has just run into a breakpoint: its trap is taken
        already, and it stands where it can go on.
        """
        threads = self._threads.of_process(pid)
        held = self._stopper.stop(self._threads.in_space(threads[0].space)) if threads else []
        ready: list[Thread] = []
        for thread in held:
            with contextlib.suppress(ProcessLookupError, ThreadGoneError):
                self._stopper.waits.hide_interruption(thread)
                ready.append(thread)
                break
        if not ready:
            ready = [thread for thread in threads if thread.trapped and thread.tid in self._stopper.deferred][:1]
        try:
            yield ready
        finally:
            for thread in held:
                with contextlib.suppress(ProcessLookupError):
                    self._stopper.release(thread)

    def restore(self, space: AddressSpace, sites: Collection[int] | None = None) -> None:
        """Put breakpoints back in the place of jumps, of all or of those at some ``sites`` and what they belong to."""
        mine = space.patches.bound_to(list(space.patches.by_site) if sites is None else sites)
        if not mine or not space.is_open:
            return
        held = self._stopper.stop(self._threads.in_space(space))
        try:
            space.patches.restore(space.memory, mine)
            space.renew()
        finally:
            for thread in held:
                with contextlib.suppress(ProcessLookupError):
                    self._stopper.release(thread)

    def release(self, message: ReleaseMemory) -> None:
        """
        Release what handlers of a program have left without an end, and say whether that could be done.

        A handler that was under way has ended, or was left, once its thread has been seen elsewhere. The words may be
        taken again meanwhile: they need a moment in which no thread is in a handler.
        """
        spaces = [s for s in self._threads.spaces() if s.is_open and message.program in s.patches.memories]
        waiting: set[int] | None = None
        for _ in range(_TRIES):
            inside = self._inside(message, spaces)
            waiting = inside if waiting is None else waiting & inside
            if not waiting and not (inside and message.words):
                break
        self._connection.send(MemoryReleased(message.program, not waiting))

    def _inside(self, message: ReleaseMemory, spaces: Sequence[AddressSpace]) -> set[int]:
        """Return the threads that may be in a handler just now; if there are none, the words of a message become 0."""
        threads = {space: list(self._threads.in_space(space)) for space in spaces}
        held = self._stopper.stop([thread for mine in threads.values() for thread in mine])
        try:
            inside = {t.tid for space, mine in threads.items() for t in mine if not is_outside(space, t)}
            for space in spaces[:1] if not inside else ():
                region = space.patches.memories[message.program].region
                for offset, size in message.words:
                    with contextlib.suppress(OSError):
                        space.write(region + offset, bytes(size))
            return inside
        finally:
            for thread in held:
                with contextlib.suppress(ProcessLookupError):
                    self._stopper.release(thread)

    def keep_call(self, thread: Thread, breakpoint_: Breakpoint, probe: Probe, frame: int, entry: Entry) -> bool:
        """
        Keep a call in the process that has begun at a breakpoint, if a jump stands in its place by now.

        So it is with a thread that has run into the breakpoint before. Return False if the tracer is to keep it.
        """
        space = thread.space
        memory = space.patches.memories.get(probe.program.number)
        if breakpoint_.address not in space.patches.by_site or memory is None or memory.calls is None:
            return False
        with self._stopper.others_stopped(space, thread):
            add_calls(space, memory, probe, [(frame, entry)])
        return True

    def give_way(self, space: AddressSpace, address: int) -> None:
        """Take the jumps away that do not bear a breakpoint at an address."""
        if sites := space.patches.relying_on(address):
            self.restore(space, sites)


def _groups(patches: Iterable[SitePatch]) -> Iterator[list[SitePatch]]:
    """Iterate over the patches that belong together."""
    bound: dict[tuple[int, int], list[SitePatch]] = {}
    for patch in patches:
        if patch.group is None:
            yield [patch]
        else:
            bound.setdefault(patch.group, []).append(patch)
    yield from bound.values()


def _move_calls(program: int, space: AddressSpace, site: int) -> None:
    """Let handlers in the process know of the calls that the tracer has seen begin at a place, and that go on."""
    memory = space.patches.memories.get(program)
    if memory is None or memory.calls is None:
        return
    for probe, _ in space.breakpoints[site].entries:
        add_calls(space, memory, probe, space.entries.take_all(probe))


def _write_code(thread: Thread, message: PatchSites) -> None:
    """Map pages and write code to them; raise ``InjectionError`` or OSError if that is not possible."""
    if message.pages:
        map_code(thread, message.pages)
    for address, code in message.code:
        if thread.space.write(address, code) < len(code):
            raise InjectionError(f"there is no memory for code at {address:#x}")


def _is_current(thread: Thread, message: PatchSites) -> bool:
    """Return whether code was made for the program that a thread executes."""
    memory = thread.space.patches.memories.get(message.program)
    return memory is not None and memory.page == message.page
