"""
System calls in a proxy process: for uprobes, which SIGKILL must not interrupt, and for files of other processes.

To write or remove a breakpoint, the kernel looks up pages of the target. It refuses this to a task that is being killed
(``fatal_signal_pending`` in ``mm/gup.c``). So a task that is killed meanwhile leaves breakpoints. They are never
removed, because ``uprobe_unregister`` gives up ("failed to unregister, leaking uprobe").

A task that exits by itself has no fatal signal pending, and cannot be killed once it has begun to exit. So dprobes
closes the last descriptor of a link not by close(2), but by the exit of a proxy that has copies of the descriptors. The
proxy shares memory with this process (CLONE_VM), but not its table of descriptors. It runs a few generated
instructions, without the C library or Python. It waits until this process has closed its own descriptors, or has
exited.

A file that another process has open may block a system call for as long as the file's owner likes. Examples are a
socket whose peer does not read, and a file on the owner's FUSE file system, which is called when a descriptor is
closed. So this process never opens such a file. A proxy takes a copy of the descriptor and makes the calls. If a call
does not return, the proxy is abandoned.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import struct
from _thread import allocate_lock
from functools import cache
from typing import TYPE_CHECKING

from dprobes.platform.linux.procfs import thread_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["call_in_proxy", "call_with_file", "close_in_proxy", "map_code", "map_file", "unmap_code"]

_PROT_READ, _PROT_EXEC, _MAP_PRIVATE = 1, 4, 2


def map_code(code: bytes) -> int:
    """
    Map executable code and return its address; raise OSError if this process may not map code.

    The code is mapped from a file in memory. So no page is ever both writable and executable.
    """
    file = os.memfd_create("dprobes")
    try:
        os.write(file, code)
        return map_file(file, len(code))
    finally:
        os.close(file)


def map_file(file: int, size: int) -> int:
    """Return the address of the first ``size`` bytes of an open file, mapped as by ``map_code``, or raise OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    address: int | None = libc.mmap(None, size, _PROT_READ | _PROT_EXEC, _MAP_PRIVATE, file, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def unmap_code(address: int, size: int) -> None:
    """Unmap ``size`` bytes of code, which no thread may be executing."""
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))


# Imports that take long are avoided here, such as those of typing and dprobes.errors.


# rdi: flags of clone(2), rdx: calls; returns the process id, or a negative errno
#     mov %rdx,%r9; xor %esi,%esi; xor %edx,%edx; xor %r10d,%r10d; xor %r8d,%r8d; mov $56,%eax; syscall
#     test %rax,%rax; jz 1f; ret                    the stack is the caller's, and is not used
# 1:  mov %r9,%rbx
# 2:  mov (%rbx),%rax; test %rax,%rax; js 3f
#     mov 8(%rbx),%rdi; mov 16(%rbx),%rsi; mov 24(%rbx),%rdx; mov 32(%rbx),%r10; mov 40(%rbx),%r8; mov 48(%rbx),%r9
#     syscall; mov %rax,(%rbx); add $56,%rbx; jmp 2b
# 3:  mov $60,%eax; xor %edi,%edi; syscall          exit(2)
_CODE = bytes.fromhex(
    "49 89 d1 31 f6 31 d2 45 31 d2 45 31 c0 b8 38 00 00 00 0f 05"
    "48 85 c0 74 01 c3"
    "4c 89 cb"
    "48 8b 03 48 85 c0 78 23"
    "48 8b 7b 08 48 8b 73 10 48 8b 53 18 4c 8b 53 20 4c 8b 43 28 4c 8b 4b 30"
    "0f 05 48 89 03 48 83 c3 38 eb d5"
    "b8 3c 00 00 00 31 ff 0f 05"
)
_CALL = struct.Struct("=7q")
"""System call: its number, which its result replaces, and its arguments."""
_END = struct.Struct("=q").pack(-1)

_CLONE_VM, _CLONE_FILES = 0x100, 0x400
_WALL = 0x40000000  # a proxy sends no signal when it ends

_SYS_READ, _SYS_WRITE, _SYS_CLOSE_RANGE, _SYS_PIDFD_GETFD = 0, 1, 436, 438
_LAST_DESCRIPTOR = (1 << 31) - 1

_starting = allocate_lock()
"""Lock that is held while a proxy has copies of descriptors that other threads close."""


@cache
def _entry() -> Callable[[int, int, int], int]:
    prototype = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_void_p)
    return prototype(map_code(_CODE))


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Block all signals in the context: a proxy must not run this process's signal handlers, nor be interrupted."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Proxy:
    """
    Process that shares this process's memory and makes a sequence of system calls.

    The constructor starts it, and raises OSError if that fails.
    """

    def __init__(self, flags: int, calls: Sequence[tuple[int, ...]]) -> None:
        packed = b"".join(_CALL.pack(*call, *(0,) * (7 - len(call))) for call in calls)
        self._calls = ctypes.create_string_buffer(packed + _END)
        self._pid: int = _entry()(_CLONE_VM | flags, 0, ctypes.addressof(self._calls))
        if self._pid < 0:
            raise OSError(-self._pid, f"clone: {os.strerror(-self._pid)}")
        self._memory: Sequence[object] = ()

    def keep(self, memory: Sequence[object]) -> None:
        """Keep references to the buffers of the calls, so that they are not freed before the proxy has ended."""
        self._memory = memory

    def wait(self) -> bool:
        """Wait until the proxy has ended; return False if a signal killed it."""
        interruption: BaseException | None = None
        status = 0
        while True:
            try:
                _, status = os.waitpid(self._pid, _WALL)
            except ChildProcessError:
                break  # other code has waited for it
            except BaseException as error:  # noqa: BLE001 - from a signal handler; it is raised after the proxy's end
                interruption = error
                continue
            break
        if interruption is not None:
            raise interruption
        return os.WIFEXITED(status)

    def wait_for(self, milliseconds: int) -> bool:
        """
        Wait at most ``milliseconds`` for the proxy to end, then kill it; return True if it exited by itself.

        Time in which the proxy waits for a CPU does not count. If the proxy survives the kill, it is abandoned.
        """
        process = os.pidfd_open(self._pid)
        try:
            poll = select.poll()
            poll.register(process, select.POLLIN)
            while not poll.poll(milliseconds):
                if thread_state(self._pid) == "R":
                    continue  # it had no CPU
                signal.pidfd_send_signal(process, signal.SIGKILL)
                if not poll.poll(_KILLED):
                    _abandoned.append(self)
                    return False
                break
        finally:
            os.close(process)
        return self.wait()

    def has_ended(self) -> bool:
        """Return True if an abandoned proxy has ended by now."""
        try:
            return os.waitpid(self._pid, _WALL | os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True

    def result(self, number: int) -> int:
        """
        Return the result of the call with the index ``number``, a negative errno on failure.

        The proxy must have ended.
        """
        result: int = _CALL.unpack_from(self._calls, number * _CALL.size)[0]
        return result


def call_in_proxy(number: int, *arguments: int) -> int:
    """
    Make a system call that attaches uprobes in a proxy, and return its result; raise OSError if it fails.

    If the result is a descriptor, this process owns it. If no proxy can be created, this process makes the call itself.
    """
    with _signals_held():
        while True:
            try:
                proxy = _Proxy(_CLONE_FILES, [(number, *arguments)])
            except OSError:
                return _call(number, *arguments)
            if proxy.wait():
                break
            # The proxy was killed. Breakpoints that it may have left are removed together with those of the next
            # attempt.
    result = proxy.result(0)
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


_PATIENCE, _KILLED = 2000, 100
"""Milliseconds for calls with a file of another process, and for the end of a killed proxy."""

_abandoned: list[_Proxy] = []
"""Proxies that may not have ended, and may still write to buffers of their calls."""


def call_with_file(
    process: int,
    number: int,
    calls: Callable[[int], Sequence[tuple[int, ...]]],
    ours: Sequence[int] = (),
    memory: Sequence[object] = (),
) -> list[int]:
    """
    Make system calls with a file that another process has open, and return their results.

    ``process`` is a PID file descriptor, and ``number`` the file's descriptor in that process. ``calls`` gets a copy of
    the descriptor and returns the calls, which may also use the descriptors ``ours``. ``memory`` keeps their buffers
    alive. Raise OSError if the file cannot be copied, or the calls take too long.
    """
    _abandoned[:] = [proxy for proxy in _abandoned if not proxy.has_ended()]
    kept = {process, *ours}
    file = next(each for each in range(len(kept) + 1) if each not in kept)  # the first free one
    others: list[tuple[int, ...]] = [(_SYS_CLOSE_RANGE, first, last) for first, last in _between(kept)]
    take: list[tuple[int, ...]] = [*others, (_SYS_PIDFD_GETFD, process, number)]
    wanted = calls(file)
    with _signals_held(), _starting:
        proxy = _Proxy(0, [*take, *wanted])
        proxy.keep(memory)
        has_ended = proxy.wait_for(_PATIENCE)
    if not has_ended:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    if (taken := proxy.result(len(others))) < 0:
        raise OSError(-taken, os.strerror(-taken))
    assert taken == file, "a proxy has the first descriptor that is free"
    return [proxy.result(len(take) + each) for each in range(len(wanted))]


def _call(number: int, *arguments: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result: int = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def close_in_proxy(descriptors: Sequence[int]) -> None:
    """
    Close the last descriptors of links. The kernel has removed their probes when this returns.

    If no proxy can be created, this process closes the descriptors itself.
    """
    if not descriptors:
        return
    with _signals_held():
        holder = None
        with contextlib.suppress(OSError):
            holder = _Holder(descriptors)
        for descriptor in descriptors:
            # The kernel frees a descriptor also when close(2) reports an error.
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if holder is not None:
            holder.finish()


class _Holder:
    """Proxy that has copies of file descriptors open until ``finish``, or until this process has ended."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        begun, says_begun = os.pipe()
        waits, self._ours = os.pipe()
        byte = ctypes.create_string_buffer(1)
        at = ctypes.addressof(byte)
        # Copies of other descriptors would keep files open that other threads close at the same time.
        others = _between({*descriptors, says_begun, waits})
        calls: list[tuple[int, ...]] = [(_SYS_CLOSE_RANGE, first, last) for first, last in others]
        calls += [(_SYS_WRITE, says_begun, at, 1), (_SYS_READ, waits, at, 1)]
        self._byte = byte
        with _starting:
            try:
                self._proxy = _Proxy(0, calls)
            except OSError:
                for descriptor in (begun, says_begun, waits, self._ours):
                    os.close(descriptor)
                raise
            os.close(waits)
            os.close(says_begun)
            os.read(begun, 1)
        os.close(begun)

    def finish(self) -> None:
        """Make the proxy close its copies, and wait until it has."""
        os.close(self._ours)  # its read returns the end of the pipe
        self._proxy.wait()


def _between(kept: set[int]) -> Iterator[tuple[int, int]]:
    """Iterate over the ranges (first, last) of descriptor numbers that contain none of the ``kept`` ones."""
    first = 0
    for descriptor in sorted(kept):
        if first < descriptor:
            yield first, descriptor - 1
        first = descriptor + 1
    yield first, _LAST_DESCRIPTOR
