"""What the entries of rings say."""

from __future__ import annotations

from dprobes.bpf.layout import ENTRY_HEAD, KIND_SHIFT, NAME_SIZE, Entry
from dprobes.engines.inline.ringreader import RingReader
from dprobes.record.codec import decode_record
from dprobes.record.layout import Item, header_struct


def entry(kind: Entry, probe: int, body: bytes) -> bytes:
    """Return an entry as it stands in a ring."""
    data = ENTRY_HEAD.pack(probe | kind << KIND_SHIFT, 0) + body
    return len(data).to_bytes(8, "little") + data.ljust(len(data) + 7 & ~7, b"\0")


def record(number: int, flags: int = int(Item.MAJOR | Item.MINOR)) -> bytes:
    return header_struct(flags, "little").pack(flags, 0, number)


def test_records_have_their_probepoint_and_names_end() -> None:
    flags = int(Item.MAJOR | Item.MINOR | Item.PROCESS_NAME | Item.TID)
    body = record(5, flags) + b"redis".ljust(NAME_SIZE, b"\0") + (77).to_bytes(4, "little") + b"log"
    reader = RingReader()
    (((probe, found),),) = reader.read([entry(Entry.RECORD, 3, body)], None)
    decoded = decode_record(found)
    assert probe == 3
    assert (decoded.minor, decoded.process_name, decoded.tid, decoded.data) == (5, "redis", 77, b"log")
    assert reader.counts == {3: 1}


def test_traces_are_records_and_ends_are_collected() -> None:
    flags = int(Item.MAJOR | Item.MINOR | Item.STACK_TRACE)
    body = record(0, flags) + b"trace"
    reader = RingReader()
    piece = entry(Entry.TRACE, 1, body) + entry(Entry.ENDED, 2, bytes(8)) + entry(Entry.PROCESS, 0, bytes(4))
    assert reader.read([piece], None) == [[(1, body)]]
    assert reader.ended == [2]


def test_many_records_are_packed_and_none_is_missing() -> None:
    bodies = [(n % 3, record(n) + b"x" * (n % 2)) for n in range(4000)]
    piece = b"".join(entry(Entry.RECORD, probe, body) for probe, body in bodies[:3000])
    other = b"".join(entry(Entry.RECORD, probe, body) for probe, body in bodies[3000:]) + entry(
        Entry.ENDED, 9, bytes(8)
    )
    reader = RingReader()
    found = [each for batch in reader.read([piece, other], 1) for each in batch]
    assert found == bodies
    assert reader.counts == {0: 1334, 1: 1333, 2: 1333}
    assert reader.ended == [9]
