"""
Server at the manager's socket. Each connection has a thread, isolated from the others.

Only this user and root are accepted (SO_PEERCRED). The socket's mode, 0600, already excludes others.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Self

from dprobes.errors import DprobesError, FormatError, InternalError, ManagerError, PrivilegeError, reason_of
from dprobes.escapes import escaped_lines
from dprobes.manager.manager_files import (
    ALREADY,
    READY,
    RUNTIME,
    STATE,
    manager_paths,
    private_directory,
    socket_address,
)
from dprobes.manager.probe_manager import Manager
from dprobes.manager.wire_protocol import VERSION, Connection, Message, encode, line_of, message_of
from dprobes.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dprobes.engines.engine_interface import Notice
    from dprobes.manager.manager_files import ManagerPaths

__all__ = ["LARGE", "give_large_blocks_back", "main"]

# A manager's files: the lock, which marks a running manager, and the socket, to which clients connect.
#
# Both files can be removed: by a cleaner of a run-time directory, or by a second listener that binds the same path. An
# unreachable manager would keep its probepoints forever. So ``restore`` is called periodically, and recreates missing
# files.


LARGE = 1 << 20
"""Size in bytes from which on a block of memory is mapped separately, see ``give_large_blocks_back``."""

# malloc.h of the GNU C library
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_FIRST_PASSED = 3  # SD_LISTEN_FDS_START

_BACKLOG = 1024

_Identity = tuple[int, int]
"""Device and inode of a file."""


class Place:
    """
    Manager's lock and its listening socket, created by ``take`` and released by ``leave``.

    The lock is released when the process exits. ``listening`` is set by ``listen``, and replaced if ``restore`` creates
    a new socket.
    """

    listening: socket.socket

    def __init__(self, paths: ManagerPaths, lock: int) -> None:
        self._paths = paths
        self._lock = lock
        self._is_ours = False
        self._socket: _Identity | None = None

    @classmethod
    def take(cls, paths: ManagerPaths) -> Self | None:
        """Acquire the lock of this user's manager; return None if another manager has it."""
        lock = _take_lock(paths)
        return None if lock is None else cls(paths, lock)

    def listen(self) -> None:
        """Listen on the socket that systemd has passed, or on a new one."""
        passed = _passed_socket()
        self._is_ours = passed is None
        self.listening = _listen(self._paths.socket) if passed is None else passed
        self._socket = _identity(self._paths.socket)

    def restore(self) -> bool:
        """Recreate missing files; return False if another manager has acquired the lock meanwhile."""
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
        """Stop listening. Later clients start another manager, which waits for this lock."""
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
    """
    Acquire the lock, which is held until this process exits.

    Return its descriptor, None if another manager has it.
    """
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
    """Return the listening socket that systemd passes (sd_listen_fds(3)), or None if it passes none."""
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
    """Return a listening socket; an existing socket file is obsolete, because this process holds the lock."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    # The socket is listening before it gets its final name.
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


_CONNECTIONS_MAX = 64

_SILENCE = 30.0
"""Seconds without progress of a client in the middle of a line, or in reading an answer."""

_LOOK = 1.0

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid


class Server:
    """
    A server that accepts connections of a manager until the manager ends.

    ``idle_limit`` is the number of seconds without a connection after which an idle manager exits; None means never.
    """

    def __init__(self, manager: Manager, place: Place, idle_limit: float | None) -> None:
        self._manager = manager
        self._place = place
        self._idle_limit = idle_limit
        self._lock = threading.Lock()
        self._served: set[socket.socket] = set()
        self._waiting: dict[socket.socket, None] = {}
        """Connections whose request is incomplete or has not begun. The one that has waited longest is the first."""
        self._answering = 0
        self._last = self._looked = time.monotonic()

    def serve(self) -> None:
        """Serve until the manager ends, or is idle for ``idle_limit`` seconds."""
        while not self._manager.is_over and not self._is_superfluous():
            listening = self._place.listening
            listening.setblocking(False)
            select.select([listening.fileno(), self._manager.wake_up], [], [], _LOOK)
            self._look_after_place()
            try:
                end, _ = listening.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                # For example no free descriptors: open connections may end.
                self._say(f"accept: {reason_of(error)}")
                time.sleep(_LOOK)
                continue
            self._last = time.monotonic()
            self._begin(end)
        # The client that requested the end waits for the answer.
        until = time.monotonic() + _LOOK
        while self._answering and time.monotonic() < until:
            time.sleep(_LOOK / 100)

    def _look_after_place(self) -> None:
        """Restore the files periodically. End the manager if another one, to which clients connect, has replaced it."""
        if time.monotonic() - self._looked < _LOOK:
            return
        self._looked = time.monotonic()
        try:
            if not self._place.restore():
                self._say("another manager has taken the place of this one, which ends")
                self._manager.end()
        except (DprobesError, OSError) as error:
            self._say(f"the socket is gone and cannot be restored: {error}")

    def _is_superfluous(self) -> bool:
        if self._idle_limit is None or time.monotonic() - self._last < self._idle_limit:
            return False
        if self._served or not self._manager.is_idle:
            self._last = time.monotonic()
            return False
        return True

    def _begin(self, end: socket.socket) -> None:
        """Serve a connected socket in a thread of its own. Close it if there are too many connections or threads."""
        if self._make_room(end):
            try:
                threading.Thread(target=self._converse, args=(end,), name="client", daemon=True).start()
            except RuntimeError as error:  # the user's limit of threads is reached
                self._say(str(error))
                with self._lock:
                    self._served.discard(end)
            else:
                return
        _dismiss(end)
        end.close()

    def _make_room(self, end: socket.socket) -> bool:
        """
        Register a connection. If there are too many, dismiss the one that has been idle for the longest time.

        If there are too many and none is idle, do not register it and return False.
        """
        with self._lock:
            if len(self._served) >= _CONNECTIONS_MAX:
                longest = next(iter(self._waiting), None)
                if longest is None:
                    return False
                del self._waiting[longest]
                self._served.discard(longest)
                _dismiss(longest)  # its thread cannot close it before the lock is free
            self._served.add(end)
        return True

    def _converse(self, end: socket.socket) -> None:
        try:
            with Connection(end) as connection:
                end.settimeout(_SILENCE)
                self._check_peer(end, connection)
                while (request := self._next(end, connection)) is not None:
                    with self._lock:
                        self._answering += 1
                    try:
                        connection.send(self._answer(request, connection))
                    finally:
                        with self._lock:
                            self._answering -= 1
        except (OSError, PrivilegeError) as error:
            self._say(f"a client: {error}")
        finally:
            with self._lock:
                self._served.discard(end)
            self._last = time.monotonic()

    def _next(self, end: socket.socket, connection: Connection) -> Message | None:
        """Return the next request of a connection, or None after its last. Between requests there is no time limit."""
        with self._lock:
            self._waiting[end] = None
        request = None
        try:
            if not connection.has_more:
                end.settimeout(None)
                end.recv(1, socket.MSG_PEEK)
                end.settimeout(_SILENCE)
            request = connection.receive()
        except FormatError as error:
            self._say(f"a client: {error.message}")
            connection.send(message_of(error))
        finally:
            with self._lock:
                self._waiting.pop(end, None)
                is_served = end in self._served
        # The request of a dismissed client must not be carried out.
        return request if is_served else None

    def _check_peer(self, end: socket.socket, connection: Connection) -> None:
        credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user not in (0, os.geteuid()):
            error = PrivilegeError(f"this manager belongs to user {os.geteuid()}, not to user {user}")
            connection.send(message_of(error))
            raise error

    def _answer(self, request: Message, connection: Connection) -> Message:
        def notify(notice: Notice) -> None:
            connection.send({"notice": encode(notice)})

        try:
            return {"result": self._result_of(request, notify)}
        except DprobesError as error:
            return message_of(error)
        except OSError as error:
            what = f"'{os.fsdecode(error.filename)}': " if error.filename else ""
            return message_of(ManagerError(f"{what}{reason_of(error)}"))
        except Exception as error:  # noqa: BLE001 - a bug in one verb must not be the end of all programs
            traceback.print_exc()
            return message_of(InternalError(f"{type(error).__name__}: {error}"))

    def _result_of(self, request: Message, notify: Callable[[Notice], None]) -> dict[str, Any]:
        if type(version := request.get("dprobes")) is not int or version != VERSION:
            raise ManagerError(
                f"the client speaks version {version!r} of the manager's protocol, this manager "
                f"(dprobes {__version__}) version {VERSION}",
                hint="end the manager with 'dprobes stop --manager'; the next 'dprobes insert' starts the new one",
            )
        verb, arguments = request.get("verb"), request.get("arguments", {})
        if not isinstance(verb, str) or not isinstance(arguments, dict):
            raise ManagerError("a request needs a verb, a string, and arguments, an object")
        return self._manager.answer(verb, arguments, notify)

    @staticmethod
    def _say(text: str) -> None:
        with contextlib.suppress(OSError):  # there may be no room for a log
            print(f"dprobes manager: {escaped_lines(text)}", file=sys.stderr, flush=True)  # noqa: T201


def _dismiss(end: socket.socket) -> None:
    """Send the error that there are too many connections, without blocking."""
    error = ManagerError(f"the manager serves {_CONNECTIONS_MAX} clients already", hint="try again")
    with contextlib.suppress(OSError):
        end.send(line_of(message_of(error)), socket.MSG_DONTWAIT)
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


# The process of the manager: ``python -m dprobes.manager``.
#
# It is started by a client (``client``), which waits for it at a pipe, or by systemd, which passes the listening socket
# (``place``). SIGTERM and SIGINT end it, and remove every probepoint. If it is killed, the kernel removes the eBPF
# programs, and tracers detect the end of their pipes.


_IDLE_LIMIT = 900.0
"""Seconds after which an idle manager exits."""


def main(arguments: Sequence[str]) -> int:
    """
    Run the manager and return the exit status.

    ``arguments`` may contain the descriptor of the pipe at which a client waits.
    """
    ready = int(arguments[0]) if arguments else None
    paths = manager_paths()
    try:
        return _run(paths, ready)
    except DprobesError as error:
        return _fail(error, ready)
    except OSError as error:
        where = f"'{os.fsdecode(error.filename)}': " if error.filename else ""
        return _fail(ManagerError(f"{where}{reason_of(error)}"), ready)


def _run(paths: ManagerPaths, ready: int | None) -> int:
    private_directory(paths.runtime, RUNTIME)
    private_directory(paths.state, STATE)
    _allow_descriptors()
    give_large_blocks_back()
    place = Place.take(paths)
    if place is None:
        return ALREADY
    with Manager(paths.trace) as manager:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, manager.end)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        place.listen()
        if ready is not None:
            _tell(ready, READY)
        Server(manager, place, _IDLE_LIMIT).serve()
        place.leave()
    return 0


def _fail(error: DprobesError, ready: int | None) -> int:
    with contextlib.suppress(OSError):  # there may be no room for a log
        print(f"dprobes manager: {error.message}", file=sys.stderr, flush=True)  # noqa: T201
    if ready is not None:
        _tell(ready, json.dumps(message_of(error)).encode())
    return 1


def _tell(pipe: int, what: bytes) -> None:
    with contextlib.suppress(OSError):  # the client has gone, or the pipe is already closed
        os.write(pipe, what)
        os.close(pipe)


def _allow_descriptors() -> None:
    """Raise the limit of descriptors to the user's maximum: thousands of probepoints need some thousands."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def give_large_blocks_back() -> None:
    """
    Make the C library return large blocks to the kernel as soon as they are freed.

    Each insertion reads the file of its module, and frees the contents if an equal file is already in memory
    (``inserter``). The GNU C library would keep such a block for reuse: after the first one is freed, it allocates
    blocks of that size, up to 32 MiB, from the thread's arena (mallopt(3), M_MMAP_THRESHOLD). There are eight arenas
    for each processor. Other C libraries do not do that, and have no ``mallopt``.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE)
        # The free memory kept at the top of the heap: twice the threshold, as in the library.
        mallopt(_M_TRIM_THRESHOLD, 2 * LARGE)
