"""
Processes that ``exit 1`` and ``exit 3`` have stopped. They are handed to a debugger, or their core dump is written.

A BPF program sends SIGSTOP, which the kernel delivers after the probed instruction. So the debugger or the core file
shows the state after this instruction.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import HandedOver, Notice
from dprobes.errors import EngineError, reason_of
from dprobes.platform.linux.procfs import process_field
from dprobes.rpn.program_needs import CORE_DUMP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.engines.command_launcher import Debuggers
    from dprobes.engines.ebpf.read.core_dumper import Dump
    from dprobes.engines.ebpf.read.held_records import Ended
    from dprobes.engines.ebpf.read.stop_guard import CoreStops, StopGuard
    from dprobes.engines.engine_interface import Event

__all__ = ["CORE_DUMP", "DEBUGGER", "StoppedProcesses"]

DEBUGGER = 1
"""Operand of ``exit`` that hands the process to a debugger."""

_GUARD_LOOK = 0.25
"""Seconds between two checks whether the guard runs."""

_GUARDS_MAX = 4
"""Number of restarts of the guard after which a notice reports that guards end."""

_UNHEARD = 2.0
"""Age in seconds of a stop at which its entry in the ring was certainly lost, if the ring is empty."""


class StoppedProcesses:
    """Stopped processes of a run. ``hidden`` returns the original bytes of the breakpoints in a process."""

    def __init__(self, debuggers: Debuggers, core_directory: str, hidden: Callable[[int], dict[int, int]]) -> None:
        self._debuggers = debuggers
        self._core_directory = core_directory
        self._hidden = hidden
        self._dumps: list[Dump] = []
        self._stops: CoreStops | None = None
        self._guard: StopGuard | None = None
        self._guards = 0
        self._next_look = 0.0

    def begin(self, descriptor: int) -> None:
        """
        Prepare for processes that are stopped for a core dump; call this before handlers are attached.

        ``descriptor`` is that of the list of stopped processes. Raise ``EngineError`` if the guard cannot be started.
        """
        from dprobes.engines.ebpf.read.stop_guard import CoreStops, StopGuard

        self._stops = CoreStops(descriptor)
        try:
            self._guard = StopGuard(descriptor)
        except OSError as error:
            raise EngineError(
                f"the helper that continues stopped processes cannot be started: {reason_of(error)}",
                hint="leave 'exit 3' out, or make room for another process",
            ) from error

    def close(self) -> None:
        """Resume all processes that are stopped for a core dump. No handler may run any more."""
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self._stops is not None:
            self._stops.close()
            self._stops = None

    @property
    def is_idle(self) -> bool:
        """True if no debugger runs or is to be started, and no core file is being written."""
        return self._debuggers.is_idle and not self._dumps

    def take(self, ended: Ended) -> Iterator[Event]:
        """Hand a stopped process to a debugger, or start its core dump. The probepoint must have been removed."""
        name = process_field(ended.tid, "Name") or "ended"
        if ended.reason == DEBUGGER:
            pointer = _pointer(ended.tid)
            yield from self._debuggers.add(HandedOver(ended.pid, ended.tid, name, pointer, has_executed=True))
            return
        from dprobes.engines.ebpf.read.core_dumper import start_dump

        assert self._stops is not None
        if not self._stops.has(ended.pid):
            yield Notice(f"no core of process {ended.pid} ({name}): too many others are stopped; it has continued")
            return
        hidden = self._hidden(ended.pid)
        started = start_dump(ended.pid, ended.tid, name, self._core_directory, hidden, self._stops)
        if isinstance(started, Notice):
            yield started
        else:
            self._dumps.append(started)

    def dismiss(self, ended: Ended) -> None:
        """Resume a process that was stopped at a probepoint for which another process was stopped before."""
        if ended.reason == DEBUGGER:
            with suppress(ProcessLookupError):
                os.kill(ended.pid, signal.SIGCONT)
        elif self._stops is not None and not any(dump.pid == ended.pid for dump in self._dumps):
            self._stops.let_go_on(ended.pid)

    def look(self, *, is_quiet: bool = False) -> Iterator[Event]:
        """Check debuggers, core files and the guard. Call this often. With ``is_quiet``, the ring is empty."""
        if not self._debuggers.is_idle:
            yield from self._debuggers.look()
        for dump in [dump for dump in self._dumps if dump.is_done]:
            self._dumps.remove(dump)
            yield dump.finish()
        if self._stops is not None and self._guard is not None and (now := time.monotonic()) >= self._next_look:
            self._next_look = now + _GUARD_LOOK
            self._guards += self._guard.look()
            if self._guards == _GUARDS_MAX:
                self._guards += 1
                yield Notice(
                    "the helper that continues stopped processes ends again and again: if dprobes is killed, "
                    "a process that 'exit 3' has just stopped may stay stopped"
                )
            for pid in self._stops.unheard(_UNHEARD) if is_quiet else ():
                self._stops.let_go_on(pid)
                yield Notice(f"no core of process {pid}: the ring had no room for its hit; the process continues")

    def abandon(self) -> Iterator[Event]:
        """Delete unfinished core files at the end of the run, resume their processes, and yield notices."""
        while self._dumps:
            dump = self._dumps.pop()
            yield dump.finish(abandoned=not dump.is_done)


def _pointer(tid: int) -> int:
    """Return the instruction pointer of a stopped thread, or 0 if it has ended (proc(5), /proc/PID/syscall)."""
    try:
        with open(f"/proc/{tid}/syscall", encoding="ascii") as file:
            return int(file.read().split()[-1], 16)
    except (OSError, ValueError, IndexError):
        return 0
