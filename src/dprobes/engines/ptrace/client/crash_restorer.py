"""
Restoration of the code of traced processes by another process, after the tracer was killed.

The kernel detaches a dead tracer's threads at once, and they continue with breakpoints in their code; a thread that
executes one gets a SIGTRAP. So the client has a list of breakpoints, and restores the bytes when the tracer dies.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer.placed_breakpoints import INT3, SEMAPHORE_SIZE
from dprobes.engines.ptrace.tracer_messages import (
    Kind,
    Lowered,
    MemoryCopied,
    PagesMapped,
    PagesUnmapped,
    Placed,
    Raised,
    Removed,
    Watched,
    load_message,
)
from dprobes.platform.linux.procfs import children_of, process_field, threads_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

    from dprobes.engines.ptrace.site_patches import Patches
    from dprobes.platform.x86.debug_registers import Watch

__all__ = ["CrashRestorer", "unreported_children"]

# Children that a killed tracer has not reported: copies of their parents, with all breakpoints.
#
# The kernel attaches the tracer to a child and stops the child before it runs. So, while the kernel holds the tracer at
# its exit, an unreported child is stopped and executes the same file as its parent.


def unreported_children(known: Iterable[int], tracer: int) -> Iterator[tuple[int, int]]:
    """Iterate over (child, parent) of unreported children of ``known`` processes that are traced by ``tracer``."""
    parents = tuple(known)
    for parent in parents:
        for child in sorted(_unknown_children(parent, set(parents))):
            if _tracer_of(child) == tracer and _executes_the_same(child, parent):
                yield child, parent


def _unknown_children(parent: int, known: Container[int]) -> set[int]:
    try:
        threads = threads_of(parent)
    except OSError:
        return set()
    return {child for tid in threads for child in children_of(parent, tid) if child not in known}


def _tracer_of(pid: int) -> int:
    try:
        return int(process_field(pid, "TracerPid") or 0)
    except OSError:
        return 0


def _executes_the_same(child: int, parent: int) -> bool:
    try:
        mine, theirs = os.stat(f"/proc/{child}/exe"), os.stat(f"/proc/{parent}/exe")
    except OSError:
        return False
    return (mine.st_dev, mine.st_ino) == (theirs.st_dev, theirs.st_ino)


class CrashRestorer:
    """List of a tracer's breakpoints, watchpoints and pages, which are removed after it was killed."""

    def __init__(self) -> None:
        self._breakpoints: dict[int, dict[int, int]] = {}
        self._watches: dict[int, tuple[Watch, ...]] = {}
        self._semaphores: dict[int, dict[int, set[int]]] = {}
        self._pages: dict[int, list[tuple[int, int]]] = {}
        """Ranges, (start, end) each, mapped for copies of instructions, by process."""

    @property
    def processes(self) -> set[int]:
        """Processes that have breakpoints."""
        return set(self._breakpoints)

    def note_all(self, frames: list[tuple[Kind, bytes]]) -> None:
        """Record the messages in ``frames``; frames with log records are ignored."""
        for kind, payload in frames:
            if kind is Kind.MESSAGE:
                self.note(load_message(payload))

    def note(self, message: object) -> None:
        """Record a tracer's message about breakpoints, semaphores, watchpoints or pages; others are ignored."""
        match message:
            case Placed(pid, breakpoints):
                self.placed(pid, breakpoints)
            case Removed(pid, addresses):
                self.removed(pid, addresses)
            case Raised(pid, semaphores):
                self.raised(pid, semaphores)
            case Lowered(pid, semaphores):
                for semaphore in semaphores:
                    self._semaphores.get(pid, {}).pop(semaphore, None)
            case Watched(pid, watches):
                self.watched(pid, watches)
            case PagesMapped(pid, pages):
                self._pages.setdefault(pid, []).extend(pages)
            case PagesUnmapped(pid, pages):
                self._pages[pid] = [each for each in self._pages.get(pid, ()) if each not in pages]
            case MemoryCopied(pid, parent):
                self._pages[pid] = list(self._pages.get(parent, ()))

    def placed(self, pid: int, breakpoints: tuple[tuple[int, int], ...]) -> None:
        """Record breakpoints (address, original byte) that the tracer is about to write."""
        self._breakpoints.setdefault(pid, {}).update(breakpoints)

    def removed(self, pid: int, addresses: tuple[int, ...]) -> None:
        """Record that the tracer removed breakpoints; empty ``addresses``: all of the process."""
        if not addresses:
            self._breakpoints.pop(pid, None)
            self._watches.pop(pid, None)
            self._semaphores.pop(pid, None)
            self._pages.pop(pid, None)
            return
        known = self._breakpoints.get(pid, {})
        for address in addresses:
            known.pop(address, None)

    def raised(self, pid: int, semaphores: tuple[tuple[int, int], ...]) -> None:
        """Record pairs of a semaphore that the tracer will increment and the address of a breakpoint that needs it."""
        known = self._semaphores.setdefault(pid, {})
        for semaphore, breakpoint_ in semaphores:
            known.setdefault(semaphore, set()).add(breakpoint_)

    def watched(self, pid: int, watches: tuple[Watch, ...]) -> None:
        """Record the watches of all threads of a process, in place of earlier ones."""
        import dprobes.engines.ptrace.client.outside_removal  # noqa: F401 - now, because there will be no time for it later

        self._watches[pid] = watches

    def clear(self) -> tuple[int, int]:
        """
        Remove the watchpoints from all threads.

        Return the number of threads that had any, and that may keep some.
        """
        watches = {pid: some for pid, some in self._watches.items() if some}
        self._watches.clear()
        if not watches:
            return 0, 0
        from dprobes.engines.ptrace.client.outside_removal import clear_processes

        return clear_processes(watches)

    def unmap(self) -> None:
        """Unmap the pages for copies of instructions, except where a thread may still return into them."""
        mapped, self._pages = self._pages, {}
        if not any(mapped.values()):
            return
        from dprobes.engines.ptrace.client.outside_removal import UNMAPPING_PATIENCE, unmap_left_memory
        from dprobes.engines.ptrace.site_patches import Patches

        until = time.monotonic() + UNMAPPING_PATIENCE  # one deadline for all processes, because the user waits
        for pid, pages in mapped.items():
            with contextlib.suppress(OSError):
                unmap_left_memory(pid, Patches(code={0: pages}), until)

    def restore(
        self,
        jumps: Mapping[int, Patches] | None = None,
        tracer: int = 0,
        adopt: Callable[[int, int], None] | None = None,
    ) -> int:
        """
        Restore the original bytes where memory has a breakpoint; return the number of restored breakpoints.

        ``jumps`` has the jumps that replace breakpoints, by process; they are not removed. ``tracer`` is the id of a
        tracer that is held at its exit, or 0. The memory of its unreported children is restored, too, and ``adopt`` is
        called with the ids of each such child and its parent.
        """
        # Another thread that waited for the tracer may be recording its last messages.
        known, self._breakpoints = self._breakpoints, {}
        semaphores, self._semaphores = self._semaphores, {}

        def restored_in(pid: int, origin: int) -> int:
            return _restore(pid, known[origin], semaphores.get(origin, {}), None if jumps is None else jumps.get(pid))

        restored = sum(restored_in(pid, pid) for pid in known)
        # A parent whose bytes are restored has no more children that need this.
        for child, parent in unreported_children(known, tracer) if tracer else ():
            if adopt is not None:
                adopt(child, parent)
            restored += restored_in(child, parent)
        return restored


def _restore(
    pid: int, breakpoints: Mapping[int, int], semaphores: Mapping[int, set[int]], jumps: Patches | None
) -> int:
    restored = 0
    with contextlib.suppress(OSError):
        memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            _lower(memory, semaphores, jumps)
            for address, original in list(breakpoints.items()):
                with contextlib.suppress(OSError):
                    if os.pread(memory, 1, address) == INT3:
                        restored += os.pwrite(memory, bytes([original]), address)
        finally:
            os.close(memory)
    return restored


def _lower(memory: int, semaphores: Mapping[int, set[int]], jumps: Patches | None) -> None:
    """
    Decrement the semaphores whose breakpoint, or its jump, is still in memory.

    A breakpoint is written before its semaphore is incremented, and removed after the semaphore was decremented. If a
    semaphore is 0, the tracer was killed between the two steps.
    """
    for semaphore, breakpoints in semaphores.items():
        with contextlib.suppress(OSError):
            if any(
                os.pread(memory, 1, address) == INT3 or (jumps is not None and jumps.is_there(memory, address))
                for address in breakpoints
            ):
                value = int.from_bytes(os.pread(memory, SEMAPHORE_SIZE, semaphore), "little")
                if value:
                    os.pwrite(memory, (value - 1).to_bytes(SEMAPHORE_SIZE, "little"), semaphore)
