"""What the kernel says when modules and devices come and go: netlink(7), NETLINK_KOBJECT_UEVENT."""

from __future__ import annotations

import contextlib
import errno
import socket

__all__ = ["KernelEvents"]

_NETLINK_KOBJECT_UEVENT = 15
_FROM_KERNEL = 1  # the group; udevd has another one for what it passes on
_SIZE_MAX = 1 << 16


class KernelEvents:
    """
    A socket that becomes readable with each event; -1 is its descriptor where there can be none.

    Events may be lost: they say when to look, not what is there.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            opened = socket.socket(socket.AF_NETLINK, kind, _NETLINK_KOBJECT_UEVENT)
            try:
                opened.bind((0, _FROM_KERNEL))
            except OSError:
                opened.close()
                raise
            self._socket = opened

    @property
    def descriptor(self) -> int:
        """What to wait for."""
        return -1 if self._socket is None else self._socket.fileno()

    def drain(self) -> None:
        """Forget what has come."""
        while self._socket is not None:
            try:
                self._socket.recv(_SIZE_MAX)
            except OSError as error:
                if error.errno != errno.ENOBUFS:  # some were lost
                    return

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
