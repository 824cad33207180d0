"""
The manager's socket: a thread for each connection, which hurts nobody but itself.

Only this user and root are heard (SO_PEERCRED); the socket's mode, 0600, keeps the others away already.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import threading
import time
import traceback
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dprobes.errors import DprobesError, FormatError, InternalError, ManagerError, PrivilegeError, reason_of
from dprobes.manager.protocol import VERSION, Connection, Message, message_of
from dprobes.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.base import Notice
    from dprobes.manager.manager import Manager

__all__ = ["Server"]

_CONNECTIONS_MAX = 64

_SILENCE = 30.0
"""Seconds that a client may let us wait in the middle of a line, or not take an answer."""

_LOOK = 1.0

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid


class Server:
    """
    Accept connections on a listening socket until the manager is over.

    ``idle_limit`` is after how many seconds without a connection an idle manager ends, None for never.
    """

    def __init__(self, manager: Manager, listening: socket.socket, idle_limit: float | None) -> None:
        self._manager = manager
        self._listening = listening
        self._idle_limit = idle_limit
        self._connections = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self._count = 0
        self._answering: set[threading.Thread] = set()
        self._idle: dict[socket.socket, None] = {}
        """Those that wait between two requests, the longest first."""
        self._lock = threading.Lock()
        self._last = time.monotonic()

    def serve(self) -> None:
        """Serve until the manager is over, or idle for long enough."""
        self._listening.setblocking(False)
        while not self._manager.is_over and not self._is_superfluous():
            select.select([self._listening.fileno(), self._manager.wake_up], [], [], _LOOK)
            try:
                end, _ = self._listening.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                # Out of descriptors, say: what is open may end.
                print(f"dprobes manager: accept: {error.strerror}", file=sys.stderr)  # noqa: T201
                time.sleep(_LOOK)
                continue
            self._last = time.monotonic()
            if not (self._connections.acquire(blocking=False) or self._make_room()):
                self._refuse(end)
                continue
            threading.Thread(target=self._converse, args=(end,), name="client", daemon=True).start()
        # Whoever asked for the end waits for the answer.
        until = time.monotonic() + _LOOK
        while self._answering and time.monotonic() < until:
            time.sleep(_LOOK / 100)

    def _is_superfluous(self) -> bool:
        if self._idle_limit is None or time.monotonic() - self._last < self._idle_limit:
            return False
        if self._count or not self._manager.is_idle:
            self._last = time.monotonic()
            return False
        return True

    def _make_room(self) -> bool:
        """Close the connection that has been idle for the longest time; return whether there is room now."""
        with self._lock:
            longest = next(iter(self._idle), None)
            if longest is not None:
                with contextlib.suppress(OSError):
                    Connection(longest).send(message_of(_too_many()))
                    longest.shutdown(socket.SHUT_RDWR)
        return longest is not None and self._connections.acquire(timeout=_LOOK)

    def _refuse(self, end: socket.socket) -> None:
        with contextlib.suppress(OSError), Connection(end) as connection:
            end.settimeout(_LOOK)
            connection.send(message_of(_too_many()))

    def _converse(self, end: socket.socket) -> None:
        self._count += 1
        try:
            with Connection(end) as connection:
                end.settimeout(_SILENCE)
                self._check_peer(end, connection)
                while (request := self._next(end, connection)) is not None:
                    self._answering.add(threading.current_thread())
                    connection.send(self._answer(request, connection))
                    self._answering.discard(threading.current_thread())
        except (OSError, PrivilegeError) as error:
            self._say(str(error))
        finally:
            self._answering.discard(threading.current_thread())
            self._count -= 1
            self._last = time.monotonic()
            self._connections.release()

    def _next(self, end: socket.socket, connection: Connection) -> Message | None:
        """Return the next request, None at the end; between requests a client may take its time."""
        if not connection.has_more:
            with self._lock:
                self._idle[end] = None
            end.settimeout(None)
            try:
                end.recv(1, socket.MSG_PEEK)
            finally:
                with self._lock:
                    del self._idle[end]
            end.settimeout(_SILENCE)
        try:
            return connection.receive()
        except FormatError as error:
            self._say(error.message)
            connection.send(message_of(error))
            return None

    def _check_peer(self, end: socket.socket, connection: Connection) -> None:
        credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user not in (0, os.geteuid()):
            error = PrivilegeError(f"this manager belongs to user {os.geteuid()}, not to user {user}")
            connection.send(message_of(error))
            raise error

    def _answer(self, request: Message, connection: Connection) -> Message:
        def notify(notice: Notice) -> None:
            connection.send({"notice": asdict(notice)})

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
        if (version := request.get("dprobes")) != VERSION:
            raise ManagerError(
                f"the client speaks version {version!r} of the manager's protocol, this manager "
                f"(dprobes {__version__}) version {VERSION}",
                hint="end the manager with 'dprobes stop --manager'; the next 'dprobes insert' starts the new one",
            )
        verb, arguments = request.get("verb"), request.get("arguments", {})
        if not isinstance(verb, str) or not isinstance(arguments, dict):
            raise ManagerError("a request needs a verb, a text, and arguments, an object")
        return self._manager.answer(verb, arguments, notify)

    @staticmethod
    def _say(text: str) -> None:
        print(f"dprobes manager: a client: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _too_many() -> ManagerError:
    return ManagerError(f"the manager serves {_CONNECTIONS_MAX} clients already", hint="try again")
