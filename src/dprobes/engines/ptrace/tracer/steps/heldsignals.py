"""The signals that reach a thread in the middle of a step, and are held until it is done."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

from dprobes.engines.linux import processcalls, ptracecalls

if TYPE_CHECKING:
    import ctypes

    from dprobes.engines.ptrace.tracer.state import Thread

__all__ = ["FAULTS", "HeldSignals", "move_signal_address"]

# Words of siginfo_t that hold si_addr.
_ADDRESS_LOW, _ADDRESS_HIGH = 4, 5

FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
"""
The signals that an instruction raises itself, when si_code says that the kernel sent them (sigaction(2)).

The kernel kills a thread that raises one of them while it is blocked, so we never block them.
"""

_ALL_BUT_FAULTS = ((1 << 64) - 1) & ~sum(1 << number - 1 for number in (*FAULTS, signal.SIGSYS))


class HeldSignals:
    """
    The signals that reach a thread before its instruction is done.

    The first is held with its ``siginfo``; all others are blocked from then on and wait in the kernel. Only those like
    SIGSEGV may follow that must not be blocked; they are sent again. SIGSTOP is not kept back, because the SIGCONT that
    takes it back could come first; but the stop that it makes of the whole process is, since a signal that is held then
    could not be given back as what it was.
    """

    def __init__(self, thread: Thread) -> None:
        self._thread = thread
        self._first: tuple[int, list[int]] | None = None
        self._more: list[int] = []
        self._mask: int | None = None
        self._unheld = 0
        self._stops = False

    def __bool__(self) -> bool:
        return self._mask is not None

    def hold(self, number: int, info: ctypes.Array[ctypes.c_int32]) -> None:
        """Hold the signal that the thread has stopped for."""
        if number == signal.SIGSTOP:
            self._unheld = number
        elif self._first is not None:
            self._more.append(number)
        else:
            self._first = (number, list(info))
            self._mask = ptracecalls.get_signal_mask(self._thread.tid)
            ptracecalls.set_signal_mask(self._thread.tid, self._mask | _ALL_BUT_FAULTS)

    def take_unheld(self) -> int:
        """Return the signal with which the thread is to go on with its step, or 0."""
        number, self._unheld = self._unheld, 0
        return number

    def hold_stop(self) -> None:
        """Hold a group stop: let the thread go on as if it had not been reported, and report it again afterwards."""
        self._stops = True

    def give_back(self) -> int:
        """Return the signal with which to resume the thread, which has stopped for one, or 0."""
        if self._stops:
            # If it has ended meanwhile, this is one more stop that we asked for.
            self._stops = False
            with contextlib.suppress(OSError):
                ptracecalls.interrupt(self._thread.tid)
        if self._first is None:
            return 0
        number, info = self._first
        self._first = None
        self.send_again()
        # Resuming with another signal than the one reported makes the kernel invent a siginfo; give it the real one.
        with contextlib.suppress(OSError):
            ptracecalls.set_signal_info(self._thread.tid, ptracecalls.SignalInfo(*info))
        return number

    def send_again(self) -> None:
        """
        Send what is held anew, and let the thread receive signals again.

        The kernel gives that a ``siginfo`` of our own: this is only for a thread that makes a process in its step.
        """
        if self._mask is None:
            return
        with contextlib.suppress(OSError):
            ptracecalls.set_signal_mask(self._thread.tid, self._mask)
        for number in ([self._first[0]] if self._first is not None else []) + self._more:
            with contextlib.suppress(OSError):
                processcalls.send_signal(self._thread.pid, self._thread.tid, number)
        self._mask = None


def move_signal_address(info: ctypes.Array[ctypes.c_int32], former: int, address: int) -> None:
    """Change the address in a ``siginfo`` if it is ``former``."""
    low, high = info[_ADDRESS_LOW] & 0xFFFFFFFF, info[_ADDRESS_HIGH] & 0xFFFFFFFF
    if low | high << 32 == former:
        info[_ADDRESS_LOW] = _signed(address & 0xFFFFFFFF)
        info[_ADDRESS_HIGH] = _signed(address >> 32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
