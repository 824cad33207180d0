"""
Where the threads of an address space stand when code changes under them.

A jump over several instructions must not be written while a thread is, or may come back, behind its first byte. One
that stands there goes on in the displaced code. Where one comes back to is on its stack, in the frame of a signal; then
the jump has to wait.

Nor may a thread be in the trampoline of an earlier jump, which would lead it back behind the first byte.

A thread that has stopped because we asked for it may have run into a breakpoint all the same: the kernel reports our
request first (``get_signal`` looks for JOBCTL_TRAP_MASK before it takes a synchronous signal). It stands behind the
byte of the breakpoint, which may be where the next instruction begins, and must be found there by its SIGTRAP.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from dprobes.engines.hits.lifecycle import HitState
from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.procfs import process_field
from dprobes.engines.linux.ptracecalls import Register
from dprobes.engines.ptrace.tracer.native.nativeremoval import is_outside
from dprobes.engines.ptrace.tracer.native.threadstacks import saved_parts, stacks_from
from dprobes.engines.ptrace.tracer.state import ThreadState
from dprobes.errors import TargetError
from dprobes.lazynamedtuple import NamedTuple
from dprobes.target.processmaps import mapping_finder, mappings_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.engines.ptrace.sitepatch import SitePatch
    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.state import Thread
    from dprobes.engines.ptrace.tracer.steps.slots import Slot

__all__ = ["ThreadPlaces", "stack_words"]

_WORD = 8

_SLEEPS = "a thread sleeps in the instruction"
_CANNOT_STOP = "a thread cannot be stopped"
_BUSY = "a thread is just executing the instruction"
_COMES_BACK = "a thread is in the code of another jump, which leads to what would be displaced"
_ON_STACK = "a signal handler returns into what would be displaced"
_SAVED = "a context that the program has saved may be in what would be displaced"


class _Place(NamedTuple):
    """Where a thread stands; ``is_trapping`` says that it has run into a breakpoint, and has not stopped for it."""

    thread: Thread
    pc: int
    slot: Slot | None
    is_trapping: bool = False


class ThreadPlaces:
    """
    The places of all threads of a space, read once; those that can stop must have.

    ``patches`` are the jumps that are to be written.
    """

    def __init__(self, space: AddressSpace, threads: Iterable[Thread], patches: Iterable[SitePatch]) -> None:
        self._space = space
        self._threads = list(threads)
        self._places: list[_Place] = []
        self._unknown = False
        inside = [original for patch in patches for original, _ in patch.moves]
        self._leading_back: dict[int, list[tuple[int, int]]] = {}
        """Where trampolines are, by where they lead back to."""
        for former in space.patches.displaced.values() if inside else ():
            if former.begin:
                self._leading_back.setdefault(former.back, []).append((former.begin, former.end))
        self._kept: frozenset[int] = frozenset()
        self._saved: frozenset[int] | None = frozenset()
        self._look(space)
        if inside and not self._unknown:
            pointers = [pointer for thread in self._threads for pointer in self._pointers(thread)]
            found = stack_words(space, self._threads[0].tid, pointers, min(inside), max(inside))
            self._unknown = found is None
            self._kept = found or frozenset()
        resumed = frozenset(original for patch in patches if not patch.traps for original, _ in patch.moves)
        if resumed and not self._unknown:
            self._saved = self._words_saved(resumed)

    def _words_saved(self, wanted: frozenset[int]) -> frozenset[int] | None:
        """Return which addresses are anywhere in the memory of the program; None if that is not known."""
        tid = self._threads[0].tid
        try:
            pointers = [pointer for thread in self._threads for pointer in self._pointers(thread)]
            parts = saved_parts(self._space, tid, mappings_of(tid), pointers)
            if parts is None:
                return None
            found = (wanted.intersection(memoryview(part[: len(part) & -_WORD]).cast("Q")) for part in parts)
            return frozenset().union(*found)
        except (TargetError, OSError):
            return None

    def _look(self, space: AddressSpace) -> None:
        registers = ptracecalls.Registers()
        for thread in self._threads:
            if thread.state in (ThreadState.ENDED, ThreadState.NEWBORN):
                continue
            try:
                ptracecalls.get_registers(thread.tid, registers)
            except OSError:
                self._unknown = True
                continue
            pc = registers[Register.RIP]
            slot = space.slots.holding(pc) if space.slots.by_address else None
            is_behind = pc - 1 in space.breakpoints or pc - 1 in space.former
            is_trapping = is_behind and not thread.trapped and _has_trap_pending(thread)
            self._places.append(_Place(thread, pc, slot, is_trapping))

    @staticmethod
    def _pointers(thread: Thread) -> Iterator[int]:
        registers = ptracecalls.Registers()
        try:
            ptracecalls.get_registers(thread.tid, registers)
        except OSError:
            return  # it has ended, or has not begun
        yield registers[Register.RSP]

    def obstacle(self, patch: SitePatch) -> str | None:
        """Return why a jump cannot be written now; that passes."""
        sites = patch.addresses
        for thread in self._threads:
            # Others that have run into the breakpoint stand where they can go on, with it or without.
            if thread.hit.is_late and thread.hit.breakpoint.address in sites:
                return _SLEEPS
            if thread.restarting in sites:
                return _SLEEPS
        if not patch.moves:
            return None
        if self._unknown:
            return _CANNOT_STOP
        if any(original in self._kept for original, _ in patch.moves):
            return _ON_STACK
        if not patch.traps and (self._saved is None or any(original in self._saved for original, _ in patch.moves)):
            return _SAVED
        ranges = [each for original, _ in patch.moves for each in self._leading_back.get(original, ())]
        if ranges and not all(is_outside(self._space, thread, ranges) for thread in self._threads):
            return _COMES_BACK
        for thread, pc, slot, is_trapping in self._places:
            if is_trapping and (pc - 1 in sites or patch.way_on(pc) != pc):
                return _BUSY
            if slot is None or slot.site not in sites or thread.trapped:
                continue
            if pc not in (slot.address, slot.end) or slot.trap or thread.hit.state is HitState.PENDING:
                return _BUSY
        return None

    def move(self, patch: SitePatch) -> None:
        """Let threads that stand in what a jump displaces go on in the copy; raise OSError for one that is gone."""
        for thread, pc, slot, _ in self._places:
            to: int | None = pc
            if thread.trapped:
                if thread.trapped in patch.addresses:
                    to = patch.way_on(thread.trapped)
            elif slot is not None:
                # What becomes of a pending hit shows in its slot.
                if slot.site in patch.addresses and thread.hit.state is not HitState.PENDING:
                    to = patch.copy_of(slot.site) if pc == slot.address else patch.way_on(slot.following)
            else:
                to = patch.way_on(pc)
            if to is not None and to != pc:
                ptracecalls.set_instruction_pointer(thread.tid, to)


def _has_trap_pending(thread: Thread) -> bool:
    pending = process_field(thread.tid, "SigPnd")
    return bool(pending) and bool(int(pending, 16) & 1 << signal.SIGTRAP - 1)


def stack_words(space: AddressSpace, tid: int, pointers: Iterable[int], first: int, last: int) -> frozenset[int] | None:
    """Return the words from ``first`` to ``last`` on the stacks of threads; None if one cannot be looked through."""
    try:
        stacks = stacks_from(space, mapping_finder(tid), pointers)
    except TargetError:
        return None
    if stacks is None:
        return None
    words = (memoryview(data[: len(data) & -_WORD]).cast("Q") for data in stacks)
    return frozenset(word for each in words for word in each if first <= word <= last)
