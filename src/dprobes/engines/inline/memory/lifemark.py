"""
A mark in shared memory that says whether this process lives: handlers do nothing any more when it does not.

The kernel changes it, whichever way the process ends (``linux.robustlist``): nobody has to write into it again and
again, and handlers need no clock to know.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dprobes.engines.linux.robustlist import note_end_of_thread
from dprobes.native.lifemark import HAS_ENDED

if TYPE_CHECKING:
    from dprobes.engines.inline.memory.arrays import SharedArray

__all__ = ["LifeMark"]


class LifeMark:
    """The mark in ``array``, which is that of a thread of its own; OSError if the kernel cannot do that."""

    def __init__(self, array: SharedArray) -> None:
        self._array = array
        self._address = array.own_address
        self._ready, self._over = threading.Event(), threading.Event()
        self._problem: OSError | None = None
        self._thread = threading.Thread(target=self._live, name="dprobes-life", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._problem is not None:
            self._over.set()
            self._thread.join()
            raise self._problem

    @property
    def address(self) -> int:
        """Where the probed process has it."""
        return self._array.place.address

    @property
    def word(self) -> int:
        """What it is now."""
        word: int = self._array.halves[0]
        return word

    def _live(self) -> None:
        try:
            note_end_of_thread(self._array.memory, self._address)
        except OSError as error:
            self._problem = error
        self._ready.set()
        self._over.wait()

    def close(self) -> None:
        """End it: handlers do nothing from now on."""
        self._over.set()
        self._thread.join()
        self._array.halves[0] = HAS_ENDED
        self._array.close()
