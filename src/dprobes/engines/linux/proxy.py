"""
Attach and detach uprobes in a process of its own, which SIGKILL of this one does not end.

To write or take away a breakpoint the kernel looks up pages of the target, which it refuses a task that is being killed
(``fatal_signal_pending`` in ``mm/gup.c``). Who is killed just then leaves breakpoints behind: for good, because
``uprobe_unregister`` gives up ("failed to unregister, leaking uprobe").

A task that exits by itself is not being killed, and one that has begun to exit cannot be. So the last descriptor of a
link is not closed by close(2), but by the exit of a process that has copies of it. That process shares the memory with
this one, but not the table of descriptors; it runs a few instructions of ours, no C library and no Python. It waits
until we have closed ours, or have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
from _thread import allocate_lock
from functools import cache

from dprobes.engines.linux.machinecode import map_code

# Nothing that takes long is imported here: no typing, no errors of ours.

TYPE_CHECKING = False  # what type checkers take for true
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["call_in_proxy", "close_in_proxy"]

# rdi: flags of clone(2), rdx: calls; returns the process id, or a negative errno
#     mov %rdx,%r9; xor %esi,%esi; xor %edx,%edx; xor %r10d,%r10d; xor %r8d,%r8d; mov $56,%eax; syscall
#     test %rax,%rax; jz 1f; ret                    the stack is the caller's, and nobody touches it
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
"""A system call: its number, which its result replaces, and its arguments."""
_END = struct.Struct("=q").pack(-1)

_CLONE_VM, _CLONE_FILES = 0x100, 0x400
_WALL = 0x40000000  # our child sends no signal when it ends

_SYS_READ, _SYS_WRITE, _SYS_CLOSE_RANGE = 0, 1, 436
_LAST_DESCRIPTOR = (1 << 31) - 1

_starting = allocate_lock()
"""Held while a proxy has copies of descriptors that others close."""


@cache
def _entry() -> Callable[[int, int, int], int]:
    prototype = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_void_p)
    return prototype(map_code(_CODE))


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Let no signal come meanwhile: a proxy must not run a handler of ours, and what is begun is brought to its end."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Proxy:
    """Make system calls, one after the other, in a process that shares our memory; it begins at once."""

    def __init__(self, flags: int, calls: Sequence[tuple[int, ...]]) -> None:
        packed = b"".join(_CALL.pack(*call, *(0,) * (7 - len(call))) for call in calls)
        self._calls = ctypes.create_string_buffer(packed + _END)
        self._pid: int = _entry()(_CLONE_VM | flags, 0, ctypes.addressof(self._calls))
        if self._pid < 0:
            raise OSError(-self._pid, f"clone: {os.strerror(-self._pid)}")

    def wait(self) -> bool:
        """Wait for its end, as it has our memory until then; return whether it came by itself."""
        interruption: BaseException | None = None
        status = 0
        while True:
            try:
                _, status = os.waitpid(self._pid, _WALL)
            except ChildProcessError:
                break  # somebody else has waited for it
            except BaseException as error:  # noqa: BLE001 - a signal handler's; it is raised when nobody has our memory
                interruption = error
                continue
            break
        if interruption is not None:
            raise interruption
        return os.WIFEXITED(status)

    def result(self, number: int) -> int:
        """Return what a call came to, after the end."""
        result: int = _CALL.unpack_from(self._calls, number * _CALL.size)[0]
        return result


def call_in_proxy(number: int, *arguments: int) -> int:
    """
    Make a system call that attaches uprobes, and return what it returns; OSError as the kernel answers.

    A descriptor that it makes is one of this process. Where no proxy can be had, this process makes the call.
    """
    with _signals_held():
        while True:
            try:
                proxy = _Proxy(_CLONE_FILES, [(number, *arguments)])
            except OSError:
                return _call(number, *arguments)
            if proxy.wait():
                break
            # Somebody has killed it. What it may have left behind goes with what is attached now.
    result = proxy.result(0)
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


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
    Close the last descriptors of links; what they attached is gone when this returns.

    Where no proxy can be had, this process closes them itself.
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
    """Hold copies of descriptors in a proxy until ``finish``, or until this process has ended."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        begun, says_begun = os.pipe()
        waits, self._ours = os.pipe()
        byte = ctypes.create_string_buffer(1)
        at = ctypes.addressof(byte)
        # Copies of other descriptors would keep what others close at the same time.
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
        """Let the copies go; they are gone when this returns."""
        os.close(self._ours)  # it reads the end
        self._proxy.wait()


def _between(kept: set[int]) -> Iterator[tuple[int, int]]:
    """Iterate over the ranges of descriptors, first and last, that leave some out."""
    first = 0
    for descriptor in sorted(kept):
        if first < descriptor:
            yield first, descriptor - 1
        first = descriptor + 1
    yield first, _LAST_DESCRIPTOR
