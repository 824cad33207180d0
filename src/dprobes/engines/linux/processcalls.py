"""
What a process may ask of itself and of others besides ptrace(2): memory, files, signals, prctl(2).

The only file that makes these system calls, through ctypes. x86-64 Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from typing import TYPE_CHECKING

from dprobes.errors import system_error

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "RemoteMemory",
    "allow_tracer",
    "copy_descriptor",
    "end_with_parent",
    "is_local_socket",
    "same_memory",
    "send_signal",
    "set_process_name",
    "socket_timeout",
    "take_signal",
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
    """Read and write the memory of other processes with the rights that they have themselves."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(4096)
        self._local = _IoVector(ctypes.addressof(self._buffer), 4096)
        self._remote = _IoVector(0, 0)
        self._local_pointer = ctypes.pointer(self._local)
        self._remote_pointer = ctypes.pointer(self._remote)

    def read(self, pid: int, address: int, size: int) -> bytes:
        """Return up to ``size`` bytes (at most 65 535) at ``address``; fewer, or none, if the rest cannot be read."""
        if size > len(self._buffer):
            self._buffer = ctypes.create_string_buffer(size)
            self._local.base = ctypes.addressof(self._buffer)
        self._local.length = self._remote.length = size
        self._remote.base = address
        count = _process_vm_readv(pid, self._local_pointer, 1, self._remote_pointer, 1, 0)
        return ctypes.string_at(self._buffer, count) if count > 0 else b""

    def write(self, pid: int, address: int, data: bytes) -> bool:
        """Write at most 4096 bytes; return whether all of them could be written."""
        size = len(data)
        ctypes.memmove(self._buffer, data, size)
        self._local.length = self._remote.length = size
        self._remote.base = address
        return bool(_process_vm_writev(pid, self._local_pointer, 1, self._remote_pointer, 1, 0) == size)


_SYS_TGKILL = 234
_SYS_KCMP = 312
_KCMP_VM = 1


def same_memory(pid: int, other: int) -> bool | None:
    """Return whether two tasks share their memory (kcmp(2), KCMP_VM); None if the kernel does not say."""
    result = _libc.syscall(_SYS_KCMP, pid, other, _KCMP_VM, 0, 0)
    return None if result < 0 else result == 0


_SYS_PIDFD_GETFD = 438
_PIDFD_THREAD = os.O_EXCL


def copy_descriptor(tid: int, pid: int, number: int) -> int:
    """
    Return a descriptor for a file that a thread of a process has open as ``number``; raise OSError if that fails.

    A thread may have files of its own, and the first one may have ended; Linux before 6.9 knows only that one.
    """
    try:
        process = os.pidfd_open(tid, _PIDFD_THREAD)
    except OSError:
        process = os.pidfd_open(pid)
    try:
        return _check(_libc.syscall(_SYS_PIDFD_GETFD, process, number, 0))
    finally:
        os.close(process)


_SOL_SOCKET = 1
_SO_RCVTIMEO = 20
_SO_SNDTIMEO = 21
_SO_DOMAIN = 39
_AF_UNIX = 1


def socket_timeout(descriptor: int, *, sending: bool) -> float:
    """Return the seconds for which a socket lets its user wait, 0 for ever; raise OSError if it is no socket."""
    value = (ctypes.c_long * 2)()  # struct timeval
    size = ctypes.c_uint(ctypes.sizeof(value))
    option = _SO_SNDTIMEO if sending else _SO_RCVTIMEO
    _check(_libc.getsockopt(descriptor, _SOL_SOCKET, option, ctypes.byref(value), ctypes.byref(size)))
    return float(value[0] + value[1] / 1e6)


def is_local_socket(descriptor: int) -> bool:
    """Return whether a socket connects processes of one machine (unix(7))."""
    domain = ctypes.c_int()
    size = ctypes.c_uint(ctypes.sizeof(domain))
    _libc.getsockopt(descriptor, _SOL_SOCKET, _SO_DOMAIN, ctypes.byref(domain), ctypes.byref(size))
    return domain.value == _AF_UNIX


_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_PTRACER = 0x59616D61


def set_process_name(name: str) -> None:
    """Give this process the name that ``ps`` and ``top`` show (prctl(2), PR_SET_NAME)."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def allow_tracer(pid: int) -> None:
    """Let the process ``pid`` trace this one where the Yama module restricts that; elsewhere it does nothing."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that made it ends (prctl(2), PR_SET_PDEATHSIG)."""
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
"""How many words a ``sigset_t`` of the C library has; signal n is bit n - 1."""

_sigtimedwait = _libc.sigtimedwait
_sigtimedwait.argtypes = (ctypes.POINTER(ctypes.c_ulong), ctypes.c_void_p, ctypes.POINTER(_Timespec))


def take_signal(signals: Iterable[int], seconds: float) -> int:
    """
    Wait for one of some blocked signals and take it (sigtimedwait(2)).

    Return its number, or 0 if none has come in time, or a stop has interrupted the wait. ``signal.sigtimedwait`` makes
    up a signal then, if the time is over as well: it returns what happens to be in its memory (CPython 3.11 to 3.13).
    """
    wanted = (ctypes.c_ulong * _SIGNAL_SET_WORDS)(sum(1 << number - 1 for number in signals))
    whole = int(seconds)
    found: int = _sigtimedwait(wanted, None, _Timespec(whole, int((seconds - whole) * 1_000_000_000)))
    if found < 0 and (reason := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR):
        raise system_error(reason)
    return max(found, 0)
