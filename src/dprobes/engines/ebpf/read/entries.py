"""
The entries of a ring as what they say: records in their canonical form, ends of probepoints, signals.

A piece of the ring is read as it stands there, headers and discarded entries included (``kernel.ring``).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.bpf.layout import ENTRY_HEAD, KIND_SHIFT, NAME_SIZE, TICKETS_SHIFT, Entry
from dprobes.engines.ebpf.kernel.ring import entries_in
from dprobes.engines.ebpf.read.heldrecords import Ended
from dprobes.record.layout import Item, header_struct

if TYPE_CHECKING:
    from dprobes.engines.ebpf.read.heldrecords import HeldRecords
    from dprobes.engines.ebpf.read.userstacks import UserStacks

__all__ = ["EntryReader"]

_HEAD_SIZE = ENTRY_HEAD.size
_TRACE = int(Entry.TRACE)  # enum members are slow to look up
_NAME_FLAG_BYTE, _NAME_FLAG = 1, Item.PROCESS_NAME >> 8
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
        held, unpack, uncertain, probe_mask = self._held, ENTRY_HEAD.unpack_from, self._held.uncertain, self._probe_mask
        stacks = self._stacks
        records: list[tuple[int, bytes]] = []
        tids: list[int] = []
        for position, stop in entries_in(data):
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
