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
from typing import TYPE_CHECKING, Any

from dprobes.errors import DprobesError, FormatError, InternalError, ManagerError, PrivilegeError, reason_of
from dprobes.escapes import escaped_lines
from dprobes.manager.protocol import VERSION, Connection, Message, line_of, message_of
from dprobes.manager.schema import encode
from dprobes.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.interface import Notice
    from dprobes.manager.lock import Place
    from dprobes.manager.manager import Manager

__all__ = ["Server"]

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
        # Whoever asked for the end waits for the answer.
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
