"""
userfaultfd(2) in write-protect mode, through ioctl(2). No other file makes these calls.

A userfaultfd reports writes to pages of the process that created it. Structures and numbers are from
``include/uapi/linux/userfaultfd.h``. Write protection of anonymous memory exists since Linux 5.7, of shared memory
since 5.19, and ``/dev/userfaultfd`` since 6.1.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import struct
from fcntl import ioctl
from typing import NamedTuple, assert_never

from dprobes.errors import system_error

__all__ = ["DEVICE", "NEW_FLAGS", "NEW_OBJECT", "FaultEvent", "Message", "UserFaults"]

DEVICE = "/dev/userfaultfd"
"""Device whose ioctl NEW_OBJECT makes an object, for any process that has it open."""

NEW_OBJECT = 0xAA00
"""USERFAULTFD_IOC_NEW. Its argument is NEW_FLAGS."""

NEW_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK

_API, _REGISTER, _UNREGISTER = 0xC018AA3F, 0xC020AA00, 0x8010AA01
_WAKE, _WRITE_PROTECT = 0x8010AA02, 0xC018AA06
_API_VERSION = 0xAA

_PAGEFAULT_FLAG_WP, _EVENT_REMAP, _EVENT_REMOVE, _EVENT_UNMAP = 1 << 0, 1 << 2, 1 << 3, 1 << 6
_THREAD_ID, _EXACT_ADDRESS, _WP_SHMEM, _WP_UNPOPULATED = 1 << 8, 1 << 11, 1 << 12, 1 << 13
_NEEDED = _PAGEFAULT_FLAG_WP | _EVENT_REMAP | _EVENT_REMOVE | _EVENT_UNMAP | _THREAD_ID | _EXACT_ADDRESS
_WISHES = (_WP_SHMEM | _WP_UNPOPULATED, _WP_SHMEM, 0)

_REGISTER_MODE_WP = 2
_PROTECT, _DONT_WAKE = 1, 2

_THREE, _RANGE, _FOUR = struct.Struct("=QQQ"), struct.Struct("=QQ"), struct.Struct("=QQQQ")
_MESSAGE = struct.Struct("=BxxxxxxxQQQ")
_MESSAGES_MAX = 64
_POLLIN = 1


class FaultEvent(enum.IntEnum):
    """Events that a userfaultfd reports (UFFD_EVENT_*)."""

    PAGE_FAULT = 0x12
    REMAP = 0x14
    REMOVE = 0x15
    UNMAP = 0x16


class Message(NamedTuple):
    """
    Message of a userfaultfd about an event.

    For PAGE_FAULT, ``address`` is the first written byte in its page. ``tid`` is the thread's id in its own PID
    namespace. Any other event concerns the addresses from ``address`` to ``end`` (excluded).
    """

    event: FaultEvent
    address: int
    tid: int = 0
    end: int = 0


class UserFaults:
    """
    Userfaultfd of another process. ``descriptor`` is a copy in this process, which is closed with the object.

    When the last descriptor is closed, the kernel removes the protection of all pages and wakes all waiting threads.
    """

    def __init__(self, descriptor: int) -> None:
        """Negotiate the interface; raise OSError if the kernel lacks a feature."""
        import select

        self.descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        for number, wish in enumerate(_WISHES, 1):
            try:
                ioctl(descriptor, _API, _THREE.pack(_API_VERSION, _NEEDED | wish, 0))
            except OSError as error:
                if error.errno != errno.EINVAL or number == len(_WISHES):
                    raise
            else:
                return

    def register(self, start: int, size: int) -> None:
        """
        Register whole pages of one mapping for write protection.

        Raise OSError if the kernel cannot report writes there.
        """
        ioctl(self.descriptor, _REGISTER, _FOUR.pack(start, size, _REGISTER_MODE_WP, 0))

    def unregister(self, start: int, size: int) -> None:
        """End the write protection of pages; ignore pages that are not registered."""
        with contextlib.suppress(OSError):
            ioctl(self.descriptor, _UNREGISTER, _RANGE.pack(start, size))

    def protect(self, start: int, size: int) -> None:
        """
        Write-protect registered pages: a write is reported, and the writing thread waits.

        Raise OSError if the pages are not registered.
        """
        self._change(start, size, _PROTECT)

    def open(self, start: int, size: int) -> None:
        """
        Remove the write protection of pages.

        Threads that wait already are not woken. Raise OSError as ``protect`` does.
        """
        self._change(start, size, _DONT_WAKE)

    def wake(self, start: int, size: int) -> None:
        """Wake the threads that wait after a write to these pages, which then write again."""
        with contextlib.suppress(OSError):
            ioctl(self.descriptor, _WAKE, _RANGE.pack(start, size))

    def _change(self, start: int, size: int, mode: int) -> None:
        while True:
            try:
                ioctl(self.descriptor, _WRITE_PROTECT, _THREE.pack(start, size, mode))
            except OSError as error:
                if error.errno != errno.EAGAIN:  # otherwise the process is changing its mappings
                    raise
                if not self.has_message:
                    continue
                raise system_error(errno.EAGAIN) from error
            else:
                return

    @property
    def has_message(self) -> bool:
        """True if a message has arrived, and was not read."""
        return self.descriptor >= 0 and any(events & _POLLIN for _, events in self._poll.poll(0))

    @property
    def faults_waiting(self) -> int:
        """
        Number of pending messages about page faults.

        The kernel delivers these before messages about other events.
        """
        try:
            with open(f"/proc/self/fdinfo/{self.descriptor}", encoding="ascii") as file:
                return next((int(line.split()[1]) for line in file if line.startswith("pending:")), 0)
        except OSError:
            return 0

    def read(self, count: int) -> list[Message]:
        """
        Read at most ``count`` pending messages, without waiting.

        Return an empty list if there is none or the process has ended. If an event is not a page fault, its thread
        continues at once.
        """
        try:
            data = os.read(self.descriptor, _MESSAGE.size * min(count, _MESSAGES_MAX))
        except OSError:
            return []  # none, or the process has ended
        return [_message(*fields) for fields in _MESSAGE.iter_unpack(data)]

    def close(self) -> None:
        """Close this process's descriptor of the userfaultfd."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _message(event: int, first: int, second: int, third: int) -> Message:
    match FaultEvent(event):
        case FaultEvent.PAGE_FAULT:
            return Message(FaultEvent.PAGE_FAULT, second, tid=third & 0xFFFFFFFF)
        case FaultEvent.REMAP:
            return Message(FaultEvent.REMAP, first, end=first + third)
        case FaultEvent.REMOVE | FaultEvent.UNMAP as gone:
            return Message(gone, first, end=second)
        case other:
            assert_never(other)
