"""
The manager's socket: a thread for each connection, which hurts nobody but itself.

Only this user and root are heard (SO_PEERCRED); the socket's mode, 0600, keeps the others away already.
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

# The place of a manager in the file system: the lock that says there is one, and the socket that clients find it at.
#
# Both are files, and files can be taken away: by who clears a run-time directory, or by a second listener that
# binds the same path. A manager that nobody can reach would keep its probepoints for ever, so ``restore`` is called now
# and then, and puts back what is missing.


LARGE = 1 << 20
"""Size in bytes from which on a block of memory has pages of its own, see ``give_large_blocks_back``."""

# malloc.h of the GNU C library
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_FIRST_PASSED = 3  # SD_LISTEN_FDS_START

_BACKLOG = 1024

_Identity = tuple[int, int]
"""Device and inode of a file."""


class Place:
    """
    A manager's lock and its listening socket; made by ``take``, given up by ``leave``.

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
        """Stop listening; who connects from now on starts another manager, which waits for our lock."""
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


_CONNECTIONS_MAX = 64

_SILENCE = 30.0
"""Seconds that a client may let us wait in the middle of a line, or not take an answer."""

_LOOK = 1.0

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid


class Server:
    """
    Accept connections at a manager's place until the manager is over.

    ``idle_limit`` is after how many seconds without a connection an idle manager ends, None for never.
    """

    def __init__(self, manager: Manager, place: Place, idle_limit: float | None) -> None:
        self._manager = manager
        self._place = place
        self._idle_limit = idle_limit
        self._lock = threading.Lock()
        self._served: set[socket.socket] = set()
        self._waiting: dict[socket.socket, None] = {}
        """Those of which a request is awaited, whole or in part; the longest first."""
        self._answering = 0
        self._last = self._looked = time.monotonic()

    def serve(self) -> None:
        """Serve until the manager is over, or idle for long enough."""
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
                # Out of descriptors, say: what is open may end.
                self._say(f"accept: {reason_of(error)}")
                time.sleep(_LOOK)
                continue
            self._last = time.monotonic()
            self._begin(end)
        # Who asked for the end waits for the answer.
        until = time.monotonic() + _LOOK
        while self._answering and time.monotonic() < until:
            time.sleep(_LOOK / 100)

    def _look_after_place(self) -> None:
        """Have the place restored, once in a while; another manager that has it is the one that clients find."""
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
        """Serve a connection in a thread of its own, if there is room."""
        if self._make_room(end):
            try:
                threading.Thread(target=self._converse, args=(end,), name="client", daemon=True).start()
            except RuntimeError as error:  # this user has as many threads as are allowed
                self._say(str(error))
                with self._lock:
                    self._served.discard(end)
            else:
                return
        _dismiss(end)
        end.close()

    def _make_room(self, end: socket.socket) -> bool:
        """Count a connection in; where there are too many, that which has let us wait for the longest time goes."""
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
        """Return the next request, None at the end; between requests a client may take its time."""
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
        # A client that was told to go must not have its request carried out.
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
            return {"result": self._carry_out(request, notify)}
        except DprobesError as error:
            return message_of(error)
        except OSError as error:
            what = f"'{os.fsdecode(error.filename)}': " if error.filename else ""
            return message_of(ManagerError(f"{what}{reason_of(error)}"))
        except Exception as error:  # noqa: BLE001 - a bug in one verb must not be the end of all programs
            traceback.print_exc()
            return message_of(InternalError(f"{type(error).__name__}: {error}"))

    def _carry_out(self, request: Message, notify: Callable[[Notice], None]) -> dict[str, Any]:
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
    """Tell a client that there are too many; one that does not listen is not waited for."""
    error = ManagerError(f"the manager serves {_CONNECTIONS_MAX} clients already", hint="try again")
    with contextlib.suppress(OSError):
        end.send(line_of(message_of(error)), socket.MSG_DONTWAIT)
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


# The process of the manager: ``python -m dprobes.manager``.
#
# Started by a client (``client``), which waits at a pipe for it, or by systemd, which gives it the listening socket
# (``place``). SIGTERM and SIGINT end it, and every probepoint with it. Should it be killed, the kernel takes the eBPF
# programs away, and tracers see the end of their pipes.


_IDLE_LIMIT = 900.0
"""Seconds after which a manager that has nothing to do ends."""


def main(arguments: Sequence[str]) -> int:
    """Run the manager; ``arguments`` may name the descriptor of the pipe at which a client waits."""
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
    with contextlib.suppress(OSError):  # the client has gone, or was told before
        os.write(pipe, what)
        os.close(pipe)


def _allow_descriptors() -> None:
    """Have as many descriptors as this user may: thousands of probepoints need some thousands."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def give_large_blocks_back() -> None:
    """
    Have the C library give large blocks back to the kernel as soon as they are freed.

    Every insertion reads the file that it is about, and frees what it has read if that is held already
    (``inserter``). The GNU C library would keep such a block for its next user: after the first one that is freed
    it takes blocks of that size, up to 32 MiB, from the arena of the thread, of which there are eight for each
    processor (mallopt(3), M_MMAP_THRESHOLD). Other C libraries have no such habit, and no ``mallopt``.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE)
        # Of small blocks so much may stay free after the last one: twice as much, as the library has it, too.
        mallopt(_M_TRIM_THRESHOLD, 2 * LARGE)
