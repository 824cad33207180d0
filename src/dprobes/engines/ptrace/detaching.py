"""
Letting go: every way out of the tracer leads through ``Detacher.detach_all``.

All threads are stopped first. Then the original bytes go back, the threads that executed a breakpoint whose trap has
not been delivered are set back onto the original instruction, and everything is detached, each thread with the signal
that it was about to receive.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from dprobes.engines.ptrace import syscalls
from dprobes.engines.ptrace.processes import ThreadState, process_field
from dprobes.engines.ptrace.syscalls import Register, StopKind, classify_stop

if TYPE_CHECKING:
    from dprobes.engines.ptrace.processes import Thread
    from dprobes.engines.ptrace.stopping import Stopper

__all__ = ["Detacher"]


class Detacher:
    """Restore and detach all threads of the tracer's tables."""

    def __init__(self, threads: dict[int, Thread], stopper: Stopper, early: dict[int, int]) -> None:
        self._threads = threads
        self._stopper = stopper
        self._early = early
        self._registers = syscalls.Registers()
        self._info = syscalls.SignalInfo()

    def detach_all(self) -> None:
        """Leave every target as it would be without us."""
        threads = list(self._threads.values())
        listening = [t for t in threads if t.state is ThreadState.LISTENING]
        for thread in listening:
            # PTRACE_DETACH needs a real stop; an interrupt ends the listening with one, and the group stop lasts.
            thread.state = ThreadState.RUNNING
        self._stopper.stop(threads)
        signals = self._pending_stops()
        for space in {id(t.space): t.space for t in threads}.values():
            for breakpoint_ in list(space.breakpoints.values()):
                space.withdraw(breakpoint_)
        for thread in threads:
            with contextlib.suppress(OSError):
                self._detach(thread, signals.get(thread.tid, 0))
        for tid in self._early:
            with contextlib.suppress(OSError):
                syscalls.detach(tid)
        self._threads.clear()

    def _pending_stops(self) -> dict[int, int]:
        """Return for each thread with an unhandled signal stop that signal."""
        signals: dict[int, int] = {}
        while self._stopper.deferred:
            tid, status = self._stopper.deferred.popleft()
            kind, number = classify_stop(status)
            if kind is StopKind.EXITED:
                self._threads.pop(tid, None)
            elif kind is StopKind.SIGNAL:
                signals[tid] = number
        return signals

    def _detach(self, thread: Thread, number: int) -> None:
        if thread.state is ThreadState.NEWBORN:
            self._await_first_stop(thread)
        if number == signal.SIGTRAP:
            number = 0 if self._set_back(thread, trapped=True) else number
        elif not number and self._trap_is_queued(thread):
            # The kernel reports our interrupt before the trap: let the trap come, then take it.
            syscalls.resume(thread.tid)
            status = os.waitpid(thread.tid, syscalls.WALL)[1]
            kind, number = classify_stop(status)
            if kind is StopKind.EXITED:
                return
            if kind is not StopKind.SIGNAL or (number == signal.SIGTRAP and self._set_back(thread, trapped=True)):
                number = 0
        syscalls.detach(thread.tid, number)

    def _await_first_stop(self, thread: Thread) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(thread.tid, syscalls.WALL)

    def _trap_is_queued(self, thread: Thread) -> bool:
        """Return whether a thread executed one of our breakpoints and the signal for it still waits."""
        syscalls.get_registers(thread.tid, self._registers)
        if self._registers[Register.RIP] - 1 not in thread.space.former:
            return False
        pending = process_field(thread.tid, "SigPnd")
        return bool(pending) and bool(int(pending, 16) & 1 << (signal.SIGTRAP - 1))

    def _set_back(self, thread: Thread, *, trapped: bool) -> bool:
        """Put a thread that trapped onto the original instruction; return False if the trap is the program's own."""
        if trapped and syscalls.get_signal_info(thread.tid, self._info) != syscalls.SI_KERNEL:
            return False
        syscalls.get_registers(thread.tid, self._registers)
        address = self._registers[Register.RIP] - 1
        if address not in thread.space.former:
            return False
        self._registers[Register.RIP] = address
        syscalls.set_registers(thread.tid, self._registers)
        return True
