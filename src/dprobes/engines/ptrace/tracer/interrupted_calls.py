"""
System calls whose interrupted waits the kernel does not continue correctly after a stop.

Linux restarts most interrupted calls if no signal handler ran, with the rest of their timeout. Exceptions (signal(7),
"Interruption of system calls and library functions by stop signals", and measured):

* waits that fail with EINTR: those of epoll, sockets with a timeout, semop, rt_sigtimedwait, io_getevents, io_uring;
  and select and ppoll if the kernel cannot store the remaining time;
* waits that are restarted with their whole timeout: io_pgetevents, and reading a terminal with VTIME; or with the time
  that was left when they were interrupted, regardless of the duration of the stop: select and ppoll.

The tables of this module list these calls. For such a wait, its functions determine when it must end, and the value
that it must return. They stop no threads.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import math
import os
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.ptrace.tracer.tracer_state import InterruptedWait, RestartedCall, ThreadState
from dprobes.platform.linux import process_calls, ptrace_calls
from dprobes.platform.linux.procfs import catches_signal
from dprobes.platform.linux.ptrace_calls import Register
from dprobes.platform.x86.instruction_emulation import Action

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.tracer_state import Thread
    from dprobes.platform.linux.ptrace_calls import RegisterWords

__all__ = ["ARGUMENTS", "EINTR", "RESTART_NO_HANDLER", "Waits", "has_entered", "is_restarted", "step_on"]

_MASK_32, _MASK_64 = (1 << 32) - 1, (1 << 64) - 1
EINTR = -errno.EINTR & _MASK_64
"""Value of the result register when a call has failed with EINTR."""

RESTART_NO_HANDLER = -514 & _MASK_64
"""ERESTARTNOHAND: the kernel restarts the call, or lets it fail with EINTR if a handler runs first."""

_RESTART_SIGNAL = -512 & _MASK_64

ARGUMENTS = {
    8: (Register.RDI, Register.RSI, Register.RDX, Register.R10, Register.R8, Register.R9),
    4: (Register.RBX, Register.RCX, Register.RDX, Register.RSI, Register.RDI, Register.RBP),
}
"""Registers of a system call's arguments, by word size."""

_INT80 = b"\xcd\x80"


class Limit(enum.Enum):
    """Kind of the argument with which a system call limits its wait. Times are relative."""

    NONE = "it has none"
    MILLISECONDS = "an argument, negative for none"
    TIME = "a timespec of the program's word size"
    TIME_64 = "a timespec with words of 8 bytes"
    MICROSECONDS = "a timeval of the program's word size"
    RECEIVING = "SO_RCVTIMEO of its socket"
    SENDING = "SO_SNDTIMEO of its socket"
    RING = "io_uring_getevents_arg"


class _Call(NamedTuple):
    """A call: kind of its timeout, the argument that contains it, and the return value when the timeout is over."""

    limit: Limit
    argument: int = 0
    result: int = 0
    sets: bool = False
    """True if arguments 2 to 4 of the call are sets of descriptors (select)."""
    reads: bool = False
    """True if the call's file may be a terminal, which has a timeout (VTIME)."""


_EPOLL = _Call(Limit.MILLISECONDS, 3)
_EPOLL_2 = _Call(Limit.TIME_64, 3)
_RECEIVE = _Call(Limit.RECEIVING, 0, -errno.EAGAIN)
_READ = _Call(Limit.RECEIVING, 0, -errno.EAGAIN, reads=True)
_SEND = _Call(Limit.SENDING, 0, -errno.EAGAIN)
_CONNECT = _Call(Limit.SENDING, 0, -errno.EINPROGRESS)
_SIGNAL, _SIGNAL_64 = _Call(Limit.TIME, 2, -errno.EAGAIN), _Call(Limit.TIME_64, 2, -errno.EAGAIN)
_SEMAPHORE, _SEMAPHORE_64 = _Call(Limit.TIME, 3, -errno.EAGAIN), _Call(Limit.TIME_64, 3, -errno.EAGAIN)
_UNTIMED = _Call(Limit.NONE)
_EVENTS, _EVENTS_64 = _Call(Limit.TIME, 4), _Call(Limit.TIME_64, 4)
_RING = _Call(Limit.RING, 4, -errno.ETIME)
_SELECT = _Call(Limit.MICROSECONDS, 4, sets=True)
_PSELECT, _PSELECT_64 = _Call(Limit.TIME, 4, sets=True), _Call(Limit.TIME_64, 4, sets=True)
_PPOLL, _PPOLL_64 = _Call(Limit.TIME, 2), _Call(Limit.TIME_64, 2)

# arch/x86/entry/syscalls/syscall_64.tbl and syscall_32.tbl.
_CALLS: dict[int, dict[int, _Call]] = {
    8: {
        232: _EPOLL, 281: _EPOLL, 441: _EPOLL_2,
        23: _SELECT, 270: _PSELECT, 271: _PPOLL,
        0: _READ, 19: _RECEIVE, 43: _RECEIVE, 45: _RECEIVE, 47: _RECEIVE, 275: _RECEIVE, 288: _RECEIVE, 299: _RECEIVE,
        1: _SEND, 20: _SEND, 40: _SEND, 44: _SEND, 46: _SEND, 307: _SEND, 42: _CONNECT,
        128: _SIGNAL, 65: _UNTIMED, 220: _SEMAPHORE, 208: _EVENTS, 333: _EVENTS, 426: _RING,
    },
    4: {
        256: _EPOLL, 319: _EPOLL, 441: _EPOLL_2,
        142: _SELECT, 308: _PSELECT, 413: _PSELECT_64, 309: _PPOLL, 414: _PPOLL_64,
        3: _READ, 145: _RECEIVE, 313: _RECEIVE, 337: _RECEIVE, 364: _RECEIVE, 371: _RECEIVE, 372: _RECEIVE,
        417: _RECEIVE,
        4: _SEND, 146: _SEND, 187: _SEND, 239: _SEND, 345: _SEND, 369: _SEND, 370: _SEND, 362: _CONNECT,
        177: _SIGNAL, 421: _SIGNAL_64, 420: _SEMAPHORE_64, 247: _EVENTS, 385: _EVENTS, 416: _EVENTS_64, 426: _RING,
    },
}  # fmt: skip

# Calls multiplexed by two numbers of i386: socketcall(2), whose arguments are in memory, and ipc(2).
_SOCKETCALL, _IPC = 102, 117
_SOCKET_CALLS = {
    3: _CONNECT, 5: _RECEIVE, 9: _SEND, 10: _RECEIVE, 11: _SEND, 12: _RECEIVE, 16: _SEND, 17: _RECEIVE, 18: _RECEIVE,
    19: _RECEIVE, 20: _SEND,
}  # fmt: skip
_IPC_CALLS = {1: _UNTIMED, 4: _Call(Limit.TIME, 5, -errno.EAGAIN)}

# Calls that the kernel restarts, but with their whole timeout, or without counting the time of stops.
_MULTIPLEXING = (_SELECT, _PSELECT, _PSELECT_64, _PPOLL, _PPOLL_64)
_BEGUN_ANEW = {RESTART_NO_HANDLER: (_EVENTS, _EVENTS_64, *_MULTIPLEXING), _RESTART_SIGNAL: (_READ,)}

_RING_EXTENDED, _RING_ABSOLUTE, _RING_REGISTERED = 1 << 3, 1 << 5, 1 << 6


def call_of(registers: RegisterWords, space: AddressSpace) -> tuple[_Call, tuple[int, ...], int] | None:
    """
    Return the call that a stopped thread was in, with its arguments and their word size in bytes.

    Return None if the kernel restarts the call correctly by itself.
    """
    size = ptrace_calls.word_size(registers)
    number = registers[Register.ORIG_RAX]
    if size == 8 and _reads(space, registers[Register.RIP] - 2, 2) == _INT80:
        size = 4  # a 64-bit program that makes a 32-bit system call
    registers_of = ARGUMENTS[size]
    mask = _MASK_32 if size == 4 else _MASK_64
    arguments = tuple(registers[register] & mask for register in registers_of)
    call = _CALLS[size].get(number)
    if size == 4 and number == _SOCKETCALL:
        call = _SOCKET_CALLS.get(arguments[0])
        descriptor = _reads(space, arguments[1], 4)
        arguments = (int.from_bytes(descriptor, "little"),)
    elif size == 4 and number == _IPC:
        call = _IPC_CALLS.get(arguments[0] & 0xFFFF)
    return None if call is None else (call, arguments, size)


def is_restarted(registers: RegisterWords, space: AddressSpace) -> bool:
    """Return whether a thread is in a call that failed only because of a stop, and must be restarted."""
    return registers[Register.RAX] == EINTR and call_of(registers, space) is not None


def interrupted_wait(thread: Thread, registers: RegisterWords, now: float) -> InterruptedWait | None:
    """
    Return the interrupted system call of a stopped thread if the tracer must keep its timeout across the restart.

    Return None for any other call. ``now`` is ``time.monotonic()``. How long the call had already waited is unknown, so
    its full timeout starts again at ``now``. A call that failed with EINTR and has no timeout has no deadline.
    """
    result = registers[Register.RAX]
    begun_anew = _BEGUN_ANEW.get(result, ())
    if result != EINTR and not begun_anew:
        return None
    found = call_of(registers, thread.space)
    if found is None:
        return None
    call, arguments, size = found
    if result != EINTR and call not in begun_anew:
        return None
    limit = _limit(thread, call, arguments, size, at_terminal=result == _RESTART_SIGNAL)
    if limit is None and result != EINTR:
        return None
    seconds, returned = limit or (math.inf, EINTR)
    cleared = _sets(arguments, size) if call.sets else ()
    if result != EINTR and call in _MULTIPLEXING:
        # The kernel has stored the remaining time there, and would store zero.
        cleared += ((arguments[call.argument], 16 if call.limit is Limit.TIME_64 else 2 * size),)
    return InterruptedWait(
        registers[Register.ORIG_RAX],
        registers[Register.RIP],
        registers[Register.RSP],
        now + seconds,
        returned & _MASK_64,
        cleared,
    )


def _limit(
    thread: Thread, call: _Call, arguments: tuple[int, ...], size: int, *, at_terminal: bool
) -> tuple[float, int] | None:
    """Return the timeout of a call in seconds, and its result at the timeout, or None if it is unknown or has none."""
    if at_terminal:
        # Most files are not terminals, which is quickly determined.
        if not _is_device(thread.tid, arguments[0]):
            return None
        return _terminal_limit(thread, arguments[0])
    where = arguments[call.argument]
    seconds: float | None = None
    match call.limit:
        case Limit.MILLISECONDS:
            seconds = None if where & 1 << 31 else (where & _MASK_32) / 1e3
        case Limit.TIME:
            seconds = _time(thread.space, where, size)
        case Limit.TIME_64:
            seconds = _time(thread.space, where, 8)
        case Limit.MICROSECONDS:
            seconds = _time(thread.space, where, size, 1e6)
        case Limit.RECEIVING | Limit.SENDING:
            return _socket_limit(thread, where, call)
        case Limit.RING:
            flags = arguments[3]
            if flags & _RING_EXTENDED and not flags & (_RING_ABSOLUTE | _RING_REGISTERED):
                address = int.from_bytes(_reads(thread.space, where + 16, 8), "little")
                seconds = _time(thread.space, address, 8)
    return None if seconds is None else (seconds, call.result)


def _time(space: AddressSpace, address: int, size: int, fraction: float = 1e9) -> float | None:
    data = _reads(space, address, 2 * size) if address else b""
    if len(data) < 2 * size:
        return None
    whole: int
    rest: int
    whole, rest = struct.unpack("<qq" if size == 8 else "<ii", data)
    return max(0.0, whole + rest / fraction)


def _sets(arguments: tuple[int, ...], size: int) -> tuple[tuple[int, int], ...]:
    """Return (address, size) of select's sets of descriptors; sizes are rounded up to words."""
    count = min(arguments[0] & _MASK_32, 1 << 20)
    length = (count + 8 * size - 1) // (8 * size) * size
    return tuple((address, length) for address in arguments[1:4] if address and length)


def _is_device(tid: int, number: int) -> bool:
    # Use the name: a query of the file's status may have to wait for its file system.
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{tid}/fd/{number & _MASK_32}").startswith("/dev/")
    return False


def _socket_limit(thread: Thread, number: int, call: _Call) -> tuple[float, int] | None:
    is_sending = call.limit is Limit.SENDING
    try:
        found = process_calls.socket_timeout(thread.tid, thread.pid, number & _MASK_32, sending=is_sending)
    except OSError:
        return None
    seconds, is_local = found
    if not seconds:
        return None
    # The kernel returns EINPROGRESS only for connections that are made in the background.
    return seconds, -errno.EAGAIN if is_local and call is _CONNECT else call.result


def _terminal_limit(thread: Thread, number: int) -> tuple[float, int] | None:
    """Return the limit of a read that ends without data after some tenths of a second (termios(3), VMIN and VTIME)."""
    try:
        modes, characters = process_calls.terminal_modes(thread.tid, thread.pid, number & _MASK_32)
    except OSError:
        return None
    import termios

    if modes & termios.ICANON:
        return None
    at_least, tenths = (characters[index] for index in (termios.VMIN, termios.VTIME))
    return None if at_least or not tenths else (tenths / 10, 0)


def _reads(space: AddressSpace, address: int, size: int) -> bytes:
    with contextlib.suppress(OSError):
        return space.read(address & _MASK_64, size)
    return b""


_RAX, _ORIG_RAX, _RIP = int(Register.RAX), int(Register.ORIG_RAX), int(Register.RIP)
_ENTERING = -errno.ENOSYS & (1 << 64) - 1
_ALREADY = -errno.EALREADY & (1 << 64) - 1

RESTART_SYSCALL = (219, 0)
"""Numbers of restart_syscall(2), by which the kernel continues a wait: for 64-bit and 32-bit programs."""

_PAUSE = 0.002
"""Seconds until the next check of a thread whose wait is over, but which has stopped for something else."""


class Waits:
    """
    Threads whose interrupted waits are restarted.

    A wait that would fail is restarted, which is transparent to the thread. The thread runs with PTRACE_SYSCALL until
    the call returns, so that no later wait is mistaken for it. It is stopped again when the timeout, if any, is over.
    Only the result is changed in its registers and memory.

    The stop at the return is needed even without a timeout. The kernel queues signals that a traced process ignores,
    and wakes one thread for each. If another thread dequeues the signal first, which is more likely on a busy machine,
    the call of the woken thread fails with EINTR, and no other stop shows that. A wait that was not stopped before is
    not protected.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Thread] = {}
        self._registers = ptrace_calls.Registers()

    def hide_interruption(self, thread: Thread, number: int = 0) -> None:
        """
        Prepare a thread that is about to leave its stop, with a signal or 0, to continue its interrupted call.

        When the thread leaves, the kernel looks at its registers, and acts as if no signal had arrived. A signal with a
        handler ends the call, as in an untraced thread. A signal that the program ignores would not have woken the
        thread.
        """
        registers = self._registers
        ptrace_calls.get_registers(thread.tid, registers)
        call = thread.restarted
        if call is not None and registers[_RIP] == call.place and registers[_RAX] in (call.number, *RESTART_SYSCALL):
            if not number or not catches_signal(thread.tid, number):
                return
            self._return_to_call(thread, call)
        thread.restarted = None
        result = registers[_RAX]
        fails = result == EINTR
        if registers[_ORIG_RAX] >= ptrace_calls.NO_SYSTEM_CALL or not (fails or result in ptrace_calls.RESTARTS):
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
            ptrace_calls.set_registers(thread.tid, registers)
        place = thread.restarting = registers[_RIP] - 2
        thread.restarted = RestartedCall(place, registers[_ORIG_RAX], registers[_RAX])

    def _return_to_call(self, thread: Thread, call: RestartedCall) -> None:
        """
        Move a thread back into the call that it is about to restart, so that a signal handler ends it.

        Between a stop and the second entry into the kernel the thread is in no call. If a signal handler ran there,
        ``pause`` or ``sigsuspend`` would continue to wait for its signal.
        """
        registers = self._registers
        registers[_RIP], registers[_ORIG_RAX], registers[_RAX] = call.place + 2, call.number, call.result
        ptrace_calls.set_registers(thread.tid, registers)

    def on_system_call(self, thread: Thread) -> None:
        """Handle a system call stop of a thread with an interrupted wait."""
        wait = thread.wait
        if wait is None:
            return
        registers = self._registers
        ptrace_calls.get_registers(thread.tid, registers)
        result = registers[_RAX]
        if result == _ENTERING:
            if not wait.is_entered(registers):
                self.forget(thread)  # a handler ran first
        elif result == EINTR or result in ptrace_calls.RESTARTS:
            if time.monotonic() >= wait.until:
                self._end(thread)
                return
            if result == EINTR:
                registers[_RAX] = RESTART_NO_HANDLER
                ptrace_calls.set_registers(thread.tid, registers)
            # This stop has replaced the requested one, at which it would be known whether the call is restarted.
            ptrace_calls.interrupt(thread.tid)
        else:
            if result == _ALREADY and wait.result == -errno.EINPROGRESS & (1 << 64) - 1:
                registers[_RAX] = wait.result  # the result of connect when it is called again
                ptrace_calls.set_registers(thread.tid, registers)
            self.forget(thread)

    def forget(self, thread: Thread) -> None:
        """Forget the wait of a thread that does not continue it."""
        if thread.wait is not None:
            thread.wait = None
            self._waiting.pop(thread.tid, None)

    def look_after(self) -> float | None:
        """Stop the threads whose waits are over. Return the seconds until the next check, or None if there are none."""
        if not self._waiting:
            return None
        now = time.monotonic()
        delay: float | None = None
        for tid, thread in list(self._waiting.items()):
            wait = thread.wait
            if wait is None or thread.state is ThreadState.ENDED:
                del self._waiting[tid]
                continue
            if wait.is_asked or wait.until == math.inf:
                continue
            left = wait.until - now
            if left <= 0:
                left = _PAUSE
                if thread.state is ThreadState.RUNNING:
                    try:
                        ptrace_calls.interrupt(tid)
                    except OSError:
                        self.forget(thread)
                        continue
                    wait.is_asked = True
                    continue
            delay = left if delay is None else min(delay, left)
        return delay

    def _end(self, thread: Thread) -> None:
        """Set the registers of a stopped thread as if the timeout of its interrupted wait had expired."""
        wait = thread.wait
        assert wait is not None
        for address, size in wait.cleared:
            with contextlib.suppress(OSError):
                thread.space.write(address, bytes(size))
        self._registers[_RAX] = wait.result
        ptrace_calls.set_registers(thread.tid, self._registers)
        self.forget(thread)


# Steps in which threads sleep: how such a thread continues after a stop, and how its entry into the kernel is detected.
#
# The thread is still in the slot, and its hit unfinished. At the stop the kernel has discarded the request that would
# end the step. If the thread continued, no stop would show when it leaves the slot, and a system call would return into
# the slot.


def step_on(thread: Thread, registers: RegisterWords) -> bool:
    """
    Continue the step in which a stopped thread slept. Return False if it is not in such a step in a slot.

    ``registers`` are read again. A thread at the breakpoint itself runs into it again, which needs no step.
    """
    hit = thread.hit
    if not hit.is_late or thread.trapped:
        return False
    breakpoint_, action = hit.breakpoint, hit.breakpoint.site.emulation[0]
    slot = thread.space.slots.known(breakpoint_.address, breakpoint_.site)
    if slot is None or action == Action.REPEAT:  # which is followed by a breakpoint
        return False
    ptrace_calls.get_registers(thread.tid, registers)
    if registers[_RIP] != slot.address:
        return False
    advance = ptrace_calls.resume_to_syscall if action == Action.SYSTEM_CALL else ptrace_calls.single_step
    advance(thread.tid)
    return True


def has_entered(thread: Thread, registers: RegisterWords) -> bool:
    """Return True if a thread that stopped at a system call enters the call of a step in which it slept."""
    hit = thread.hit
    if not hit.is_late or hit.breakpoint.site.emulation[0] != Action.SYSTEM_CALL:
        return False
    address, site = hit.breakpoint.address, hit.breakpoint.site
    ptrace_calls.get_registers(thread.tid, registers)
    behind = thread.space.slots.way_on(address, site) + len(site.original)
    return registers[_RAX] == _ENTERING and registers[_RIP] == behind
