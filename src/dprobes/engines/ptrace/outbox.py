"""The client's end of the pipe to the tracer: any thread may send a message, and a signal handler ask for the end."""

from __future__ import annotations

import contextlib
import os
import threading

from dprobes.engines.ptrace.wire import Stop, pack_message

__all__ = ["Outbox"]


class Outbox:
    """Send whole messages to the tracer through ``descriptor``; that the tracer is gone shows elsewhere."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._is_stop_sent = False
        self.is_stopping = False
        """Whether the end was asked for."""

    def send(self, message: object) -> None:
        """Send a message; after ``close`` it goes nowhere."""
        with self._lock:
            self._write(message)
        self._stop_if_asked()

    def stop(self) -> None:
        """Send ``Stop`` once; may be called by a signal handler, which may have interrupted ``send``."""
        self.is_stopping = True
        self._stop_if_asked()

    def close(self) -> None:
        """Give the pipe up."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def _stop_if_asked(self) -> None:
        # A signal handler cannot wait for whom it has interrupted: that one will come here when it is done.
        while self.is_stopping and not self._is_stop_sent and self._lock.acquire(blocking=False):
            try:
                if not self._is_stop_sent:
                    self._is_stop_sent = True
                    self._write(Stop())
            finally:
                self._lock.release()

    def _write(self, message: object) -> None:
        frame = memoryview(pack_message(message))
        with contextlib.suppress(BrokenPipeError):
            while frame and self._descriptor >= 0:
                frame = frame[os.write(self._descriptor, frame) :]
