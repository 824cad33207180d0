"""
What processes had mapped, as engines heard of it while they ran: so what has ended can still be named and unwound.

A process that executes another program has another *image* from that moment on; a forked child begins with a copy of
its parent's. Only mappings of code are kept.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.target.process_maps import Mapping

__all__ = ["ProcessImage", "ProcessImages"]

_PROCESSES_MAX = 8192
"""How many processes are remembered; of more, those that have been heard of last."""

_IMAGES_MAX = 64
"""How many images of a process are remembered, the last ones."""

_MAPPINGS_MAX = 4096
"""How many mappings of an image are remembered; of more, those of files on disk first."""

_IN_MEMORY = "/memfd:"
"""How paths of files in memory begin, from which compilers map what they have just compiled: there may be thousands."""


class ProcessImage:
    """
    What a process has executed from ``since`` on, in nanoseconds of CLOCK_MONOTONIC: where it has mapped code.

    ``name`` is what the process was called when that began, empty if nobody told.
    """

    def __init__(self, pid: int, since: int, mappings: Sequence[Mapping] = (), name: str = "") -> None:
        self.pid = pid
        self.since = since
        self.name = name
        self._mappings = {each.start: each for each in _first(mappings)}
        self._starts = sorted(self._mappings)

    @property
    def mappings(self) -> list[Mapping]:
        """The mappings in order of addresses."""
        return [self._mappings[start] for start in self._starts]

    def covering(self, address: int) -> Mapping | None:
        """Return the mapping at an address."""
        number = bisect_right(self._starts, address) - 1
        found = self._mappings[self._starts[number]] if number >= 0 else None
        return found if found is not None and address < found.end else None

    def add(self, mapping: Mapping) -> None:
        """Enter a mapping, in the place of those that it lies over."""
        first = bisect_right(self._starts, mapping.start)
        if first and self._mappings[self._starts[first - 1]].end > mapping.start:
            first -= 1
        while first < len(self._starts) and self._starts[first] < mapping.end:
            del self._mappings[self._starts.pop(first)]
        if len(self._starts) < _MAPPINGS_MAX:
            self._mappings[mapping.start] = mapping
            insort(self._starts, mapping.start)

    def copy(self, pid: int, since: int) -> ProcessImage:
        """Return the image of a forked child."""
        return ProcessImage(pid, since, self.mappings, self.name)


def _first(mappings: Sequence[Mapping]) -> Sequence[Mapping]:
    if len(mappings) > _MAPPINGS_MAX:
        mappings = sorted(mappings, key=lambda each: each.path.startswith(_IN_MEMORY))
    return mappings[:_MAPPINGS_MAX]


class _Index:
    """The mappings of several images by addresses, each once of those that show the same place of a file."""

    def __init__(self, images: Iterable[ProcessImage]) -> None:
        rows = {
            (each.start, each.end, each.offset, each.device, each.inode, "" if each.inode else each.path): (
                image.pid,
                image.since,
            )
            for image in images
            for each in image.mappings
        }
        self._rows = sorted(rows.items())
        self._starts = [row[0] for row, _ in self._rows]
        self._reach = list(accumulate((row[1] for row, _ in self._rows), max))
        """The furthest end of a mapping and all before it: where a search back may stop."""

    def at(self, address: int) -> list[tuple[int, int]]:
        """Return the process, and the moment, of each different code at an address."""
        found = {}
        number = bisect_right(self._starts, address) - 1
        while number >= 0 and self._reach[number] > address:
            (start, end, offset, *file), process = self._rows[number]
            if address < end:
                found[start - offset, *file] = process
            number -= 1
        return list(found.values())


class ProcessImages:
    """The images of processes; engines tell of them, and any thread may ask. Times are of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._images: OrderedDict[int, list[ProcessImage]] = OrderedDict()
        self._index: _Index | None = None

    def began(self, pid: int, since: int, mappings: Sequence[Mapping] = (), name: str = "") -> None:
        """Enter what a process executes from a moment on, and what it is called."""
        self._enter(ProcessImage(pid, since, mappings, name))

    def mapped(self, pid: int, when: int, mapping: Mapping) -> None:
        """Enter one more mapping of a process that is known."""
        with self._lock:
            if (image := self._at(pid, when)) is not None:
                image.add(mapping)
                self._index = None

    def forked(self, pid: int, parent: int, when: int) -> None:
        """Enter a process that is a copy of one that is known."""
        with self._lock:
            image = self._at(parent, when)
        if image is not None:
            self._enter(image.copy(pid, when))

    def at(self, pid: int, when: int | None) -> ProcessImage | None:
        """Return what a process executed at a moment, None for the last; None if nobody has told."""
        with self._lock:
            return self._at(pid, when)

    def covering(self, pid: int, address: int) -> ProcessImage | None:
        """Return the last image of a process that has code at an address; None if nobody has told of one."""
        with self._lock:
            images = reversed(self._images.get(pid, []))
            return next((image for image in images if image.covering(address) is not None), None)

    def code_at(self, address: int) -> list[tuple[int, int]]:
        """
        Return processes that have, or have had, code at an address, each with the moment since when.

        There is one for each place of a file that any of them shows there: several are different code.
        """
        with self._lock:
            if self._index is None:
                self._index = _Index(image for images in self._images.values() for image in images)
            return self._index.at(address)

    def _enter(self, image: ProcessImage) -> None:
        with self._lock:
            self._index = None
            images = self._images.setdefault(image.pid, [])
            self._images.move_to_end(image.pid)
            insort(images, image, key=attrgetter("since"))
            del images[:-_IMAGES_MAX]
            while len(self._images) > _PROCESSES_MAX:
                self._images.popitem(last=False)

    def _at(self, pid: int, when: int | None) -> ProcessImage | None:
        images = self._images.get(pid, [])
        number = len(images) if when is None else bisect_right(images, when, key=attrgetter("since"))
        return images[number - 1] if number else None
