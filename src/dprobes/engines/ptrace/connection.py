"""
The tracer's end of the socket to the client.

Nothing that the client does or fails to do may hold up the target: frames wait in a bounded buffer, and records that do
not fit are refused (the caller counts them as lost). Only a question waits for its answer.
"""

from __future__ import annotations

import fcntl
import os
import select
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from dprobes.engines.ptrace.wire import FrameReader, Stop, load_message, pack_message, pack_record

if TYPE_CHECKING:
    import socket

__all__ = ["ClientGoneError", "Connection"]

_BUFFER_LIMIT = 16 << 20
"""Bytes of records that may wait for the client."""

Answer = TypeVar("Answer")


class ClientGoneError(Exception):
    """Report that the client closed its end or died."""


class Connection:
    """Exchange frames with the client over ``endpoint``; SIGIO is sent to this process when something arrives."""

    def __init__(self, endpoint: socket.socket) -> None:
        endpoint.setblocking(False)
        self._socket = endpoint
        self._outgoing = bytearray()
        self._reader = FrameReader()
        self._messages: deque[object] = deque()
        descriptor = endpoint.fileno()
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)

    def send(self, message: object) -> None:
        """Send a message, or keep it until there is room."""
        self._outgoing += pack_message(message)
        self.flush()

    def send_record(self, probe: int, record: bytes) -> bool:
        """Send a record; return False if too many wait already."""
        if len(self._outgoing) > _BUFFER_LIMIT:
            self.flush()
            if len(self._outgoing) > _BUFFER_LIMIT:
                return False
        self._outgoing += pack_record(probe, record)
        self.flush()
        return True

    def flush(self) -> None:
        """Send as much of what waits as the socket takes."""
        if not self._outgoing:
            return
        try:
            sent = self._socket.send(self._outgoing)
        except BlockingIOError:
            return
        except OSError:
            # The client is gone; receiving tells the tracer so.
            self._outgoing.clear()
            return
        del self._outgoing[:sent]

    def receive(self) -> object | None:
        """Return the next message that has arrived, or None; raise ``ClientGoneError`` at the end of the stream."""
        self.flush()
        if not self._messages:
            self._fill()
        return self._messages.popleft() if self._messages else None

    def ask(self, question: object, answer: type[Answer]) -> Answer:
        """Send a question and wait for its answer; raise ``ClientGoneError`` if none will come."""
        self.send(question)
        while True:
            for message in self._messages:
                if isinstance(message, answer):
                    self._messages.remove(message)
                    return message
                if isinstance(message, Stop):
                    raise ClientGoneError
            events = select.POLLIN | (select.POLLOUT if self._outgoing else 0)
            poll = select.poll()
            poll.register(self._socket, events)
            poll.poll()
            self.flush()
            self._fill()

    def close(self) -> None:
        """Deliver what still waits, as long as the client takes it within a second, and close."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while self._outgoing and poll.poll(1000):
            self.flush()
        self._socket.close()

    def _fill(self) -> None:
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                if self._messages:
                    return
                raise ClientGoneError
            self._messages += [load_message(payload) for _, payload in self._reader.feed(data)]
