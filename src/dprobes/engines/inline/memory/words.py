"""Memory of this process that routines work in (``ownroutines``)."""

from __future__ import annotations

import ctypes
import mmap

__all__ = ["Words"]


class Words:
    """Own memory of ours, which costs nothing where nobody has been, as bytes and as words."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        first = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(first)
        del first
        self._view = memoryview(self.memory)
        self.words = self._view.cast("Q")

    def close(self) -> None:
        """Give it up."""
        self.words.release()
        self._view.release()
        self.memory.close()
