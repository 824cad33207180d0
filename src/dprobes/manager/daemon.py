"""
The process of the manager: ``python -m dprobes.manager``.

Started by a client (``client``), which waits at a pipe for it, or by systemd, which gives it the listening socket
(sd_listen_fds(3)). It holds a lock as long as it lives, so that there is one; a socket that a killed one has left
behind is replaced. SIGTERM and SIGINT end it, and every probepoint with it. Should it be killed, the kernel takes the
eBPF programs away, and tracers see the end of their pipes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import sys
from typing import TYPE_CHECKING

from dprobes.errors import DprobesError, ManagerError, reason_of
from dprobes.manager.manager import Manager
from dprobes.manager.paths import ALREADY, manager_paths, private_directory, socket_address
from dprobes.manager.server import Server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.manager.paths import ManagerPaths

__all__ = ["READY", "main"]

READY = b"r"
"""What a manager writes to the pipe of the client that started it, when it can be connected to."""

_FIRST_PASSED = 3  # SD_LISTEN_FDS_START

_BACKLOG = 64

_IDLE_LIMIT = 900.0
"""Seconds after which a manager that a client has started, and that has nothing to do, ends."""


def main(arguments: Sequence[str]) -> int:
    """Run the manager; ``arguments`` may name the descriptor of the pipe at which a client waits."""
    ready = int(arguments[0]) if arguments else None
    paths = manager_paths()
    try:
        private_directory(paths.runtime)
        private_directory(paths.state)
        lock = _lock(paths)
        if lock is None:
            return ALREADY
        _allow_descriptors()
        with Manager(paths.trace) as manager:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, manager.end)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            passed = _passed_socket()
            listening = passed or _listen(paths)
            if ready is not None:
                os.write(ready, READY)
                os.close(ready)
            Server(manager, listening, _IDLE_LIMIT).serve()
            if passed is None:
                # Whoever connects from now on starts another one, which waits for our lock.
                with contextlib.suppress(OSError):
                    paths.socket.unlink()
            listening.close()
    except DprobesError as error:
        print(f"dprobes manager: {error.message}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _allow_descriptors() -> None:
    """Have as many descriptors as this user may: thousands of probepoints need some thousands."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _lock(paths: ManagerPaths) -> int | None:
    """Take the lock, which holds until this process ends; return None if another manager has it."""
    descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
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


def _listen(paths: ManagerPaths) -> socket.socket:
    """Return a listening socket; one that is there already is nobody's, for the lock is ours."""
    path = paths.socket
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
