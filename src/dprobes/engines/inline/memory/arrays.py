"""Arrays in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.native.memory import MapPlace

if TYPE_CHECKING:
    from dprobes.engines.inline.memory.region import Region

__all__ = ["SharedArray"]


class SharedArray:
    """Hold an array of values; elements begin at multiples of ``stride``. Views must be released before the region."""

    def __init__(self, region: Region, value_size: int, entries: int = 1) -> None:
        self.stride = value_size + 7 & ~7
        self._region = region
        self._size = self.stride * entries
        self._offset = region.take(self._size)
        self.memory = region.view(self._offset, self._size)
        self.words = self.memory.cast("Q")
        self.halves = self.memory.cast("I")

    @property
    def place(self) -> MapPlace:
        """Where the probed process has it."""
        return MapPlace(self._region.place + self._offset, stride=self.stride)

    @property
    def own_address(self) -> int:
        """Where this process has it."""
        return self._region.own_address + self._offset

    @property
    def elements(self) -> range:
        """Where in the region the elements are."""
        return range(self._offset, self._offset + self._size, self.stride)

    def close(self) -> None:
        """Release the views."""
        for view in (self.halves, self.words, self.memory):
            view.release()
