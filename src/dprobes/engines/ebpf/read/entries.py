"""
The entries of a ring as what they say: records in their canonical form, ends of probepoints, signals.

A piece of the ring is read as it stands there, headers and discarded entries included (``kernel.ring``). Many records
of one size in a row are packed as they are, without a look at each.
"""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING

from dprobes.bpf.layout import ENTRY_HEAD, KIND_SHIFT, NAME_SIZE, TICKETS_SHIFT, Entry
from dprobes.engines.ebpf.read.heldrecords import Ended
from dprobes.engines.ringspans import HEADER_SIZE, entries_in, sizes_in, spans_in
from dprobes.record.layout import Item, header_struct
from dprobes.record.mixed import MixedRecords, in_order
from dprobes.record.packed import numbers_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.ebpf.read.heldrecords import HeldRecords
    from dprobes.engines.ebpf.read.userstacks import UserStacks
    from dprobes.engines.ringspans import Span
    from dprobes.record.packed import PackedRecords

__all__ = ["EntryReader"]

_HEAD_SIZE = ENTRY_HEAD.size
_TRACE = int(Entry.TRACE)  # enum members are slow to look up
_OF_TABLES = (int(Entry.TALLY), int(Entry.UNTALLY))
_NAME_FLAG_BYTE, _NAME_FLAG = 1, Item.PROCESS_NAME >> 8
_TID_AT, _TID_SIZE = HEADER_SIZE + 4, 4
_MIXED_MIN = 4096
"""Bytes of entries of various sizes that are worth packing."""
_ENDED = struct.Struct("=II")
_SIGNAL = struct.Struct("=QII")


class EntryReader:
    """
    A reader of pieces of the ring, which puts what they say into ``held``; ``stacks`` follows call stacks.

    ``bank_size``, a power of two, is the distance of the entries that a probepoint has in the probe table; entries of
    the ring name one of them.
    """

    def __init__(self, held: HeldRecords, bank_size: int, stacks: UserStacks | None = None) -> None:
        self._held = held
        self._stacks = stacks
        self._probe_mask = bank_size - 1
        self._name_places: dict[int, int] = {}

    def read(self, data: bytes, stamp: float) -> None:
        """Read whole entries, which were in the ring at the time ``stamp``."""
        for span in spans_in(data):
            is_read = self._read_packed(data, span, stamp) if span.stride else self._read_mixed(data, span, stamp)
            if not is_read:
                self._read_each(data, span, stamp)

    def _read_packed(self, data: bytes, span: Span, stamp: float) -> bool:
        """Read entries of one size if all are records of one kind; return whether they are."""
        if self._stacks is not None:
            return False
        table = data[span.start : span.stop]
        if (found := self._packed(table, span.stride)) is None:
            return False
        records, tids = found
        self._held.add_packed(records, tids, stamp)
        return True

    def _packed(self, table: bytes, stride: int) -> tuple[PackedRecords, Sequence[int] | int] | None:
        """Return entries of one size as records of one kind, and their threads; None if they are not."""
        from dprobes.engines.packedentries import packed_entries  # not at a start, before there are records

        count = len(table) // stride
        records = packed_entries(table, stride)
        if records is None:
            return None
        probes = records.probes()
        if (probes if isinstance(probes, int) else max(probes)) > self._probe_mask:
            records = records.renumbered(lambda probe: probe & self._probe_mask)
            probes = records.probes()
        return records, self._tids(table, stride, count, probes)

    def _read_mixed(self, data: bytes, span: Span, stamp: float) -> bool:
        """Read entries of few sizes if all of one size are records of one kind; return whether they are."""
        if self._stacks is not None or span.stop - span.start < _MIXED_MIN:
            return False
        found = sizes_in(data, span.start, span.stop)
        if found is None:
            return False
        groups, order = found
        parts, threads = [], []
        for stride, places in groups:
            one = self._packed(b"".join([data[at : at + stride] for at in places]), stride)
            if one is None:
                return False
            parts.append(one[0])
            threads.append(one[1])
        if len(parts) == 1:
            self._held.add_packed(parts[0], threads[0], stamp)
            return True
        tids: Sequence[int] | int = 0
        if any(threads):
            spread = [
                [tid] * len(part) if isinstance(tid, int) else tid for part, tid in zip(parts, threads, strict=True)
            ]
            tids = list(in_order(order, spread))
        self._held.add_packed(MixedRecords(parts, order), tids, stamp)
        return True

    def _tids(self, table: bytes, stride: int, count: int, probes: list[int] | int) -> Sequence[int] | int:
        """Return the threads of records that are uncertain; 0 for the others."""
        uncertain = self._held.uncertain
        if isinstance(probes, int):
            if probes not in uncertain:
                return 0
        elif not any(probe in uncertain for probe in set(probes)):
            return 0
        planes = [table[at::stride] for at in range(_TID_AT, _TID_AT + _TID_SIZE)]
        if isinstance(probes, int) and all(plane == plane[:1] * count for plane in planes):
            return int.from_bytes(table[_TID_AT : _TID_AT + _TID_SIZE], sys.byteorder)
        values = bytearray(_TID_SIZE * count)
        for place, plane in enumerate(planes):
            values[place::_TID_SIZE] = plane
        tids = numbers_in(values, _TID_SIZE)
        if isinstance(probes, int):
            return tids
        return [tid if probe in uncertain else 0 for probe, tid in zip(probes, tids, strict=True)]

    def _read_each(self, data: bytes, span: Span, stamp: float) -> None:
        held, unpack, uncertain, probe_mask = self._held, ENTRY_HEAD.unpack_from, self._held.uncertain, self._probe_mask
        stacks = self._stacks
        records: list[tuple[int, bytes]] = []
        tids: list[int] = []
        for position, stop in entries_in(data, span.start, span.stop):
            first, tid = unpack(data, position)
            start = position + _HEAD_SIZE
            kind = first >> KIND_SHIFT
            if kind <= _TRACE:
                probe = first & probe_mask
                is_named = data[start + _NAME_FLAG_BYTE] & _NAME_FLAG
                record = self._canonical(data, start, stop) if is_named else data[start:stop]
                if stacks:
                    record = stacks.completed(record)
                if probe not in uncertain:
                    tid = 0
                elif kind == _TRACE:
                    held.add(records, tids, stamp)
                    records, tids = [], []
                    held.add([(probe, record)], [tid], stamp, is_trace=True)
                    continue
                records.append((probe, record))
                tids.append(tid)
                continue
            if kind in _OF_TABLES:
                if stacks is not None:
                    stacks.change(data, start, stop, is_removal=kind == Entry.UNTALLY)
                continue
            if kind == Entry.SNAPSHOT:
                if stacks is not None:
                    stacks.take(data, start, stop)
                continue
            held.add(records, tids, stamp)
            records, tids = [], []
            if kind == Entry.SIGNAL:
                ip, signal, _ = _SIGNAL.unpack_from(data, start)
                held.drop(tid, ip, has_tickets=signal >> TICKETS_SHIFT > 0)
            elif kind == Entry.ENDED:
                reason, pid = _ENDED.unpack_from(data, start)
                held.add_end(Ended(first & probe_mask, reason, pid, tid))
        held.add(records, tids, stamp)

    def _canonical(self, data: bytes, start: int, stop: int) -> bytes:
        """Return a record with the process name as long as it is, instead of with zeros behind it."""
        flags = int.from_bytes(data[start : start + 4], "little")
        place = self._name_places.get(flags)
        if place is None:
            place = self._name_places[flags] = header_struct(flags, "little").size
        name = start + place
        return data[start : data.index(0, name) + 1] + data[name + NAME_SIZE : stop]
