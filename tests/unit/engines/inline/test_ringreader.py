"""What the entries of rings say."""

from __future__ import annotations

from dprobes.bpf.layout import ENTRY_HEAD, KIND_SHIFT, NAME_SIZE, Entry
from dprobes.engines.inline.ringreader import RingReader
from dprobes.record.codec import decode_record
from dprobes.record.layout import Item, header_struct


def entry(kind: Entry, probe: int, body: bytes) -> bytes:
    return ENTRY_HEAD.pack(probe | kind << KIND_SHIFT, 0) + body


def test_records_have_their_probepoint_and_names_end() -> None:
    flags = int(Item.MAJOR | Item.MINOR | Item.PROCESS_NAME | Item.TID)
    head = header_struct(flags, "little").pack(flags, 4, 5)
    body = head + b"redis".ljust(NAME_SIZE, b"\0") + (77).to_bytes(4, "little") + b"log"
    ((probe, record),) = RingReader().read([entry(Entry.RECORD, 3, body)])
    found = decode_record(record)
    assert probe == 3
    assert (found.major, found.minor, found.process_name, found.tid, found.data) == (4, 5, "redis", 77, b"log")


def test_traces_are_records_and_ends_are_collected() -> None:
    flags = int(Item.MAJOR | Item.MINOR | Item.STACK_TRACE)
    body = header_struct(flags, "little").pack(flags, 0, 0) + b"trace"
    reader = RingReader()
    entries = [entry(Entry.TRACE, 1, body), entry(Entry.ENDED, 2, bytes(8)), entry(Entry.PROCESS, 0, bytes(4))]
    assert reader.read(entries) == [(1, body)]
    assert reader.ended == [2]
