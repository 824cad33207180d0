"""
Mappings of code in processes, recorded by engines. They name and unwind code of processes that have exited.

A process that executes another program has a new *image* from then on. A forked child begins with a copy of its
parent's image. Only mappings of code are kept.
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
"""Maximum number of remembered processes. Those reported last are kept."""

_IMAGES_MAX = 64
"""Maximum number of remembered images of a process. The last ones are kept."""

_MAPPINGS_MAX = 4096
"""Maximum number of remembered mappings of an image. Files on disk are preferred."""

_IN_MEMORY = "/memfd:"
"""Prefix of the paths of files in memory. Just-in-time compilers map code from them, maybe thousands."""


class ProcessImage:
    """
    Mappings of code of a process from an exec or fork on, until the next exec.

    ``since`` is the time of the exec or fork in nanoseconds of CLOCK_MONOTONIC. ``name`` is the process's name at that
    time, empty if unknown.
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
        """Return the mapping at an address, or None if there is none."""
        number = bisect_right(self._starts, address) - 1
        found = self._mappings[self._starts[number]] if number >= 0 else None
        return found if found is not None and address < found.end else None

    def add(self, mapping: Mapping) -> None:
        """
        Add a mapping and remove mappings that it overlaps.

        Ignore it if the image has the maximum number of mappings.
        """
        first = bisect_right(self._starts, mapping.start)
        if first and self._mappings[self._starts[first - 1]].end > mapping.start:
            first -= 1
        while first < len(self._starts) and self._starts[first] < mapping.end:
            del self._mappings[self._starts.pop(first)]
        if len(self._starts) < _MAPPINGS_MAX:
            self._mappings[mapping.start] = mapping
            insort(self._starts, mapping.start)

    def copy(self, pid: int, since: int) -> ProcessImage:
        """Return a copy of the image for a forked child ``pid``, valid from the time ``since`` on."""
        return ProcessImage(pid, since, self.mappings, self.name)


def _first(mappings: Sequence[Mapping]) -> Sequence[Mapping]:
    if len(mappings) > _MAPPINGS_MAX:
        mappings = sorted(mappings, key=lambda each: each.path.startswith(_IN_MEMORY))
    return mappings[:_MAPPINGS_MAX]


class _Index:
    """
    An index by address of the code mappings in several process images, to find which code an address may mean.

    Mappings of the same part of a file at the same address are one row.
    """

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
        """The largest end of each row and all rows before it, which bounds a search backwards."""

    def at(self, address: int) -> list[tuple[int, int]]:
        """Return a process for each different code at an address: (pid, start of its image), one for equal code."""
        found = {}
        number = bisect_right(self._starts, address) - 1
        while number >= 0 and self._reach[number] > address:
            (start, end, offset, *file), process = self._rows[number]
            if address < end:
                found[start - offset, *file] = process
            number -= 1
        return list(found.values())


class ProcessImages:
    """Images of processes, recorded by engines; thread-safe. Times are nanoseconds of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._images: OrderedDict[int, list[ProcessImage]] = OrderedDict()
        self._index: _Index | None = None

    def began(self, pid: int, since: int, mappings: Sequence[Mapping] = (), name: str = "") -> None:
        """Add the image that a process has from the time ``since`` on, with its name."""
        self._enter(ProcessImage(pid, since, mappings, name))

    def mapped(self, pid: int, when: int, mapping: Mapping) -> None:
        """Add a mapping to the image that a process has at ``when``. Ignore an unknown process."""
        with self._lock:
            if (image := self._at(pid, when)) is not None:
                image.add(mapping)
                self._index = None

    def forked(self, pid: int, parent: int, when: int) -> None:
        """Add a process that was forked from ``parent`` at ``when``. Ignore an unknown parent."""
        with self._lock:
            image = self._at(parent, when)
        if image is not None:
            self._enter(image.copy(pid, when))

    def at(self, pid: int, when: int | None) -> ProcessImage | None:
        """Return the image of a process at the time ``when``, or the last one if it is None; None if there is none."""
        with self._lock:
            return self._at(pid, when)

    def covering(self, pid: int, address: int) -> ProcessImage | None:
        """Return the last known image of a process that has code at an address, or None if there is none."""
        with self._lock:
            images = reversed(self._images.get(pid, []))
            return next((image for image in images if image.covering(address) is not None), None)

    def code_at(self, address: int) -> list[tuple[int, int]]:
        """
        Return processes that have or had code at an address, each with the start time of its image.

        There is one process for each distinct part of a file at the address, so several mean different code.
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
