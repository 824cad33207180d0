"""
Bytes that nobody has had time to look at, in a file without a name: first in, first out.

Writing is one copy, from the ring's memory to the file's, and what waits does not grow our memory.
"""

from __future__ import annotations

import os
from typing import IO

__all__ = ["Overflow"]


class Overflow:
    """Hold up to ``limit`` bytes in a temporary file (TMPDIR), made when it is needed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._file: IO[bytes] | None = None
        self._start = self._end = 0

    def write(self, data: memoryview | bytes) -> bool:
        """Append data; return False if there is no room, and nothing was kept."""
        if self._end + len(data) > self._limit:
            return False
        try:
            if self._file is None:
                import tempfile

                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by close
            view, written = memoryview(data), 0
            while written < len(data):
                written += os.pwrite(self._file.fileno(), view[written:], self._end + written)
        except OSError:
            return False
        self._end += len(data)
        return True

    def read(self, size: int) -> bytes:
        """Take away the first ``size`` bytes, which have been written."""
        assert self._file is not None, "nothing has been written"
        data = os.pread(self._file.fileno(), size, self._start)
        self._start += size
        if self._start == self._end:
            self._start = self._end = 0
            os.ftruncate(self._file.fileno(), 0)
        return data

    def close(self) -> None:
        """Give up the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
