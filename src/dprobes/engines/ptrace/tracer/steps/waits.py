"""
What threads wait for in the kernel, and how they go on with it after a stop.

A wait that the kernel would let fail is made once more; the thread does not notice. If it has a timeout, the thread
runs between the stops of PTRACE_SYSCALL from then on until the call returns, so that no later wait is taken for it, and
is stopped once more when its time is over. Nothing in its registers or its memory is changed but the result.
"""

from __future__ import annotations

import contextlib
import errno
import time
from typing import TYPE_CHECKING

from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.procfs import catches_signal
from dprobes.engines.linux.ptracecalls import Register
from dprobes.engines.ptrace.tracer.state import RestartedCall, ThreadState
from dprobes.engines.ptrace.tracer.steps.timedwaits import EINTR, RESTART_NO_HANDLER, interrupted_wait, is_restarted

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.state import Thread

__all__ = ["Waits"]

_RAX, _ORIG_RAX, _RIP = int(Register.RAX), int(Register.ORIG_RAX), int(Register.RIP)
_ENTERING = -errno.ENOSYS & (1 << 64) - 1
_ALREADY = -errno.EALREADY & (1 << 64) - 1

RESTART_SYSCALL = (219, 0)
"""The numbers of restart_syscall(2), by which the kernel goes on with a wait: for 64-bit and 32-bit programs."""

_PAUSE = 0.002
"""Seconds after which to look again at a thread whose wait is over, but which has stopped for something else."""


class Waits:
    """The threads whose interrupted waits are made once more."""

    def __init__(self) -> None:
        self._waiting: dict[int, Thread] = {}
        self._registers = ptracecalls.Registers()

    def hide_interruption(self, thread: Thread, number: int = 0) -> None:
        """
        See to it that a thread, about to leave its stop with a signal or 0, goes on with the call that it was in.

        The kernel looks at the registers then, and acts as if no signal had come. A signal with a handler ends the call
        as it would without us; one that the program ignores would not even have woken the thread up.
        """
        registers = self._registers
        ptracecalls.get_registers(thread.tid, registers)
        call = thread.restarted
        if call is not None and registers[_RIP] == call.place and registers[_RAX] in (call.number, *RESTART_SYSCALL):
            if not number or not catches_signal(thread.tid, number):
                return
            self._return_to_call(thread, call)
        thread.restarted = None
        result = registers[_RAX]
        fails = result == EINTR
        if registers[_ORIG_RAX] >= ptracecalls.NO_SYSTEM_CALL or not (fails or result in ptracecalls.RESTARTS):
            self.forget(thread)
            return
        if number and catches_signal(thread.tid, number):
            self.forget(thread)
            return
        now = time.monotonic()
        if thread.wait is None:
            if fails and not is_restarted(registers, thread.space):
                return
            thread.wait = interrupted_wait(thread, registers, now)
            if thread.wait is not None:
                self._waiting[thread.tid] = thread
        elif now >= thread.wait.until:
            self._end(thread)
            return
        if fails:
            registers[_RAX] = RESTART_NO_HANDLER
            ptracecalls.set_registers(thread.tid, registers)
        place = thread.restarting = registers[_RIP] - 2
        thread.restarted = RestartedCall(place, registers[_ORIG_RAX], registers[_RAX])

    def _return_to_call(self, thread: Thread, call: RestartedCall) -> None:
        """
        Put a thread back into the call that it is about to make once more, for a handler to end it.

        Between a stop and the second entry into the kernel the thread is in no call: ``pause`` or ``sigsuspend`` would
        go on to wait for the signal of a handler that runs there.
        """
        registers = self._registers
        registers[_RIP], registers[_ORIG_RAX], registers[_RAX] = call.place + 2, call.number, call.result
        ptracecalls.set_registers(thread.tid, registers)

    def on_system_call(self, thread: Thread) -> None:
        """Take notice that a thread with an interrupted wait enters or leaves the kernel."""
        wait = thread.wait
        if wait is None:
            return
        registers = self._registers
        ptracecalls.get_registers(thread.tid, registers)
        result = registers[_RAX]
        if result == _ENTERING:
            if not wait.is_entered(registers):
                self.forget(thread)  # a handler came first
        elif result == EINTR or result in ptracecalls.RESTARTS:
            if time.monotonic() >= wait.until:
                self._end(thread)
                return
            if result == EINTR:
                registers[_RAX] = RESTART_NO_HANDLER
                ptracecalls.set_registers(thread.tid, registers)
            # This stop has taken the place of the one that the thread was asked for, at which it is known what comes.
            ptracecalls.interrupt(thread.tid)
        else:
            if result == _ALREADY and wait.result == -errno.EINPROGRESS & (1 << 64) - 1:
                registers[_RAX] = wait.result  # connect says so when it is called once more
                ptracecalls.set_registers(thread.tid, registers)
            self.forget(thread)

    def forget(self, thread: Thread) -> None:
        """Take notice that a thread does not go on with its wait."""
        if thread.wait is not None:
            thread.wait = None
            self._waiting.pop(thread.tid, None)

    def look_after(self) -> float | None:
        """Stop the threads whose waits are over; return in how many seconds to ask again, None if there are none."""
        if not self._waiting:
            return None
        now = time.monotonic()
        delay: float | None = None
        for tid, thread in list(self._waiting.items()):
            wait = thread.wait
            if wait is None or thread.state is ThreadState.ENDED:
                del self._waiting[tid]
                continue
            if wait.is_asked:
                continue
            left = wait.until - now
            if left <= 0:
                left = _PAUSE
                if thread.state is ThreadState.RUNNING:
                    try:
                        ptracecalls.interrupt(tid)
                    except OSError:
                        self.forget(thread)
                        continue
                    wait.is_asked = True
                    continue
            delay = left if delay is None else min(delay, left)
        return delay

    def _end(self, thread: Thread) -> None:
        """Let the wait of a stopped thread return what it returns when its time is over."""
        wait = thread.wait
        assert wait is not None
        for address, size in wait.cleared:
            with contextlib.suppress(OSError):
                thread.space.write(address, bytes(size))
        self._registers[_RAX] = wait.result
        ptracecalls.set_registers(thread.tid, self._registers)
        self.forget(thread)
