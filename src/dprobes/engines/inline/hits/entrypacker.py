"""The entries of an index as packed records, in its order."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from dprobes.bpf.layout import ENTRY_HEAD, Entry
from dprobes.engines.inline.memory.ownroutines import own_function
from dprobes.engines.inline.memory.words import Words
from dprobes.errors import FormatError
from dprobes.native.routines.entryplanes import (
    PACKING_SIZE,
    PLACE_SIZE,
    Packing,
    difference_routine,
    order_routine,
    places_routine,
    planes_routine,
)
from dprobes.native.routines.entrywalk import LINE_SIZE, RECORD_PLACE
from dprobes.native.routines.ring import ENTRY_HEADER
from dprobes.record.mixed import MixedRecords
from dprobes.record.packed import PROBE_SIZE, PackedRecords

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.inline.hits.entryindex import EntryBuffer, EntryIndex, Group

__all__ = ["EntryPacker"]

_WORD = 8
_LENGTH_MAX = 1 << 16
"""Longer entries are looked at one by one: there cannot be many of them."""
_PROBE_BYTES = 3
"""Bytes of a probepoint's number in an entry; the kind stands in the fourth one."""


@lru_cache(1)
def _functions() -> tuple[Callable[..., int], ...]:
    routines = places_routine(), order_routine(), difference_routine(), planes_routine()
    return tuple(own_function(routine) for routine in routines)


class EntryPacker:
    """A packer of the entries in a buffer of ``room`` bytes at most."""

    def __init__(self, room: int) -> None:
        self._places = Words(room // 2 + PLACE_SIZE)
        self._out = Words(4 * room + _WORD)
        self._packing = Words(PACKING_SIZE)

    def packed(self, index: EntryIndex, buffer: EntryBuffer, count: int) -> PackedRecords | MixedRecords | None:
        """Return the entries of the first ``count`` lines; None if some are no records, or none of one kind."""
        _, order, _, _ = _functions()
        end = index.lines + count * LINE_SIZE
        parts: list[PackedRecords] = []
        numbers = bytearray(256)
        for number, group in enumerate(index.groups):
            size = self._list(index.lines, end, number)
            if not size:
                continue
            numbers[number] = len(parts)
            try:
                if group.kind > Entry.TRACE or not ENTRY_HEAD.size < group.length <= _LENGTH_MAX:
                    return None
                parts.append(self._part(group, buffer, size))
            except FormatError:
                return None
        if len(parts) == 1:
            return parts[0]
        order(index.lines, end, self._out.address)
        return MixedRecords(parts, self._out.memory[:count].translate(numbers))

    def _list(self, lines: int, end: int, group: int) -> int:
        """List where the entries of a group are; return how many."""
        places, _, _, _ = _functions()
        return (places(lines, end, group, self._places.address) - self._places.address) // PLACE_SIZE

    def _part(self, group: Group, buffer: EntryBuffer, count: int) -> PackedRecords:
        _, _, differ, put_together = _functions()
        memory, words = buffer.memory, self._packing.words
        first = int.from_bytes(self._places.memory[:PLACE_SIZE], "little")
        behind = ENTRY_HEADER + group.length
        size = -(-behind // _WORD) * _WORD
        self._out.memory[:size] = bytes(size)
        values = (
            (Packing.PLACES, self._places.address),
            (Packing.PLACES_END, self._places.address + count * PLACE_SIZE),
            (Packing.BASE, buffer.address),
            (Packing.FIRST, buffer.address + first),
            (Packing.DIFFERENCES, self._out.address),
            (Packing.DIFFERENCES_END, self._out.address + size),
            (Packing.COUNT, count),
        )
        for word, value in values:
            words[word // _WORD] = value
        differ(self._packing.address)
        differences = self._out.memory[:behind]
        rows = (*range(ENTRY_HEADER, ENTRY_HEADER + _PROBE_BYTES), *range(RECORD_PLACE, behind))
        which = [at for at in rows if differences[at]]
        listed = b"".join([at.to_bytes(PLACE_SIZE, "little") for at in which])
        at = -(-len(listed) // _WORD) * _WORD
        self._out.memory[: len(listed)] = listed
        words[Packing.WHICH // _WORD] = self._out.address
        words[Packing.WHICH_END // _WORD] = self._out.address + len(listed)
        words[Packing.OUT // _WORD] = self._out.address + at
        if which:
            put_together(self._packing.address)
        planes = {}
        for place in which:
            planes[_row_place(place)] = self._out.memory[at : at + count]
            at += count
        row = memory[first + ENTRY_HEADER : first + ENTRY_HEADER + _PROBE_BYTES] + b"\0"
        return PackedRecords(count, row + memory[first + RECORD_PLACE : first + behind], planes)

    def close(self) -> None:
        """Give the memory up."""
        for each in (self._places, self._out, self._packing):
            each.close()


def _row_place(place: int) -> int:
    """Return where in a row a byte of an entry is."""
    return place - ENTRY_HEADER if place < ENTRY_HEADER + PROBE_SIZE else place - RECORD_PLACE + PROBE_SIZE
