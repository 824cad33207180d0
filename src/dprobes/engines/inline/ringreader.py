"""The entries of the rings as what they say: records in their canonical form, and ends of probepoints."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.bpf.layout import ENTRY_HEAD, KIND_SHIFT, NAME_SIZE, Entry
from dprobes.record.layout import Item, header_struct

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["RingReader"]

_PROBE = (1 << KIND_SHIFT) - 1
_NAMED = int(Item.PROCESS_NAME)
_FLAGS = struct.Struct("<I")


class RingReader:
    """A reader of entries; ``ended`` collects the probepoints that are to be removed."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self._name_places: dict[int, int] = {}

    def read(self, entries: Iterable[bytes]) -> list[tuple[int, bytes]]:
        """Return the records in entries, each with its probepoint."""
        records = []
        for entry in entries:
            first, _ = ENTRY_HEAD.unpack_from(entry)
            kind = first >> KIND_SHIFT
            if kind in (Entry.RECORD, Entry.TRACE):
                records.append((first & _PROBE, self._canonical(entry[ENTRY_HEAD.size :])))
            elif kind == Entry.ENDED:
                self.ended.append(first & _PROBE)
        return records

    def _canonical(self, record: bytes) -> bytes:
        """Return a record with the process name as long as it is, instead of with zeros behind it."""
        (flags,) = _FLAGS.unpack_from(record)
        if not flags & _NAMED:
            return record
        place = self._name_places.get(flags)
        if place is None:
            place = self._name_places[flags] = header_struct(flags, "little").size
        return record[: record.index(0, place) + 1] + record[place + NAME_SIZE :]
