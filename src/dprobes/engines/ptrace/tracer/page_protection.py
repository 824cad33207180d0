"""
Protection of pages against writes, for watchpoints without a debug register.

An address space has one object of userfaultfd(2), which a thread of the process creates and does not keep. The tracer
has the only descriptor. When it is closed, for example because the tracer was killed, the kernel removes the protection
and wakes all waiting threads. So no other process may have a copy.

The kernel can protect only anonymous and shared memory (fs/userfaultfd.c). A page of a file that is mapped private,
such as a program's initialized variables, is replaced by anonymous memory with the same content. The copy is made
elsewhere and moved to its place by one mremap(2), while all threads are stopped.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer.call_injection import (
    MMAP,
    MPROTECT,
    MUNMAP,
    InjectionError,
    ThreadBusyError,
    injecting,
    may_inject,
)
from dprobes.engines.ptrace.tracer.native.handler_memory import receive_file
from dprobes.engines.ptrace.tracer.protected_pages import ProtectedPages
from dprobes.errors import TargetError, reason_of, reason_of_number
from dprobes.platform.linux import process_calls, ptrace_calls
from dprobes.platform.linux.ptrace_calls import Register
from dprobes.platform.linux.userfault_calls import DEVICE, NEW_FLAGS, NEW_OBJECT, UserFaults
from dprobes.target.process_maps import PAGE_SIZE, mapping_at

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.ptrace.tracer.call_injection import Call
    from dprobes.engines.ptrace.tracer.tracer_state import Thread
    from dprobes.target.process_maps import Mapping

__all__ = ["ProtectionError", "make_object", "protect_page"]

# Numbers of system calls by word size.
_USERFAULTFD = {8: 323, 4: 374}
_CLOSE = {8: 3, 4: 6}
_IOCTL = {8: 16, 4: 54}
_MREMAP = {8: 25, 4: 163}

_READ, _WRITE, _EXECUTE = 1, 2, 4
_PRIVATE_ANONYMOUS = 0x22
_MAYMOVE_FIXED = 3


class ProtectionError(Exception):
    """Error of a page that cannot be protected. The text completes "... because"."""


def make_object(thread: Thread) -> ProtectedPages:
    """
    Create a userfaultfd by system calls of a thread at an event stop, and copy its descriptor into this process.

    All other threads of the process must be stopped. Raise ``ProtectionError`` if that is not possible, and
    ``ThreadBusyError`` if another stop is needed.
    """
    if not may_inject(thread):
        raise ProtectionError("the process may make no other system calls than its own (seccomp, or a shadow stack)")
    size = thread.space.word_size
    try:
        with injecting(thread) as call:
            number = call(_USERFAULTFD[size], NEW_FLAGS)
            if number == -errno.EPERM:
                number = _by_device(thread, call)
            if number < 0:
                raise ProtectionError(f"userfaultfd(2): {reason_of_number(-number)}")
            try:
                copy = process_calls.take_file(thread.tid, thread.pid, number)
            finally:
                call(_CLOSE[size], number)
    except ThreadBusyError:
        raise
    except InjectionError as error:
        raise ProtectionError(str(error)) from error
    except OSError as error:
        raise ProtectionError(f"pidfd_getfd(2): {reason_of(error)}") from error
    try:
        return ProtectedPages(UserFaults(copy))
    except OSError as error:
        os.close(copy)
        raise ProtectionError(f"this kernel lacks a part of userfaultfd(2): {reason_of(error)}") from error


def _by_device(thread: Thread, call: Call) -> int:
    """Make an object by the device, which root opens and hands to the process; return its number, or an errno."""
    try:
        device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        needed = "without root, the process needs CAP_SYS_PTRACE or the machine vm.unprivileged_userfaultfd = 1"
        raise ProtectionError(
            f"userfaultfd(2): {reason_of_number(errno.EPERM)}; {DEVICE}: {reason_of(error)}; {needed}"
        ) from error
    opened: list[int] = []
    try:
        if thread.space.word_size == 4:
            raise ProtectionError("a 32-bit process of another user cannot be handed the device")
        page = call(MMAP[8], 0, PAGE_SIZE, _READ | _WRITE, _PRIVATE_ANONYMOUS, -1, 0)
        if page < 0:
            return page
        try:
            received = receive_file(thread, call, page, device, opened)
            return call(_IOCTL[8], received, NEW_OBJECT, NEW_FLAGS)
        finally:
            for number in opened:
                call(_CLOSE[8], number)
            call(MUNMAP[8], page, PAGE_SIZE)
    finally:
        os.close(device)


def protect_page(
    pages: ProtectedPages, thread: Thread, threads: Iterable[Thread], page: int, *, are_stopped: bool
) -> None:
    """
    Protect a page of the memory of a thread at an event stop, in a space with these ``threads``.

    If not all of them are stopped, the page of a private mapping of a file is refused.

    Raise ``ProtectionError`` if that is not possible, and ``ThreadBusyError`` if another stop is needed.
    """
    space = thread.space
    try:
        mapping = mapping_at(thread.tid, page)
    except TargetError:
        mapping = None
    if mapping is None:
        raise ProtectionError(f"nothing is mapped at {page:#x}")
    if mapping.path == "[stack]" or any(_is_stack_of(each, mapping) for each in threads):
        raise ProtectionError(f"{page:#x} is on a thread's stack, where each call would stop the thread")
    if mapping.is_file and mapping.permissions[3] == "p":
        if not are_stopped:
            raise ProtectionError("a thread that waits in the kernel cannot be stopped now")
        _make_anonymous(thread, mapping, page)
    try:
        os.pread(space.memory, 1, page)  # kernels before 6.4 do not protect pages that do not exist yet
        pages.protect(page)
    except OSError as error:
        kind = f"a mapping of '{mapping.path}'" if mapping.path else "this kind of memory"
        raise ProtectionError(f"the kernel cannot protect {kind}: {reason_of(error)}") from error


def _is_stack_of(thread: Thread, mapping: Mapping) -> bool:
    registers = ptrace_calls.Registers()
    try:
        ptrace_calls.get_registers(thread.tid, registers)
    except OSError:
        return False
    return mapping.start <= registers[Register.RSP] < mapping.end


def _make_anonymous(thread: Thread, mapping: Mapping, page: int) -> None:
    """Replace a page of a private mapping of a file by anonymous memory with the same content."""
    space, size = thread.space, thread.space.word_size
    allowed = [_READ, _WRITE, _EXECUTE]
    protection = sum(bit for bit, letter in zip(allowed, mapping.permissions, strict=False) if letter != "-")
    try:
        with injecting(thread) as call:
            copy = call(MMAP[size], 0, PAGE_SIZE, _READ | _WRITE, _PRIVATE_ANONYMOUS, -1, 0)
            if copy < 0:
                raise ProtectionError(f"mmap(2): {reason_of_number(-copy)}")
            moved = -errno.EFAULT
            with contextlib.suppress(OSError):
                if os.pwrite(space.memory, os.pread(space.memory, PAGE_SIZE, page), copy) == PAGE_SIZE:
                    moved = call(MPROTECT[size], copy, PAGE_SIZE, protection)
            if moved >= 0:
                moved = call(_MREMAP[size], copy, PAGE_SIZE, PAGE_SIZE, _MAYMOVE_FIXED, page)
            if moved != page:
                call(MUNMAP[size], copy, PAGE_SIZE)
                raise ProtectionError(f"mremap(2): {reason_of_number(-moved)}")
    except ThreadBusyError:
        raise
    except InjectionError as error:
        raise ProtectionError(str(error)) from error
