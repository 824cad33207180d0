"""
What client and manager say to each other: one JSON object a line, UTF-8, on a stream socket (docs/manager.md).

::

    client   {"dprobes": 1, "verb": VERB, "arguments": {...}}
    manager  {"notice": {"message": TEXT, "hint": TEXT or null, "is_warning": BOOL, "details": TEXT}}   any number, then
             {"result": {...}}   or   {"error": {"kind": NAME, "message": TEXT, "hint": TEXT or null}}

Binary data is base64 text. A connection carries requests one after the other. The number after "dprobes" is the version
of the protocol: a manager answers another one with an error that names both.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

from dprobes import errors
from dprobes.errors import DprobesError, FormatError, ManagerError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["LINE_MAX", "VERSION", "Connection", "Message", "error_of", "line_of", "message_of"]

VERSION = 1

LINE_MAX = 64 << 20
"""Bytes of the longest line."""

_PIECE = 1 << 16

Message = dict[str, Any]
"""One line."""


class Connection:
    """
    Send and receive lines; use it as a context manager.

    ``timeout`` of the socket holds for a line that is sent, and for each piece that is received; ``TimeoutError`` is
    raised then. With ``on_silence`` that is called instead, and the waiting goes on.
    """

    def __init__(self, end: socket.socket, on_silence: Callable[[], None] | None = None) -> None:
        self._socket = end
        self._buffer = bytearray()
        self._on_silence = on_silence

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def send(self, message: Message) -> None:
        """Send a line; raises ``OSError``."""
        if self._on_silence is None:
            self._socket.sendall(line_of(message))
            return
        left = memoryview(line_of(message))
        while left:
            try:
                left = left[self._socket.send(left) :]
            except TimeoutError:
                self._on_silence()

    @property
    def has_more(self) -> bool:
        """Whether part of a line, at least, has been received."""
        return bool(self._buffer)

    def receive(self) -> Message | None:
        """Return the next line, None at the end; raise ``FormatError`` if it is none, and ``OSError``."""
        start = 0
        while (end := self._buffer.find(b"\n", start)) < 0:
            start = len(self._buffer)
            if start > LINE_MAX:
                raise FormatError(f"a line of the manager's protocol is longer than {LINE_MAX} bytes")
            try:
                piece = self._socket.recv(_PIECE)
            except TimeoutError:
                if self._on_silence is None:
                    raise
                self._on_silence()
                continue
            if not piece:
                if self._buffer:
                    raise FormatError("a line of the manager's protocol has no end")
                return None
            self._buffer += piece
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise FormatError("a line of the manager's protocol is not JSON") from None
        if not isinstance(message, dict):
            raise FormatError("a line of the manager's protocol is not a JSON object")
        return message


def line_of(message: Message) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def message_of(error: DprobesError) -> Message:
    """Return the line that reports an error."""
    return {"error": {"kind": type(error).__name__, "message": error.message, "hint": error.hint}}


def error_of(message: Message) -> DprobesError:
    """Return the error that a line reports; that of a program with errors keeps their text."""
    reported = message["error"]
    text, hint = str(reported.get("message")), reported.get("hint")
    kind = getattr(errors, str(reported.get("kind")), ManagerError)
    if not (isinstance(kind, type) and issubclass(kind, DprobesError)):
        kind = ManagerError
    if kind is errors.SourceError:
        return errors.SourceError.rendered(text)
    return kind(text, hint=hint)
