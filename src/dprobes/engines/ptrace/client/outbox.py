"""The client's end of the pipe to the tracer: any thread may send a message, and a signal handler ask for the end."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque

from dprobes.engines.ptrace.wire import End, pack_message

__all__ = ["Outbox"]


class Outbox:
    """Send whole messages to the tracer through ``descriptor``; that the tracer is gone shows elsewhere."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._ends: deque[End] = deque()
        self._ended: set[int] = set()

    def send(self, message: object) -> None:
        """Send a message; after ``close`` it goes nowhere."""
        with self._lock:
            self._write(message)
        self._send_ends()

    def end(self, program: int) -> None:
        """Ask once for the end of a program; may be called by a signal handler, which may have interrupted ``send``."""
        if program not in self._ended:
            self._ended.add(program)
            self._ends.append(End(program))
        self._send_ends()

    def close(self) -> None:
        """Give the pipe up."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def _send_ends(self) -> None:
        # A signal handler cannot wait for whom it has interrupted: that one will come here when it is done.
        while self._ends and self._lock.acquire(blocking=False):
            try:
                while self._ends:
                    self._write(self._ends.popleft())
            finally:
                self._lock.release()

    def _write(self, message: object) -> None:
        frame = memoryview(pack_message(message))
        with contextlib.suppress(BrokenPipeError):
            while frame and self._descriptor >= 0:
                frame = frame[os.write(self._descriptor, frame) :]
