"""
The system calls that do not go on by themselves after a stop, or begin their whole time anew.

Linux makes most interrupted calls once more when no handler ran, with what is left of their time. Not so (signal(7),
"Interruption of system calls and library functions by stop signals", and measured):

* waits that fail with EINTR: those of epoll, sockets with a timeout, semop, rt_sigtimedwait, io_getevents, io_uring;
  and select and ppoll where the kernel cannot store how much time is left;
* waits that are made once more with their whole time: io_pgetevents, and reading a terminal with VTIME; or with what
  was left when they were interrupted, however long the stop took: select and ppoll.

This module says which calls these are, when such a wait is over, and what it returns then. What it must not know: when
threads stop.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import struct
from typing import TYPE_CHECKING

from dprobes.engines.linux import processcalls, ptracecalls
from dprobes.engines.linux.ptracecalls import Register
from dprobes.engines.ptrace.tracer.state import InterruptedWait
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    import ctypes

    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.state import Thread

__all__ = ["ARGUMENTS", "EINTR", "RESTART_NO_HANDLER", "call_of", "interrupted_wait", "is_restarted"]

_MASK_32, _MASK_64 = (1 << 32) - 1, (1 << 64) - 1
EINTR = -errno.EINTR & _MASK_64
"""What a register holds when a call has failed with EINTR."""

RESTART_NO_HANDLER = -514 & _MASK_64
"""ERESTARTNOHAND: the kernel makes the call once more, or lets it fail with EINTR if a handler runs first."""

_RESTART_SIGNAL = -512 & _MASK_64

ARGUMENTS = {
    8: (Register.RDI, Register.RSI, Register.RDX, Register.R10, Register.R8, Register.R9),
    4: (Register.RBX, Register.RCX, Register.RDX, Register.RSI, Register.RDI, Register.RBP),
}
"""The registers of a system call's arguments, by word size."""

_INT80 = b"\xcd\x80"


class Limit(enum.Enum):
    """Where a call finds its timeout; times are relative."""

    NONE = "it has none"
    MILLISECONDS = "an argument, negative for none"
    TIME = "a timespec of the program's word size"
    TIME_64 = "a timespec with words of 8 bytes"
    MICROSECONDS = "a timeval of the program's word size"
    RECEIVING = "SO_RCVTIMEO of its socket"
    SENDING = "SO_SNDTIMEO of its socket"
    RING = "io_uring_getevents_arg"


class _Call(NamedTuple):
    """A call: where its timeout is, which argument says so, and what it returns when the time is over."""

    limit: Limit
    argument: int = 0
    result: int = 0
    sets: bool = False
    """Whether its arguments 2 to 4 are sets of descriptors (select)."""
    reads: bool = False
    """Whether its file may be a terminal, for which VTIME counts."""


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

# The calls behind two numbers of i386: socketcall(2), whose arguments are in memory, and ipc(2).
_SOCKETCALL, _IPC = 102, 117
_SOCKET_CALLS = {
    3: _CONNECT, 5: _RECEIVE, 9: _SEND, 10: _RECEIVE, 11: _SEND, 12: _RECEIVE, 16: _SEND, 17: _RECEIVE, 18: _RECEIVE,
    19: _RECEIVE, 20: _SEND,
}  # fmt: skip
_IPC_CALLS = {1: _UNTIMED, 4: _Call(Limit.TIME, 5, -errno.EAGAIN)}

# What is made once more by the kernel, but with its whole time, or not counting the time of stops.
_MULTIPLEXING = (_SELECT, _PSELECT, _PSELECT_64, _PPOLL, _PPOLL_64)
_BEGUN_ANEW = {RESTART_NO_HANDLER: (_EVENTS, _EVENTS_64, *_MULTIPLEXING), _RESTART_SIGNAL: (_READ,)}

_RING_EXTENDED, _RING_ABSOLUTE, _RING_REGISTERED = 1 << 3, 1 << 5, 1 << 6


def call_of(registers: ctypes.Array[ctypes.c_ulong], space: AddressSpace) -> tuple[_Call, tuple[int, ...], int] | None:
    """
    Return what is to be known of the call that a stopped thread was in, with its arguments and their word size.

    None if the kernel is to be left to do with it what it does.
    """
    size = ptracecalls.word_size(registers)
    number = registers[Register.ORIG_RAX]
    if size == 8 and _reads(space, registers[Register.RIP] - 2, 2) == _INT80:
        size = 4  # a 64-bit program that makes calls of the other kind
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


def is_restarted(registers: ctypes.Array[ctypes.c_ulong], space: AddressSpace) -> bool:
    """Return whether a thread is in a call that failed only because of a stop, and is to be made once more."""
    return registers[Register.RAX] == EINTR and call_of(registers, space) is not None


def interrupted_wait(thread: Thread, registers: ctypes.Array[ctypes.c_ulong], now: float) -> InterruptedWait | None:
    """
    Return the wait that a stopped thread was in, if it has to be watched when it is made once more.

    The time that it had waited before is not known: it is over when its timeout has passed once more.
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
    if limit is None:
        return None
    seconds, returned = limit
    cleared = _sets(arguments, size) if call.sets else ()
    if result != EINTR and call in _MULTIPLEXING:
        # The kernel has stored what is left there, and would store that nothing is.
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
    """Return how long a call waits, and what it returns then; None if it waits for ever, or that cannot be known."""
    if at_terminal:
        # Most files are none, and that shows at once.
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
    """Return where select's sets of descriptors are, as (address, size): in words, as many as are needed."""
    count = min(arguments[0] & _MASK_32, 1 << 20)
    length = (count + 8 * size - 1) // (8 * size) * size
    return tuple((address, length) for address in arguments[1:4] if address and length)


def _is_device(tid: int, number: int) -> bool:
    # By its name: to ask for the status of a file, its file system may have to be waited for.
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{tid}/fd/{number & _MASK_32}").startswith("/dev/")
    return False


def _socket_limit(thread: Thread, number: int, call: _Call) -> tuple[float, int] | None:
    is_sending = call.limit is Limit.SENDING
    try:
        found = processcalls.socket_timeout(thread.tid, thread.pid, number & _MASK_32, sending=is_sending)
    except OSError:
        return None
    seconds, is_local = found
    if not seconds:
        return None
    # Only of connections that are made in the background the kernel says that they are not there yet.
    return seconds, -errno.EAGAIN if is_local and call is _CONNECT else call.result


def _terminal_limit(thread: Thread, number: int) -> tuple[float, int] | None:
    """Return the limit of a read that ends without data after some tenths of a second (termios(3), VMIN and VTIME)."""
    try:
        modes, characters = processcalls.terminal_modes(thread.tid, thread.pid, number & _MASK_32)
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
