"""Places in the code of a module, found by addresses in processes that map the module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.target.process_images import ProcessImages

__all__ = ["CodePlaces"]

T = TypeVar("T")


class CodePlaces(Generic[T]):
    """Places of the module with an ``inode``: ``places`` maps the file offset of each to its description."""

    def __init__(self, images: ProcessImages | None, places: Mapping[int, T], inode: int) -> None:
        self._images = images
        self._places = places
        self._inode = inode

    def at(self, address: int) -> T | None:
        """Return the place at an address of a process; None if no process is known to have had one there."""
        for pid, since in self._images.code_at(address) if self._images is not None else ():
            image = None if self._images is None else self._images.at(pid, since)
            mapping = None if image is None else image.covering(address)
            if mapping is None or mapping.inode != self._inode:
                continue  # another process has another file at the address
            if (place := self._places.get(address - mapping.start + mapping.offset)) is not None:
                return place
        return None
