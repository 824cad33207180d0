"""
Tracer's end of the two pipes to the client.

The client must never delay the target. So frames are kept in a bounded buffer, and records that do not fit are refused
(the caller counts them as lost). The tracer waits only for the reply to a request, and not while the client is stopped.
"""

from __future__ import annotations

import fcntl
import os
import select
import time
from collections import deque
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.breakpoint_sites import Sites
from dprobes.engines.ptrace.restorer_messages import FOR_RESTORERS, TracerBegun
from dprobes.engines.ptrace.tracer_messages import (
    RECORD,
    RECORD_FRAME,
    FrameReader,
    Kind,
    Warned,
    load_message,
    pack_message,
)
from dprobes.platform.linux import process_calls
from dprobes.platform.linux.procfs import thread_state

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ClientGoneError", "Connection"]

_BUFFER_LIMIT = 16 << 20
"""Maximum size in bytes of the records that wait for the client."""

_CHUNK = 1 << 16
_DELAY = 0.005
"""Maximum number of seconds for which a record waits to be sent together with others."""

_RETRY = 5
"""Milliseconds until writing to a full pipe is retried."""

_LOOK = 100
"""Milliseconds without a reply after which the tracer checks whether the client is stopped."""


_RESTORER_PATIENCE = 1000
"""Maximum number of milliseconds for the restorer to read a message."""


class ClientGoneError(Exception):
    """Error that the client has closed its end of the pipes, or was killed."""


class Connection:
    """
    Exchange of frames with the client.

    ``incoming`` and ``outgoing`` are descriptors of two pipes. The kernel sends SIGIO to this process when data
    arrives, but not when the client has read data.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        os.set_blocking(incoming, False)
        os.set_blocking(outgoing, False)
        self._incoming = incoming
        self._outgoing = outgoing
        self._waiting = bytearray()
        self._due = 0.0
        self._reader = FrameReader()
        self.client = os.getppid()
        """Process id of the client."""
        self._messages: deque[object] = deque()
        self._warned: set[tuple[int | None, str]] = set()
        self._restorer = -1
        fcntl.fcntl(incoming, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(incoming, fcntl.F_SETFL, fcntl.fcntl(incoming, fcntl.F_GETFL) | os.O_ASYNC)

    @property
    def has_messages(self) -> bool:
        """True if a message has been received and not yet taken."""
        return bool(self._messages)

    def flush_if_due(self) -> float | None:
        """
        Send frames that have waited for ``_DELAY`` seconds.

        Return the seconds until the next call, or None if there are no frames.
        """
        if not self._waiting:
            return None
        remaining = self._due - time.monotonic()
        if remaining > 0:
            return remaining
        self.flush()
        return _RETRY / 1000 if self._waiting else None

    def use_restorer(self, descriptor: int, pid: int) -> None:
        """Send messages from now on to the restorer, the process ``pid``, through the pipe ``descriptor``, too."""
        if descriptor >= 0:
            process_calls.allow_tracer(pid)
            os.set_blocking(descriptor, False)
            self._restorer = descriptor
            self.tell_restorer(TracerBegun(os.getpid()))

    def tell_restorer(self, message: object) -> None:
        """Send a message to the restorer, before the change that it reports; close the pipe if the restorer is dead."""
        if self._restorer < 0:
            return
        frame = memoryview(pack_message(message))
        poll = select.poll()
        poll.register(self._restorer, select.POLLOUT)
        while frame and self._restorer >= 0:
            try:
                frame = frame[os.write(self._restorer, frame) :]
            except BlockingIOError:
                if not poll.poll(_RESTORER_PATIENCE):
                    self._give_restorer_up()
            except OSError:
                self._give_restorer_up()

    def _give_restorer_up(self) -> None:
        os.close(self._restorer)
        self._restorer = -1

    def send(self, message: object) -> None:
        """Send a message, or keep it until there is room."""
        if self._restorer >= 0 and isinstance(message, FOR_RESTORERS):
            self.tell_restorer(message)
        self._waiting += pack_message(message)
        self.flush()

    def warn_once(self, message: str, hint: str | None, program: int | None = None) -> None:
        """
        Send a warning to the users of the program with the number ``program``, or of all programs if it is None.

        The same warning is sent only once.
        """
        if (program, message) not in self._warned:
            self._warned.add((program, message))
            self.send(Warned(message, hint, program))

    def send_record(self, program: int, probe: int, record: bytes) -> bool:
        """
        Queue a record, to be sent some milliseconds later; return False if too many bytes are waiting.

        Waking the client for every single record would cost more than a hit.
        """
        if not self._waiting:
            self._due = time.monotonic() + _DELAY
        if len(self._waiting) > _BUFFER_LIMIT:
            self.flush()
            if len(self._waiting) > _BUFFER_LIMIT:
                return False
        self._waiting += RECORD_FRAME.pack(len(record) + RECORD.size, Kind.RECORD, program, probe) + record
        if len(self._waiting) > _CHUNK:
            self.flush()
        return True

    def flush(self) -> None:
        """Write as much of the queue as the pipe accepts."""
        waiting = self._waiting
        try:
            while waiting:
                sent = os.write(self._outgoing, waiting[:_CHUNK])
                del waiting[:sent]
        except BlockingIOError:
            return
        except OSError:
            waiting.clear()  # the client is gone; the next read reports that

    def receive(self) -> object | None:
        """Return the next message that has arrived, or None; raise ``ClientGoneError`` at the end of the stream."""
        if not self._messages:
            self._fill()
        return self._messages.popleft() if self._messages else None

    def await_answer(self, number: int, is_the_end: Callable[[object], bool]) -> Sites | None:
        """
        Wait for the reply to the request ``number``; raise ``ClientGoneError`` at the end of the stream.

        Also raise it if ``is_the_end`` returns True for a message, which requests the tracer's end. Return None if the
        client is stopped (Ctrl-Z): it replies when it is continued.
        """
        poll = select.poll()
        poll.register(self._incoming, select.POLLIN)
        while True:
            for message in self._messages:
                if isinstance(message, Sites) and message.number == number:
                    self._messages.remove(message)
                    return message
                if is_the_end(message):
                    raise ClientGoneError
            if not poll.poll(_RETRY if self._waiting else _LOOK) and self._client_is_stopped():
                return None
            self.flush()
            self._fill()

    def open(self, descriptor: int) -> int:
        """Open the file with a descriptor in the client, and return a descriptor; raise OSError if access is denied."""
        return os.open(f"/proc/{self.client}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)

    def _client_is_stopped(self) -> bool:
        return thread_state(self.client) in ("T", "t")

    def close(self) -> None:
        """Send all queued frames, and close the pipes; this may wait, because the targets are detached already."""
        poll = select.poll()
        poll.register(self._outgoing, select.POLLOUT)
        while self._waiting:
            poll.poll()
            self.flush()  # discards everything if the client is gone
        os.close(self._outgoing)
        os.close(self._incoming)

    def close_in_child(self) -> None:
        """Close the pipes in a child of this process: otherwise the client would not detect the end of this process."""
        os.close(self._outgoing)
        os.close(self._incoming)
        if self._restorer >= 0:
            self._give_restorer_up()

    def _fill(self) -> None:
        while True:
            try:
                data = os.read(self._incoming, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                if self._messages:
                    return
                raise ClientGoneError
            self._messages += [load_message(payload) for _, payload in self._reader.feed(data)]
