"""
The pieces of the rings as what they say: records in their canonical form, and ends of probepoints.

Few records are looked at one by one, and come in the order of their time, whichever CPU they are of. Many are packed as
they stand in the rings: then those of one ring come after those of another, a hundredth of a second at a time.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import TYPE_CHECKING

from dprobes.bpf.layout import ENTRY_HEAD, KIND_SHIFT, NAME_SIZE, Entry
from dprobes.engines.inline.recordorder import RecordOrder
from dprobes.engines.packedentries import packed_span
from dprobes.engines.ringspans import entries_in, spans_in
from dprobes.record.layout import Item, header_struct
from dprobes.record.mixed import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.ringspans import Span

    Batch = Sequence[tuple[int, bytes]]

__all__ = ["RingReader"]

_PROBE = (1 << KIND_SHIFT) - 1
_NAMED = int(Item.PROCESS_NAME)
_FLAGS = struct.Struct("<I")

_FEW = 1 << 15
"""Bytes in all rings that are looked at one by one."""


class RingReader:
    """
    A reader of entries.

    ``ended`` collects the probepoints that are to be removed, ``counts`` the records of each.
    """

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.counts: Counter[int] = Counter()
        self._order = RecordOrder()
        self._name_places: dict[int, int] = {}

    def read(self, pieces: Sequence[bytes], before: int | None) -> list[Batch]:
        """
        Return the records in pieces of rings, each with its probepoint.

        Those that are not older than ``before`` may be kept for the next time; None means that there is none.
        """
        if sum(map(len, pieces)) <= _FEW:
            records = [each for piece in pieces for each in self._each(piece, 0, len(piece))]
            batch = self._order.sorted(records, before)
            return [batch] if batch else []
        batches: list[Batch] = [self._order.sorted([], None)]
        for piece in pieces:
            batches += (self._span(piece, span) for span in spans_in(piece))
        return [batch for batch in batches if batch]

    def _span(self, piece: bytes, span: Span) -> Batch:
        packed = packed_span(piece, span)
        if packed is None:
            return list(self._each(piece, span.start, span.stop))
        for part in parts_of(packed):
            probes = part.probes()
            self.counts.update({probes: len(part)} if isinstance(probes, int) else probes)
        return packed

    def _each(self, piece: bytes, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        for first, last in entries_in(piece, start, stop):
            word, _ = ENTRY_HEAD.unpack_from(piece, first)
            kind, probe = word >> KIND_SHIFT, word & _PROBE
            if kind in (Entry.RECORD, Entry.TRACE):
                self.counts[probe] += 1
                yield probe, self._canonical(piece[first + ENTRY_HEAD.size : last])
            elif kind == Entry.ENDED:
                self.ended.append(probe)

    def _canonical(self, record: bytes) -> bytes:
        """Return a record with the process name as long as it is, instead of with zeros behind it."""
        (flags,) = _FLAGS.unpack_from(record)
        if not flags & _NAMED:
            return record
        place = self._name_places.get(flags)
        if place is None:
            place = self._name_places[flags] = header_struct(flags, "little").size
        return record[: record.index(0, place) + 1] + record[place + NAME_SIZE :]
