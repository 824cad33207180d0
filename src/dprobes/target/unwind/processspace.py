"""
The memory of a process as the walk up a stack sees it: bytes, and the unwind tables of the modules that it maps.

Tables are read from the memory and not from files: so they are those of the very code, also of files that are gone or
that are other ones in this mount namespace, and of the ``[vdso]``.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, Literal

from dprobes.errors import TargetError
from dprobes.target.unwind.fileframes import LateFrames, completed, moved_to
from dprobes.target.unwind.frametable import MemoryFrameTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.arch import ByteOrder
    from dprobes.target.processmaps import Mapping
    from dprobes.target.unwind.fileframes import FileFrames, FrameRules

__all__ = ["ProcessSpace"]

_OWN_AREAS = ("[vdso]",)

_ANSWERS_MAX = 1 << 14
"""How many addresses of code are remembered with their tables."""


class ProcessSpace:
    """
    One address space; ``read_memory`` raises ``TargetError`` for what is not there.

    ``forget`` is to be called when mappings may have changed. What lies at an address that no known mapping has is
    looked for once more. ``open_file`` returns the tables of a mapped file, None if it cannot be had: they are asked
    for what no table in memory covers.
    """

    byte_order: ByteOrder = sys.byteorder

    def __init__(
        self,
        word_size: Literal[4, 8],
        read_memory: Callable[[int, int], bytes],
        read_mappings: Callable[[], Sequence[Mapping]],
        open_file: Callable[[Mapping], FileFrames | None] | None = None,
    ) -> None:
        self.word_size = word_size
        self.read = read_memory
        self._read_mappings = read_mappings
        self._open_file = open_file
        self._mappings: Sequence[Mapping] = ()
        self._starts: list[int] = []
        self._tables: dict[tuple[int, int, int], FrameRules | None] = {}
        self._answers: dict[int, FrameRules | None] = {}

    def forget(self) -> None:
        """Forget what is mapped where; tables stay those of what is mapped at the same place again."""
        self._mappings = ()
        self._starts = []
        self._answers.clear()

    def table_at(self, address: int) -> FrameRules | None:
        """Return the unwind table of the module that an address lies in; None if there is none."""
        table = self._answers.get(address)
        if table is None and (table := self._search(address)) is not None:
            if len(self._answers) >= _ANSWERS_MAX:
                self._answers.clear()
            self._answers[address] = table
        return table

    def _search(self, address: int) -> FrameRules | None:
        mapping = self._mapping_at(address)
        if mapping is None:
            self._look()
            mapping = self._mapping_at(address)
        if mapping is None or not (mapping.is_file or mapping.path in _OWN_AREAS):
            return None
        base = self._base_of(mapping)
        if base is None:
            return None
        key = (base, mapping.device, mapping.inode)
        if key not in self._tables:
            table = MemoryFrameTable.at(self, base)
            self._tables[key] = completed(table, LateFrames(partial(self._file_table, mapping)))
        return self._tables[key]

    def _file_table(self, mapping: Mapping) -> FrameRules | None:
        """Return the table of the file that is mapped, for what is not in memory."""
        frames = self._open_file(mapping) if self._open_file is not None and mapping.is_file else None
        return None if frames is None else moved_to(frames, mapping, self.word_size, self.byte_order)

    def is_of_file(self, address: int) -> bool:
        """Return whether a known mapping at an address shows a file, or is the kernel's."""
        mapping = self._mapping_at(address)
        return mapping is not None and (mapping.is_file or mapping.path in _OWN_AREAS)

    @property
    def is_known(self) -> bool:
        """Whether its mappings could be read: those of a process that has ended, and waits for its parent, cannot."""
        return bool(self._mappings)

    def is_alive(self) -> bool:
        """Return whether the first byte of a known mapping can be read still, or none is known."""
        try:
            return not self._mappings or bool(self.read(self._mappings[0].start, 1))
        except TargetError:
            return False

    def _look(self) -> None:
        self._mappings = self._read_mappings()
        self._starts = [mapping.start for mapping in self._mappings]
        self._answers.clear()
        there = {(mapping.start, mapping.device, mapping.inode) for mapping in self._mappings}
        self._tables = {key: table for key, table in self._tables.items() if key in there}

    def _mapping_at(self, address: int) -> Mapping | None:
        number = bisect_right(self._starts, address) - 1
        if number < 0 or address >= self._mappings[number].end:
            return None
        return self._mappings[number]

    def _base_of(self, mapping: Mapping) -> int | None:
        """Return where the first byte of a mapped file is that belongs to the mapping."""
        for each in reversed(self._mappings[: bisect_right(self._starts, mapping.start)]):
            if (each.device, each.inode, each.path) == (
                mapping.device,
                mapping.inode,
                mapping.path,
            ) and not each.offset:
                return each.start
        return None
