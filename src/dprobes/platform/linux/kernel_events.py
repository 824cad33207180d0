"""What the kernel says when modules, CPUs and devices come and go: netlink(7), NETLINK_KOBJECT_UEVENT."""

from __future__ import annotations

import errno
import socket

__all__ = ["KernelEvents"]

_NETLINK_KOBJECT_UEVENT = 15
_FROM_KERNEL = 1  # the group; udevd has another one for what it passes on
_SIZE_MAX = 1 << 13  # UEVENT_BUFFER_SIZE is 2048, and the summary stands before that


class KernelEvents:
    """
    A socket for the kernel's events, from now until ``close``; OSError if this process may not hear them.

    Events may be lost: they say when to look, not what is there.
    """

    def __init__(self) -> None:
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, kind, _NETLINK_KOBJECT_UEVENT)
        try:
            self._socket.bind((0, _FROM_KERNEL))
        except BaseException:
            self.close()
            raise

    @property
    def descriptor(self) -> int:
        """What can be read when there are events."""
        return self._socket.fileno()

    def drain(self) -> tuple[list[bytes], bool]:
        """Return the messages that have come since the last call, and whether some were lost."""
        messages, is_lossy = [], False
        while True:
            try:
                messages.append(self._socket.recv(_SIZE_MAX))
            except BlockingIOError:
                return messages, is_lossy
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                is_lossy = True

    def close(self) -> None:
        """Hear no more."""
        self._socket.close()
