"""
Removal of probepoints while the processes run, and of all the tracer's changes to their memory.

Memory that was changed in a process is restored, and memory that was mapped is unmapped. A page of code that had a
breakpoint is a private copy of the file's page, even after the byte is restored. madvise(MADV_DONTNEED), which the
process itself must call, discards the copy. If the content then differs from before, another tool had changed the page,
too, and its change is written again.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer.call_injection import (
    MADVISE,
    MUNMAP,
    InjectionError,
    injecting,
    may_inject,
    take_out_gadgets,
)
from dprobes.engines.ptrace.tracer.native.thread_places import is_left, unmap_native
from dprobes.engines.ptrace.tracer.placed_breakpoints import Slots
from dprobes.engines.ptrace.tracer.tracer_state import ThreadGoneError
from dprobes.engines.ptrace.tracer_messages import Lowered, ProbeStatus, Removed
from dprobes.resolve.probepoints import ProbeState
from dprobes.target.process_maps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.call_injection import Call
    from dprobes.engines.ptrace.tracer.client_connection import Connection
    from dprobes.engines.ptrace.tracer.native.handler_ends import JumpAbsence
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
    from dprobes.engines.ptrace.tracer.thread_watchpoints import Watchpoints
    from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram, Probe
    from dprobes.engines.ptrace.tracer.tracer_state import Thread, TracerState

__all__ = ["Remover", "give_back_all", "give_back_pages", "tell_lowered"]


class Remover:
    """Remover of probepoints, with their breakpoints and watchpoints, from all address spaces."""

    def __init__(
        self, state: TracerState, stopper: Stopper, watchpoints: Watchpoints, jump_absence: JumpAbsence
    ) -> None:
        self._jump_absence = jump_absence
        self._connection = state.connection
        self._threads = state.threads
        self._stopper = stopper
        self._watchpoints = watchpoints

    def withdraw(self, probe: Probe) -> list[tuple[AddressSpace, list[int]]]:
        """
        Remove a probepoint that has become inactive, and report it.

        Return the address spaces with the addresses of its breakpoints that have no other purpose. No thread has to
        stop for the change of a byte. A thread that has just run into the breakpoint finds the address in ``former``.
        """
        self._watchpoints.withdraw(probe)
        emptied = []
        for space in self._threads.spaces():
            with self._jump_absence.in_space(space, [b.address for b in space.by_probe.get(probe, ())]):
                addresses = [b.address for b in space.drop(probe)]
            tell_lowered(self._connection, space)
            if addresses:
                emptied.append((space, addresses))
                for pid in space.pids:
                    self._connection.send(Removed(pid, tuple(addresses)))
        self._connection.send(ProbeStatus(probe.program.number, (probe.number,), 0, probe.state))
        return emptied

    def withdraw_program(self, program: InsertedProgram) -> None:
        """Remove all of a program's probepoints without a report, and drop pages that were changed only for them."""
        for probe in program.probes.values():
            if probe.is_active:
                probe.state = ProbeState.REMOVED
        emptied = {}
        for space in self._threads.spaces():
            self._watchpoints.withdraw_program(space, program)
            with self._jump_absence.in_space(space):
                addresses = [b.address for b in space.drop_program(program)] if space.is_open else []
            tell_lowered(self._connection, space)
            if addresses:
                emptied[space] = addresses
                for pid in space.pids:
                    self._connection.send(Removed(pid, tuple(addresses)))
        for thread in self._threads.values():
            thread.variables.pop(program, None)
        for space, addresses in emptied.items():
            self._give_back(space, addresses)

    def remove(self, probes: Iterable[Probe], state: ProbeState = ProbeState.REMOVED) -> None:
        """
        Remove probepoints, and drop pages of code that were changed only for them.

        ``state`` is the new state. Probepoints in the state REMOVED are skipped.
        """
        emptied: dict[AddressSpace, list[int]] = {}
        for probe in probes:
            if probe.state is not ProbeState.REMOVED:
                probe.state = state
                for space, addresses in self.withdraw(probe):
                    emptied.setdefault(space, []).extend(addresses)
        for space, addresses in emptied.items():
            self._give_back(space, addresses)

    def _give_back(self, space: AddressSpace, addresses: list[int]) -> None:
        """
        Drop the private copies of the pages at ``addresses``, which have no breakpoints, by injected calls.

        If no thread can make them now, the copies stay until the process is detached.
        """
        held = self._stopper.stop(self._threads.in_space(space))
        for thread in held[:1]:
            try:
                self._stopper.waits.hide_interruption(thread)
                give_back_pages(space, thread, addresses)
            except ThreadGoneError as gone:
                self._stopper.defer(thread.tid, gone.status)
                held.remove(thread)
            except ProcessLookupError:
                held.remove(thread)  # its end is not reported yet
        self._stopper.release_all(held)


def tell_lowered(connection: Connection, space: AddressSpace) -> None:
    """Report to the client which semaphores in an address space were lowered."""
    if lowered := space.take_lowered():
        for pid in space.pids:
            connection.send(Lowered(pid, lowered))


_DONTNEED = 4


def give_back_pages(space: AddressSpace, thread: Thread, addresses: Iterable[int]) -> None:
    """
    Drop, by system calls of ``thread``, private copies of the pages at ``addresses`` that have no breakpoint any more.

    It must have stopped without a signal to be delivered, and all others of the space must be stopped. If the process
    must not be made to execute system calls, the copies stay.
    """
    kept = {address & -PAGE_SIZE for address in space.breakpoints}
    pages = {address & -PAGE_SIZE for address in addresses} - kept
    if not pages or not may_inject(thread):
        return
    with contextlib.suppress(InjectionError), injecting(thread) as call:
        _drop(space, call, pages)


def give_back_all(space: AddressSpace, thread: Thread, threads: Sequence[Thread]) -> bool:
    """
    Drop and unmap all memory of the tracer, slots included, by system calls of ``thread``. No thread may be in a slot.

    ``threads`` are all threads of the space, which are stopped. Memory of handlers stays if one of them may return into
    it. Return False if another thread has to make the calls.
    """
    pages = {address & -PAGE_SIZE for address in space.former}
    for area in space.slots.areas:
        if area.former is not None:
            with contextlib.suppress(OSError):
                os.pwrite(space.memory, area.former[: area.used], area.start)
            pages |= {address & -PAGE_SIZE for address in range(area.start, area.start + area.used, PAGE_SIZE)}
    mapped = [area for area in space.slots.areas if area.former is None]
    has_native = bool(space.patches.memories) and is_left(space, threads)
    if not (pages or mapped or has_native) or not may_inject(thread):
        take_out_gadgets(space)
        return True
    try:
        with injecting(thread) as call:
            for area in mapped:
                call(MUNMAP[space.word_size], area.start, area.end - area.start)
            if has_native:
                unmap_native(space, call)
            space.slots = Slots()
            _drop(space, call, pages)
    except InjectionError:
        return False
    take_out_gadgets(space)
    return True


def _drop(space: AddressSpace, call: Call, pages: set[int]) -> None:
    for start, size in _runs(pages):
        try:
            before = os.pread(space.memory, size, start)
        except OSError:
            continue
        if call(MADVISE[space.word_size], start, size, _DONTNEED) < 0:
            continue  # the page is locked in memory
        with contextlib.suppress(OSError):
            after = os.pread(space.memory, size, start)
            for offset in range(0, size, PAGE_SIZE):
                if after[offset : offset + PAGE_SIZE] != before[offset : offset + PAGE_SIZE]:
                    os.pwrite(space.memory, before[offset : offset + PAGE_SIZE], start + offset)


def _runs(pages: set[int]) -> Iterator[tuple[int, int]]:
    """Iterate over runs of adjoining pages, (start, size) each."""
    start = end = -1
    for page in sorted(pages):
        if page != end:
            if start >= 0:
                yield start, end - start
            start = page
        end = page + PAGE_SIZE
    if start >= 0:
        yield start, end - start
