"""
Processes that ``exit 1`` and ``exit 3`` have stopped: one goes to a debugger, or gets its core written.

The kernel stops the thread by a SIGSTOP, which it delivers after it has carried out the probed instruction: what the
debugger or the core shows is the state right behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.interface import HandedOver, Notice
from dprobes.engines.linux.procfs import process_field

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.engines.debugger import Debuggers
    from dprobes.engines.ebpf.read.coredump import Dump
    from dprobes.engines.ebpf.read.heldrecords import Ended
    from dprobes.engines.interface import Event

__all__ = ["CORE_DUMP", "DEBUGGER", "StoppedProcesses"]

DEBUGGER, CORE_DUMP = 1, 3
"""The operands of ``exit``."""


class StoppedProcesses:
    """The stopped processes of a run; ``hidden`` returns the original bytes of the breakpoints in a process."""

    def __init__(self, debuggers: Debuggers, core_directory: str, hidden: Callable[[int], dict[int, int]]) -> None:
        self._debuggers = debuggers
        self._core_directory = core_directory
        self._hidden = hidden
        self._dumps: list[Dump] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to ``look`` at."""
        return self._debuggers.is_idle and not self._dumps

    def take(self, ended: Ended) -> Iterator[Event]:
        """Begin with a process that was stopped, after the probepoint has been removed."""
        name = process_field(ended.tid, "Name") or "ended"
        if ended.reason == DEBUGGER:
            pointer = _pointer(ended.tid)
            yield from self._debuggers.add(HandedOver(ended.pid, ended.tid, name, pointer, has_executed=True))
            return
        from dprobes.engines.ebpf.read.coredump import start_dump

        started = start_dump(ended.pid, ended.tid, name, self._core_directory, self._hidden(ended.pid))
        if isinstance(started, Notice):
            yield started
        else:
            self._dumps.append(started)

    def look(self) -> Iterator[Event]:
        """See what became of debuggers and core files; to be called often."""
        if not self._debuggers.is_idle:
            yield from self._debuggers.look()
        for dump in [dump for dump in self._dumps if dump.is_done]:
            self._dumps.remove(dump)
            yield dump.finish()

    def abandon(self) -> Iterator[Event]:
        """Give up core files that are not finished: the run ends now."""
        while self._dumps:
            dump = self._dumps.pop()
            yield dump.finish(abandoned=not dump.is_done)


def _pointer(tid: int) -> int:
    """Return the instruction pointer of a stopped thread, 0 if it is gone (proc(5), /proc/PID/syscall)."""
    try:
        with open(f"/proc/{tid}/syscall", encoding="ascii") as file:
            return int(file.read().split()[-1], 16)
    except (OSError, ValueError, IndexError):
        return 0
