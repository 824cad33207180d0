"""The client's end of the pipe from the tracer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.client.tracerprocess import readable
from dprobes.engines.ptrace.wire import FrameReader

if TYPE_CHECKING:
    from dprobes.engines.ptrace.wire import Kind

__all__ = ["Inbox"]

_Frame = tuple["Kind", bytes]

_CHUNK = 1 << 16


class Inbox:
    """Read frames from ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._reader = FrameReader()
        self._kept: list[_Frame] = []

    def read(self) -> tuple[list[_Frame], bool]:
        """Wait for frames; return them, those that were read ahead first, and whether that was the end."""
        data = os.read(self.descriptor, _CHUNK)
        kept, self._kept = self._kept, []
        return kept + list(self._reader.feed(data)), not data

    def read_ahead(self) -> list[_Frame]:
        """Return what has arrived by now, and keep it for ``read``."""
        ahead: list[_Frame] = []
        while readable([self.descriptor], 0) and (data := os.read(self.descriptor, _CHUNK)):
            ahead += self._reader.feed(data)
        self._kept += ahead
        return ahead

    def close(self) -> None:
        """Give the pipe up."""
        os.close(self.descriptor)
