"""
The place of a manager in the file system: the lock that says there is one, and the socket that clients find it at.

Both are files, and files can be taken away: by whoever clears a run-time directory, or by a second listener that binds
the same path. A manager that nobody can reach would keep its probepoints for ever, so ``restore`` is called now and
then, and puts back what is missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from typing import TYPE_CHECKING, Self

from dprobes.errors import ManagerError, reason_of
from dprobes.manager.paths import RUNTIME, private_directory, socket_address

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.manager.paths import ManagerPaths

__all__ = ["Place"]

_FIRST_PASSED = 3  # SD_LISTEN_FDS_START

_BACKLOG = 1024

_Identity = tuple[int, int]
"""Device and inode of a file."""


class Place:
    """
    Own a manager's lock and its listening socket; made by ``take``, given up by ``leave``.

    The lock holds as long as the process lives. ``listening`` is there after ``listen``, and another one after a
    ``restore`` that made it.
    """

    listening: socket.socket

    def __init__(self, paths: ManagerPaths, lock: int) -> None:
        self._paths = paths
        self._lock = lock
        self._is_ours = False
        self._socket: _Identity | None = None

    @classmethod
    def take(cls, paths: ManagerPaths) -> Self | None:
        """Take the place of this user's manager; None if another one has it."""
        lock = _take_lock(paths)
        return None if lock is None else cls(paths, lock)

    def listen(self) -> None:
        """Begin to listen, at the socket that systemd has passed if it did."""
        passed = _passed_socket()
        self._is_ours = passed is None
        self.listening = _listen(self._paths.socket) if passed is None else passed
        self._socket = _identity(self._paths.socket)

    def restore(self) -> bool:
        """Put back what somebody has taken away; return False if another manager has the place meanwhile."""
        status = os.fstat(self._lock)
        if _identity(self._paths.lock) != (status.st_dev, status.st_ino):
            private_directory(self._paths.runtime, RUNTIME)
            lock = _take_lock(self._paths)
            if lock is None:
                return False
            os.close(self._lock)
            self._lock = lock
        if self._socket is None or _identity(self._paths.socket) != self._socket:
            new = _listen(self._paths.socket)
            self.listening.close()
            self.listening, self._is_ours = new, True
            self._socket = _identity(self._paths.socket)
        return True

    def leave(self) -> None:
        """Stop listening; whoever connects from now on starts another manager, which waits for our lock."""
        if self._is_ours and _identity(self._paths.socket) == self._socket:
            with contextlib.suppress(OSError):
                self._paths.socket.unlink()
        self.listening.close()


def _identity(path: Path) -> _Identity | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _take_lock(paths: ManagerPaths) -> int | None:
    """Take the lock, which holds until this process ends; return None if another manager has it."""
    descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise ManagerError(f"'{paths.lock}' cannot be written: {reason_of(error)}") from error
    return descriptor


def _passed_socket() -> socket.socket | None:
    """Return the listening socket that systemd passes, if it does (sd_listen_fds(3))."""
    environment = os.environ
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return None
    if environment.get("LISTEN_FDS") != "1":
        raise ManagerError(f"expected one socket from systemd, found {environment.get('LISTEN_FDS')}")
    os.set_inheritable(_FIRST_PASSED, False)
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        environment.pop(name, None)
    return socket.socket(fileno=_FIRST_PASSED)


def _listen(path: Path) -> socket.socket:
    """Return a listening socket; one that is there already is nobody's, for the lock is ours."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    # Under its own name it is listened at from the beginning.
    new = path.with_name(path.name + ".new")
    try:
        new.unlink(missing_ok=True)
        previous = os.umask(0o177)
        try:
            with socket_address(new) as address:
                listening.bind(address)
        finally:
            os.umask(previous)
        listening.listen(_BACKLOG)
        new.rename(path)
    except OSError as error:
        listening.close()
        raise ManagerError(f"'{path}' cannot be listened at: {reason_of(error)}") from error
    return listening
