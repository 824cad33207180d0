"""Kernel's messages about added and removed modules, CPUs and devices (netlink(7), NETLINK_KOBJECT_UEVENT)."""

from __future__ import annotations

import errno
import socket

__all__ = ["KernelEvents"]

_NETLINK_KOBJECT_UEVENT = 15
_FROM_KERNEL = 1  # the group; udevd sends its own events to another one
_SIZE_MAX = 1 << 13  # UEVENT_BUFFER_SIZE is 2048, and the summary is before that


class KernelEvents:
    """
    Socket for the kernel's uevents. The constructor raises OSError without the permission to open it.

    Events may be lost. Take one as a hint to check the state, not as the state.
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
        """The descriptor of the socket, readable if events have arrived."""
        return self._socket.fileno()

    def drain(self) -> tuple[list[bytes], bool]:
        """Return the messages that have arrived since the last call, and whether some were lost."""
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
        """Close the socket."""
        self._socket.close()
