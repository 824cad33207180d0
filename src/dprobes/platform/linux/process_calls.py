"""
System calls, other than ptrace(2), about this process and others: memory, files, signals, prctl(2).

No other file makes these system calls. They are called through ctypes, on x86-64 Linux only.

A process that has a file in memory open can truncate it. An access to the missing part of a mapping then raises SIGBUS.
So a file is sealed before it is sent to another process (memfd_create(2), fcntl(2)); this fixes its size.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
import threading
from _thread import start_new_thread
from typing import TYPE_CHECKING

from dprobes.errors import system_error
from dprobes.platform.linux.call_proxy import call_with_file
from dprobes.platform.linux.procfs import living_thread, process_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "MEMORY_SEALS",
    "ROBUST_LIST_SIZE",
    "RemoteMemory",
    "SignalSet",
    "allow_tracer",
    "end_with_parent",
    "growing_memory_file",
    "memory_file",
    "note_end_of_thread",
    "processes_in_memory_of",
    "same_file",
    "same_memory",
    "send_file",
    "send_signal",
    "set_process_name",
    "signal_descriptor",
    "signal_set",
    "socket_timeout",
    "take_file",
    "take_signal",
    "terminal_modes",
]

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> int:
    if result < 0:
        raise system_error(ctypes.get_errno())
    return result


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_VM_ARGUMENTS = (
    ctypes.c_int,
    ctypes.POINTER(_IoVector),
    ctypes.c_ulong,
    ctypes.POINTER(_IoVector),
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_process_vm_readv = _libc.process_vm_readv
_process_vm_readv.argtypes = _VM_ARGUMENTS
_process_vm_readv.restype = ctypes.c_ssize_t
_process_vm_writev = _libc.process_vm_writev
_process_vm_writev.argtypes = _VM_ARGUMENTS
_process_vm_writev.restype = ctypes.c_ssize_t


class RemoteMemory:
    """
    Access to the memory of other processes with process_vm_readv(2), which respects the permissions of their mappings.

    Buffers are reused: an object is for one thread.
    """

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(4096)
        self._local = _IoVector(ctypes.addressof(self._buffer), 4096)
        self._remote = _IoVector(0, 0)
        self._local_pointer = ctypes.pointer(self._local)
        self._remote_pointer = ctypes.pointer(self._remote)

    def read(self, pid: int, address: int, size: int) -> bytes:
        """
        Return up to ``size`` bytes (at most 65 535) of a process at ``address``.

        Fewer, or none, if some are unreadable.
        """
        if size > len(self._buffer):
            self._buffer = ctypes.create_string_buffer(size)
            self._local.base = ctypes.addressof(self._buffer)
        self._local.length = self._remote.length = size
        self._remote.base = address
        count = _process_vm_readv(pid, self._local_pointer, 1, self._remote_pointer, 1, 0)
        return ctypes.string_at(self._buffer, count) if count > 0 else b""

    def write(self, pid: int, address: int, data: bytes) -> bool:
        """Write at most 4096 bytes to a process's memory; return False unless all of them were written."""
        size = len(data)
        ctypes.memmove(self._buffer, data, size)
        self._local.length = self._remote.length = size
        self._remote.base = address
        return bool(_process_vm_writev(pid, self._local_pointer, 1, self._remote_pointer, 1, 0) == size)


_SYS_TGKILL = 234
_SYS_KCMP = 312
_KCMP_VM = 1


def same_memory(pid: int, other: int) -> bool | None:
    """Return True if two tasks share their memory (kcmp(2), KCMP_VM), and None if the call fails."""
    result = _libc.syscall(_SYS_KCMP, pid, other, _KCMP_VM, 0, 0)
    return None if result < 0 else result == 0


def processes_in_memory_of(tid: int) -> list[int]:
    """Return the other processes that run in the memory of a thread, as far as the kernel provides that information."""
    mine = process_of(tid)
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and (pid := int(name)) != mine:
            same = same_memory(tid, pid)
            if same or (same is False and same_memory(tid, living_thread(pid))):
                found.append(pid)
    return found


_KCMP_FILE = 0


def same_file(number: int, pid: int, other: int) -> bool | None:
    """
    Return True if two descriptors refer to the same open file description (kcmp(2), KCMP_FILE).

    ``number`` is a descriptor of this process, ``other`` one of the process ``pid``. Return None if the call fails.
    """
    result = _libc.syscall(_SYS_KCMP, os.getpid(), pid, _KCMP_FILE, ctypes.c_ulong(number), ctypes.c_ulong(other))
    return None if result < 0 else result == 0


_PIDFD_THREAD = os.O_EXCL

_SYS_SENDMSG, _SYS_BIND, _SYS_CONNECT, _SYS_GETSOCKNAME, _SYS_IOCTL, _SYS_PIDFD_GETFD = 46, 49, 42, 51, 16, 438
_TCGETS = 0x5401
"""Numbers of system calls and ioctls: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/ioctls.h."""


def _process_of(tid: int, pid: int) -> int:
    """
    Return a PID file descriptor of a thread, because a thread may have its own table of descriptors.

    Before Linux 6.9 it refers to the process.
    """
    try:
        return os.pidfd_open(tid, _PIDFD_THREAD)
    except OSError:
        return os.pidfd_open(pid)


def _with_file_of(
    tid: int,
    pid: int,
    number: int,
    calls: Callable[[int], Sequence[tuple[int, ...]]],
    ours: Sequence[int] = (),
    memory: Sequence[object] = (),
) -> list[int]:
    """
    Call ``call_with_file`` for a file that a thread has open as ``number``, and return its results.

    Raise OSError at once if an earlier call for the process took too long.
    """
    if pid in _slow:
        raise system_error(errno.ETIMEDOUT)
    process = _process_of(tid, pid)
    try:
        return call_with_file(process, number, calls, ours, memory)
    except TimeoutError:
        _slow.add(pid)
        raise
    finally:
        os.close(process)


_slow: set[int] = set()
"""Processes with a file that has blocked a proxy. Their files are not used any more."""

_AF_UNIX = 1
_AUTOBIND_SIZE = 8
"""Size in bytes of the address that the kernel generates for a socket: family, a zero, five digits (unix(7))."""
_IOVEC, _MSGHDR = struct.Struct("=QQ"), struct.Struct("=QIxxxxQQQQixxxx")
_RIGHTS = struct.Struct("=Qiiixxxx")


def send_file(tid: int, pid: int, number: int, file: int) -> None:
    """
    Send the open file ``file`` to a thread through a datagram socket that the thread has open as ``number``.

    The socket is new, and connected with itself, so that it receives no other message. Raise OSError if that fails, or
    takes too long: the process may have replaced the socket by another file.
    """
    address = ctypes.create_string_buffer(_AF_UNIX.to_bytes(2, "little"), _AUTOBIND_SIZE)
    size = ctypes.c_uint(_AUTOBIND_SIZE)
    byte = ctypes.create_string_buffer(1)
    vector = ctypes.create_string_buffer(_IOVEC.pack(ctypes.addressof(byte), 1))
    control_size = _RIGHTS.size - 4
    rights = ctypes.create_string_buffer(_RIGHTS.pack(control_size, _SOL_SOCKET, socket.SCM_RIGHTS, file))
    parts = 0, 0, ctypes.addressof(vector), 1, ctypes.addressof(rights), _RIGHTS.size, 0
    message = ctypes.create_string_buffer(_MSGHDR.pack(*parts))
    where = ctypes.addressof(address)

    def calls(taken: int) -> Sequence[tuple[int, ...]]:
        return (
            (_SYS_BIND, taken, where, 2),
            (_SYS_GETSOCKNAME, taken, where, ctypes.addressof(size)),
            (_SYS_CONNECT, taken, where, _AUTOBIND_SIZE),
            (_SYS_SENDMSG, taken, ctypes.addressof(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL),
        )

    memory = address, size, byte, vector, rights, message
    for result in _with_file_of(tid, pid, number, calls, [file], memory):
        if result < 0:
            raise system_error(-result)


def take_file(tid: int, pid: int, number: int) -> int:
    """
    Copy a file that a thread has open into this process (pidfd_getfd(2)) and return the new descriptor.

    Raise OSError if that fails.
    """
    process = _process_of(tid, pid)
    try:
        return _check(_libc.syscall(_SYS_PIDFD_GETFD, process, number, 0))
    finally:
        os.close(process)


_SOL_SOCKET = 1
_SO_RCVTIMEO = 20
_SO_SNDTIMEO = 21
_SO_DOMAIN = 39


def socket_timeout(tid: int, pid: int, number: int, *, sending: bool) -> tuple[float, bool]:
    """
    Return a socket's timeout in seconds, 0 for none, and whether the socket is AF_UNIX.

    With ``sending`` the timeout is SO_SNDTIMEO, else SO_RCVTIMEO. Raise OSError if the thread has no socket open as
    ``number``.
    """
    copy = take_file(tid, pid, number)
    value, domain = (ctypes.c_long * 2)(), ctypes.c_int()  # struct timeval
    option = _SO_SNDTIMEO if sending else _SO_RCVTIMEO
    try:
        for each, where in ((option, value), (_SO_DOMAIN, domain)):
            size = ctypes.c_uint(ctypes.sizeof(where))
            _check(_libc.getsockopt(copy, _SOL_SOCKET, each, ctypes.byref(where), ctypes.byref(size)))
    finally:
        # These calls do not block, but the last close of a file may (SO_LINGER), if the process has closed it
        # meanwhile.
        start_new_thread(os.close, (copy,))
    return float(value[0] + value[1] / 1e6), domain.value == _AF_UNIX


_TERMIOS = struct.Struct("=IIIIB19s")
"""``struct termios`` of the kernel (include/uapi/asm-generic/termbits.h)."""


def terminal_modes(tid: int, pid: int, number: int) -> tuple[int, bytes]:
    """
    Return the local modes and the control characters (termios(3)) of the terminal that a thread has open as ``number``.

    Raise OSError if that is no terminal, or the call takes too long.
    """
    found = ctypes.create_string_buffer(_TERMIOS.size)

    def calls(taken: int) -> Sequence[tuple[int, ...]]:
        return [(_SYS_IOCTL, taken, _TCGETS, ctypes.addressof(found))]

    (result,) = _with_file_of(tid, pid, number, calls, memory=(found,))
    if result < 0:
        raise system_error(-result)
    *_, modes, _, characters = _TERMIOS.unpack(found.raw)
    return modes, characters


_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_PTRACER = 0x59616D61


def set_process_name(name: str) -> None:
    """Give this process the name that ``ps`` and ``top`` show (prctl(2), PR_SET_NAME)."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def allow_tracer(pid: int) -> None:
    """
    Allow the process ``pid`` to trace this one under Yama's restrictions (PR_SET_PTRACER).

    Do nothing without Yama.
    """
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def end_with_parent() -> None:
    """Make the kernel send SIGKILL to this process when its parent ends (prctl(2), PR_SET_PDEATHSIG)."""
    parent = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def send_signal(pid: int, tid: int, number: int) -> None:
    """Send a signal to one thread (tgkill(2))."""
    _check(_libc.syscall(_SYS_TGKILL, pid, tid, number))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_SIGNAL_SET_WORDS = 16
"""Number of words in a ``sigset_t`` of the C library; signal n is bit n - 1."""

_sigtimedwait = _libc.sigtimedwait
_sigtimedwait.argtypes = (ctypes.POINTER(ctypes.c_ulong), ctypes.c_void_p, ctypes.POINTER(_Timespec))


SignalSet = ctypes.Array[ctypes.c_ulong]


def signal_set(signals: Iterable[int]) -> SignalSet:
    """Return a ``sigset_t`` of the C library with these signals."""
    return (ctypes.c_ulong * _SIGNAL_SET_WORDS)(sum(1 << number - 1 for number in signals))


def signal_descriptor(wanted: SignalSet) -> int:
    """Return a descriptor that is readable while one of the blocked signals ``wanted`` is pending (signalfd(2))."""
    return _check(_libc.signalfd(-1, wanted, os.O_CLOEXEC | os.O_NONBLOCK))


def take_signal(wanted: SignalSet, seconds: float) -> int:
    """
    Wait at most ``seconds`` for one of the blocked signals ``wanted``, and dequeue it (sigtimedwait(2)).

    Return the signal's number, or 0 if none arrived in time or a stop interrupted the wait. ``signal.sigtimedwait`` is
    not used: if a stop interrupts it and the time is over, CPython 3.11 to 3.13 return uninitialized memory.
    """
    whole = int(seconds)
    found: int = _sigtimedwait(wanted, None, _Timespec(whole, int((seconds - whole) * 1_000_000_000)))
    if found < 0 and (reason := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR):
        raise system_error(reason)
    return max(found, 0)


# A list of words in memory in which the kernel marks the end of a thread: set_robust_list(2).
#
# The list is meant for locks, but any word in it can show other processes that the thread has ended, also after a
# ``kill -9``. The C library has a list for each thread. A thread that sets another list abandons the locks in the first
# one, so it must be a thread without locks.
#
# ::
#
#     struct robust_list_head    next          the first element, or the head itself (include/uapi/linux/futex.h)
#                                offset        from an element to its word
#                                pending
#     struct robust_list         next
#     word                       thread id, until the kernel sets bit 30 instead


_LAYOUT = struct.Struct("=IxxxxQQqQ")
"""The word, an element, and the head."""
ROBUST_LIST_SIZE = _LAYOUT.size
_ELEMENT, _HEAD = 8, 16
_HEAD_SIZE = 24

_SET_ROBUST_LIST = 273
"""Number of the system call (arch/x86/entry/syscalls/syscall_64.tbl)."""


def note_end_of_thread(memory: memoryview, address: int) -> None:
    """
    Make the kernel set bit 30 (FUTEX_OWNER_DIED) of the word at the start of ``memory`` when the calling thread ends.

    ``address`` is the address of this memory; its ``ROBUST_LIST_SIZE`` bytes must stay mapped. Raise OSError if the
    kernel does not support that.
    """
    head, element = address + _HEAD, address + _ELEMENT
    memory[:ROBUST_LIST_SIZE] = _LAYOUT.pack(threading.get_native_id(), head, element, -_ELEMENT, 0)
    if _libc.syscall(ctypes.c_long(_SET_ROBUST_LIST), ctypes.c_void_p(head), ctypes.c_size_t(_HEAD_SIZE)) < 0:
        raise system_error(ctypes.get_errno())


MEMORY_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memory_file(name: str, size: int) -> int:
    """Return a descriptor for a new file of ``size`` zeros, which no process can make shorter or longer."""
    return _sealed(name, size, MEMORY_SEALS)


def growing_memory_file(name: str) -> int:
    """Return a descriptor for a new empty file, which can only be made longer."""
    return _sealed(name, 0, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)


def _sealed(name: str, size: int, seals: int) -> int:
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(file)
        raise
    return file
