"""Entries of several pieces of rings have one index, in the order of their time."""

from __future__ import annotations

import ctypes

from dprobes.bpf.map_layouts import Entry
from dprobes.engines.inline.entry_index import EntryBuffer, EntryIndex, Group, Part
from dprobes.native.routines.entry_walk import RecordPlaces
from support.ring_entries import entry, put

PLACES = RecordPlaces(time=0, uid=None, name=None)


def timed(time: int, size: int = 8) -> bytes:
    return entry(1, time.to_bytes(8, "little").ljust(size, b"x"))


def index_of(buffer: EntryBuffer) -> EntryIndex:
    index = EntryIndex(buffer.room, PLACES, 4, None)
    index.begin(1, None)
    return index


def places(index: EntryIndex) -> list[int]:
    return [index.line(n)[0] for n in range(index.count)]


def test_a_buffer_knows_its_parts() -> None:
    buffer = EntryBuffer(1 << 12)
    assert (buffer.end, buffer.parts) == (0, [])
    buffer.add(16)
    buffer.add(0, 1)
    buffer.add(24, 2, has_more=True)
    assert (buffer.end, buffer.parts) == (40, [Part(0, 16, None, False), Part(16, 40, 2, True)])
    buffer.clear()
    assert (buffer.end, buffer.parts) == (0, [])
    buffer.close()


def test_the_last_time_of_each_ring_is_known_and_from_when_on_there_may_be_more() -> None:
    buffer = EntryBuffer(1 << 12)
    put(buffer, timed(30) + timed(20), timed(50))
    index = index_of(buffer)
    index.walk(buffer)
    assert (index.last, index.bound) == ({0: 30, 1: 50}, None)
    for ring, time in ((0, 25), (1, 60)):
        ctypes.memmove(buffer.address + buffer.end, timed(time), len(timed(time)))
        buffer.add(len(timed(time)), ring, has_more=True)
    index.walk(buffer)
    assert (index.last, index.bound) == ({0: 30, 1: 60}, 25)
    index.close()
    buffer.close()


def test_any_number_of_pieces_is_merged() -> None:
    for count in range(1, 8):
        buffer = EntryBuffer(1 << 12)
        put(buffer, *[timed(10 * n + number) + timed(10 * n + 100) for number, n in enumerate(reversed(range(count)))])
        index = index_of(buffer)
        assert not index.walk(buffer)
        size = len(timed(0))
        early = [2 * size * n for n in reversed(range(count))]
        assert places(index) == [*early, *[each + size for each in early]]
        assert index.count_before(0) == 0
        assert index.count_before(100) == count
        assert index.count_before(1000) == index.count == 2 * count
        assert index.groups == [Group(Entry.RECORD, 16, 2 * count)]
        assert index.counts[1] == 2 * count
        index.close()
        buffer.close()


def test_what_is_kept_stands_in_the_other_buffer_and_is_not_counted_again() -> None:
    buffer, other = EntryBuffer(1 << 12), EntryBuffer(1 << 12)
    put(buffer, timed(30) + timed(50, 20), timed(40))
    index = index_of(buffer)
    index.walk(buffer)
    index.keep(buffer, 1, other)
    assert other.memory[: other.end] == timed(40) + timed(50, 20)
    put(other, timed(45))
    index.walk(other)
    assert [index.line(n)[0] for n in range(index.count)] == [0, len(timed(40) + timed(50, 20)), len(timed(40))]
    assert index.counts[1] == 4
