"""
The restoring of code from outside, when the tracer itself was killed.

The kernel detaches a dead tracer's threads at once, and they run on with our breakpoints in their code; whoever reaches
one gets a SIGTRAP. So the client keeps a list, and puts the bytes back as soon as it learns of the death.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer.breakpoints import INT3
from dprobes.engines.ptrace.wire import Kind, Placed, Removed, Watched, load_message

if TYPE_CHECKING:
    from dprobes.engines.x86.debugregs import Watch

__all__ = ["CrashRestorer"]


class CrashRestorer:
    """A list of a tracer's breakpoints and watchpoints, which is worked off when that was killed."""

    def __init__(self) -> None:
        self._breakpoints: dict[int, dict[int, int]] = {}
        self._watches: dict[int, tuple[Watch, ...]] = {}

    def note_all(self, frames: list[tuple[Kind, bytes]]) -> None:
        """Note what those of some frames say that are messages."""
        for kind, payload in frames:
            if kind is Kind.MESSAGE:
                self.note(load_message(payload))

    def note(self, message: object) -> None:
        """Note what a message of the tracer says about breakpoints and watchpoints; others say nothing."""
        match message:
            case Placed(pid, breakpoints):
                self.placed(pid, breakpoints)
            case Removed(pid, addresses):
                self.removed(pid, addresses)
            case Watched(pid, watches):
                self.watched(pid, watches)

    def placed(self, pid: int, breakpoints: tuple[tuple[int, int], ...]) -> None:
        """Note breakpoints (address, original byte) that the tracer is about to write."""
        self._breakpoints.setdefault(pid, {}).update(breakpoints)

    def removed(self, pid: int, addresses: tuple[int, ...]) -> None:
        """Note that the tracer took these breakpoints away; no addresses mean all of the process."""
        if not addresses:
            self._breakpoints.pop(pid, None)
            self._watches.pop(pid, None)
            return
        known = self._breakpoints.get(pid, {})
        for address in addresses:
            known.pop(address, None)

    def watched(self, pid: int, watches: tuple[Watch, ...]) -> None:
        """Note what the threads of a process are about to watch, instead of what they did."""
        import dprobes.engines.ptrace.client.watchpointremoval  # noqa: F401 - now, because there will be no time for it later

        self._watches[pid] = watches

    def clear(self) -> tuple[int, int]:
        """Take the watchpoints out of all threads; return how many threads had any, and how many may still."""
        watches = {pid: some for pid, some in self._watches.items() if some}
        self._watches.clear()
        if not watches:
            return 0, 0
        from dprobes.engines.ptrace.client.watchpointremoval import clear_processes

        return clear_processes(watches)

    def restore(self) -> int:
        """Put the original bytes back wherever a breakpoint still is; return how many that were."""
        restored = 0
        # Somebody who waited for the tracer may be noting what it said last.
        known, self._breakpoints = self._breakpoints, {}
        for pid, breakpoints in known.items():
            with contextlib.suppress(OSError):
                memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
                try:
                    for address, original in list(breakpoints.items()):
                        with contextlib.suppress(OSError):
                            if os.pread(memory, 1, address) == INT3:
                                restored += os.pwrite(memory, bytes([original]), address)
                finally:
                    os.close(memory)
        return restored
