"""
Letting go: every way out of the tracer leads through ``Detacher.detach_all``.

All threads are stopped first, and the children that they were just making are taken in. Then the original bytes go
back, the threads that executed a breakpoint whose trap has not been delivered are set back onto the original
instruction, and everything is detached, each thread with the signal that it was about to receive.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from dprobes.engines.ptrace import syscalls
from dprobes.engines.ptrace.processes import ThreadState, process_field
from dprobes.engines.ptrace.syscalls import NEW_TASK_EVENTS, Event, Register, StopKind, classify_stop

if TYPE_CHECKING:
    from dprobes.engines.ptrace.family import Family
    from dprobes.engines.ptrace.processes import Thread
    from dprobes.engines.ptrace.stopping import Stopper

__all__ = ["Detacher"]

_ATTEMPTS = 100
"""How many stops a thread may report before its queued trap, which comes before other signals."""


class Detacher:
    """Restore and detach all threads of the tracer's tables."""

    def __init__(self, family: Family, stopper: Stopper) -> None:
        self._family = family
        self._stopper = stopper
        self._registers = syscalls.Registers()
        self._info = syscalls.SignalInfo()
        self._signals: dict[int, int] = {}
        """For each thread that has stopped for a signal, that signal."""

    def detach_all(self) -> None:
        """Leave every target as it would be without us."""
        threads = self._family.threads
        self._stop_all()
        for space in self._family.spaces():
            for breakpoint_ in list(space.breakpoints.values()):
                space.withdraw(breakpoint_)
        for thread in list(threads.values()):
            with contextlib.suppress(OSError):
                self._detach(thread)
        threads.clear()

    def _stop_all(self) -> None:
        """Stop every thread; one that reports a new child instead is stopped already, and so will be its child."""
        while True:
            self._stopper.collect()
            for thread in self._family.threads.values():
                if thread.state is ThreadState.LISTENING:
                    # PTRACE_DETACH needs a real stop; an interrupt ends the listening, and the group stop lasts.
                    thread.state = ThreadState.RUNNING
            self._stopper.stop(list(self._family.threads.values()))
            for thread in self._family.threads.values():
                if thread.state is ThreadState.NEWBORN and thread.tid not in self._stopper.deferred:
                    with contextlib.suppress(ChildProcessError):
                        self._stopper.defer(thread.tid, os.waitpid(thread.tid, syscalls.WALL)[1])
            self._family.adopt_orphans()
            if not self._stopper.deferred:
                return
            while self._stopper.deferred:
                self._note_stop(*self._stopper.oldest_deferred())

    def _note_stop(self, tid: int, status: int) -> None:
        thread = self._family.threads.get(tid)
        kind, number = classify_stop(status)
        if thread is None:
            self._family.note_stranger(tid, status)
        elif kind is StopKind.EXITED:
            self._family.remove(thread)
        else:
            thread.state = ThreadState.STOPPED
            if kind is StopKind.SIGNAL:
                self._signals[tid] = number
            elif kind is StopKind.EVENT and number in NEW_TASK_EVENTS:
                with contextlib.suppress(OSError):
                    self._family.add_child(thread, Event(number), syscalls.event_message(tid))

    def _detach(self, thread: Thread) -> None:
        number = self._signals.get(thread.tid, 0)
        if number == signal.SIGTRAP:
            number = 0 if self._set_back(thread) else number
        elif not number:
            if self._trap_is_queued(thread):
                number = self._await_trap(thread)
            else:
                self._stopper.hide_interruption(thread)
        syscalls.detach(thread.tid, number)

    def _trap_is_queued(self, thread: Thread) -> bool:
        """Return whether a thread executed one of our breakpoints and the signal for it still waits."""
        syscalls.get_registers(thread.tid, self._registers)
        if self._registers[Register.RIP] - 1 not in thread.space.former:
            return False
        pending = process_field(thread.tid, "SigPnd")
        return bool(pending) and bool(int(pending, 16) & 1 << (signal.SIGTRAP - 1))

    def _await_trap(self, thread: Thread) -> int:
        """Let a trap come before which the kernel reported our interrupt; return the signal to go on with."""
        for _ in range(_ATTEMPTS):
            syscalls.resume(thread.tid)
            kind, number = classify_stop(os.waitpid(thread.tid, syscalls.WALL)[1])
            if kind is StopKind.EXITED:
                raise ProcessLookupError
            if kind is StopKind.SIGNAL:
                return 0 if number == signal.SIGTRAP and self._set_back(thread) else number
        return 0

    def _set_back(self, thread: Thread) -> bool:
        """Put a thread that trapped onto the original instruction; return False if the trap is the program's own."""
        code = syscalls.get_signal_info(thread.tid, self._info)
        if code == syscalls.TRAP_TRACE and thread.unfinished is not None:
            return True  # the end of a step of ours
        if code != syscalls.SI_KERNEL:
            return False
        syscalls.get_registers(thread.tid, self._registers)
        address = self._registers[Register.RIP] - 1
        if address not in thread.space.former:
            return False
        self._registers[Register.RIP] = address
        syscalls.set_registers(thread.tid, self._registers)
        return True
