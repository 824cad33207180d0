"""
The tracer's end of the two pipes to the client.

Nothing that the client does or fails to do may hold up the target: frames wait in a bounded buffer, and records that do
not fit are refused (the caller counts them as lost). Only a question waits for its answer, and not if the client is
stopped.
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
"""Bytes of records that may wait for the client."""

_CHUNK = 1 << 16
_DELAY = 0.005
"""Seconds that a record may wait for others to be sent with."""

_RETRY = 5
"""Milliseconds after which a full pipe is tried again."""

_LOOK = 100
"""Milliseconds without an answer after which to look whether the client is stopped."""


_RESTORER_PATIENCE = 1000
"""Milliseconds that the process may take to read which restores what a killed tracer leaves."""


class ClientGoneError(Exception):
    """Report that the client closed its end or died."""


class Connection:
    """
    The exchange of frames with the client.

    ``incoming`` and ``outgoing`` are the descriptors of two pipes: SIGIO is sent to this process when something
    arrives, and must not be sent when the client merely makes room for more.
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
        """The process id of the client."""
        self._messages: deque[object] = deque()
        self._warned: set[tuple[int | None, str]] = set()
        self._restorer = -1
        fcntl.fcntl(incoming, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(incoming, fcntl.F_SETFL, fcntl.fcntl(incoming, fcntl.F_GETFL) | os.O_ASYNC)

    @property
    def has_messages(self) -> bool:
        """Whether a message waits to be taken."""
        return bool(self._messages)

    def flush_if_due(self) -> float | None:
        """Send what has waited long enough; return in how many seconds to ask again, None if nothing waits."""
        if not self._waiting:
            return None
        remaining = self._due - time.monotonic()
        if remaining > 0:
            return remaining
        self.flush()
        return _RETRY / 1000 if self._waiting else None

    def use_restorer(self, descriptor: int, pid: int) -> None:
        """From now on tell the process ``pid`` through a pipe what it is to restore should we be killed."""
        if descriptor >= 0:
            process_calls.allow_tracer(pid)
            os.set_blocking(descriptor, False)
            self._restorer = descriptor
            self.tell_restorer(TracerBegun(os.getpid()))

    def tell_restorer(self, message: object) -> None:
        """Tell that process something, before it is so; one that does not read any more is given up."""
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
        """Tell the user of a program something, or of all; the same thing once."""
        if (program, message) not in self._warned:
            self._warned.add((program, message))
            self.send(Warned(message, hint, program))

    def send_record(self, program: int, probe: int, record: bytes) -> bool:
        """
        Keep a record to be sent some milliseconds later; return False if too many wait already.

        To wake the client for every single record costs more than a hit.
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
        """Send as much of what waits as the pipe takes."""
        waiting = self._waiting
        try:
            while waiting:
                sent = os.write(self._outgoing, waiting[:_CHUNK])
                del waiting[:sent]
        except BlockingIOError:
            return
        except OSError:
            waiting.clear()  # the client is gone; receiving tells the tracer so

    def receive(self) -> object | None:
        """Return the next message that has arrived, or None; raise ``ClientGoneError`` at the end of the stream."""
        if not self._messages:
            self._fill()
        return self._messages.popleft() if self._messages else None

    def await_answer(self, number: int, is_the_end: Callable[[object], bool]) -> Sites | None:
        """
        Wait for the answer to a question that was sent; raise ``ClientGoneError`` if none will come.

        ``is_the_end`` says which messages ask for the end of everything, so that nothing is to be waited for.

        A client that is stopped (Ctrl-Z) answers when it goes on: then the result is None.
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
        """Open a file of the client's by its number there; raise OSError if we may not."""
        return os.open(f"/proc/{self.client}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)

    def _client_is_stopped(self) -> bool:
        return thread_state(self.client) in ("T", "t")

    def close(self) -> None:
        """Deliver what still waits, however long the client takes (the targets are free by now), and close."""
        poll = select.poll()
        poll.register(self._outgoing, select.POLLOUT)
        while self._waiting:
            poll.poll()
            self.flush()  # forgets everything if the client is gone
        os.close(self._outgoing)
        os.close(self._incoming)

    def close_in_child(self) -> None:
        """Close our ends in a child of this process, so that the client learns of the end of this one."""
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
