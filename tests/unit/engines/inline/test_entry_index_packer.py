"""Entries become packed records without a look at each, which say what the entries said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.map_layouts import Entry
from dprobes.engines.inline.entry_index import EntryBuffer, EntryIndex, EntryPacker
from dprobes.native.routines.entry_walk import RecordPlaces
from dprobes.record.log_record import Item, header_struct
from dprobes.record.record_table import RecordTable
from support.ring_entries import entry, put

if TYPE_CHECKING:
    from collections.abc import Iterator

FLAGS = int(Item.MAJOR | Item.MINOR)


def record(minor: int, log: bytes = b"") -> bytes:
    return header_struct(FLAGS, "little").pack(FLAGS, 0, minor) + log


@pytest.fixture
def buffer() -> Iterator[EntryBuffer]:
    made = EntryBuffer(1 << 18)
    yield made
    made.close()


def packed(buffer: EntryBuffer, data: bytes, count: int | None = None) -> RecordTable | None:
    put(buffer, data)
    index = EntryIndex(buffer.room, RecordPlaces(None, None, None), 4, None)
    index.begin(1, None)
    index.walk(buffer)
    packer = EntryPacker(buffer.room)
    try:
        return packer.packed(index, buffer, index.count if count is None else count)
    finally:
        packer.close()


def test_what_is_the_same_in_all_stands_once(buffer: EntryBuffer) -> None:
    records = [(n & 1, record(300 + n, b"same" + n.to_bytes(2, "big"))) for n in range(500)]
    found = packed(buffer, b"".join(entry(probe, each) for probe, each in records))
    assert found is not None
    (rows,) = found.parts
    assert list(found) == records
    assert sorted(rows.planes) == [0, 12, 13, 20, 21]


def test_records_of_several_sizes_are_in_their_order(buffer: EntryBuffer) -> None:
    records = [(3, record(n, b"x" * (n * 7 % 5))) for n in range(300)]
    found = packed(buffer, b"".join(entry(probe, each) for probe, each in records), 299)
    assert isinstance(found, RecordTable)
    assert list(found) == records[:299]


def test_a_part_without_an_entry_is_none(buffer: EntryBuffer) -> None:
    data = entry(1, record(1)) + entry(1, record(2)) + entry(1, record(3, b"other"))
    found = packed(buffer, data, 2)
    assert found is not None
    assert len(found.parts) == 1
    assert list(found) == [(1, record(1)), (1, record(2))]


def test_stack_traces_have_their_probepoint(buffer: EntryBuffer) -> None:
    flags = FLAGS | int(Item.STACK_TRACE)
    body = header_struct(flags, "little").pack(flags, 0, 0) + b"t"
    found = packed(buffer, entry(2, body, Entry.TRACE))
    assert found is not None
    assert list(found) == [(2, body)]


@pytest.mark.parametrize(
    "piece",
    [
        entry(1, bytes(8), Entry.ENDED),
        entry(1, b""),
        entry(1, record(1, bytes(1 << 16))),
        entry(1, header_struct(FLAGS, "little").pack(FLAGS | int(Item.CPU), 0, 5)),
    ],
)
def test_what_is_no_record_of_one_kind_is_left_to_others(buffer: EntryBuffer, piece: bytes) -> None:
    assert packed(buffer, entry(1, record(5)) + piece) is None
