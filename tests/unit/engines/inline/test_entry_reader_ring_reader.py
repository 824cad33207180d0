"""What the entries of rings say, in the order of their time."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.map_layouts import LIMIT, NAME_SIZE, Entry
from dprobes.engines.inline.entry_reader import RingReader, record_places
from dprobes.native.routines.entry_walk import RecordPlaces
from dprobes.native.routines.handler_ring import DISCARDED
from dprobes.platform.linux.procfs import ThreadIdentity
from dprobes.record.log_record import Item, LogRecord, decode_record, header_struct
from dprobes.record.record_table import RecordTable
from dprobes.resolve.probepoints import ProbeState
from support.ring_entries import entry, putting
from support.rounds import rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dprobes.engines.inline.entry_index import EntryBuffer

NAMED = Item.PID | Item.TID | Item.UID | Item.TIME | Item.PROCESS_NAME
NOBODY = 4_194_304
"""A thread id that no thread can have."""


def flags_of(items: Item) -> int:
    return int(items | Item.MAJOR | Item.MINOR | Item.WIDE)


def record(time: int, log: bytes = b"", minor: int = 0) -> bytes:
    """Return a record that has a time, and is of nobody."""
    flags = flags_of(Item.TIME)
    return header_struct(flags, "little").pack(flags, 0, minor, time) + log


def named(time: int, pid: int, tid: int, log: bytes = b"") -> bytes:
    """Return a record as a handler writes it."""
    flags = flags_of(NAMED)
    head = header_struct(flags, "little").pack(flags, 0, 0, pid, pid, time)
    return head + pid.to_bytes(NAME_SIZE, "little") + tid.to_bytes(4, "little") + log


def read(reader: RingReader, before: int | None, *pieces: bytes) -> list[tuple[int, bytes]]:
    return [each for batch in reader.read(putting(*pieces), before) for each in batch]


def reader_of(items: Item, room: int = 1 << 16) -> RingReader:
    return RingReader(items, room, 16)


def decoded(found: list[tuple[int, bytes]]) -> list[LogRecord]:
    return [decode_record(each) for _, each in found]


def test_where_things_are_in_records() -> None:
    assert record_places(Item.TIME) == RecordPlaces(12, None, None, flags_of(Item.TIME), 20)
    assert record_places(Item.CPU | Item.IP) == RecordPlaces(None, None, None, flags_of(Item.CPU | Item.IP), 24)
    places = record_places(NAMED)
    assert places == RecordPlaces(time=20, uid=16, name=28, flags=flags_of(NAMED), size=48)
    assert places.process == 28
    assert record_places(Item.UID).process == 12


def test_records_of_several_rings_come_in_the_order_of_their_time() -> None:
    reader = reader_of(Item.TIME)
    one = b"".join(entry(1, record(time)) for time in (10, 30, 25, 70))
    other = b"".join(entry(2, record(time)) for time in (20, 40, 60))
    found = read(reader, None, one, other)
    assert [(probe, each.time) for (probe, _), each in zip(found, decoded(found), strict=True)] == [
        (1, 10), (2, 20), (1, 25), (1, 30), (2, 40), (2, 60), (1, 70),
    ]  # fmt: skip
    assert list(reader.counts[:3]) == [0, 4, 3]


def test_what_is_younger_than_the_reading_waits_for_what_is_still_to_come() -> None:
    reader = reader_of(Item.TIME)
    assert [r.time for r in decoded(read(reader, 40, entry(1, record(30)) + entry(1, record(50))))] == [30]
    assert [r.time for r in decoded(read(reader, 60, entry(1, record(45))))] == [45, 50]
    assert read(reader, 60, entry(1, record(90))) == []
    assert [r.time for r in decoded(read(reader, None))] == [90]
    assert reader.counts[1] == 4, "those that were kept are counted once"


def test_records_without_a_time_stay_as_they_come() -> None:
    reader = reader_of(Item.CPU)
    flags = flags_of(Item.CPU)
    records = [header_struct(flags, "little").pack(flags, 0, n, 0) for n in (3, 1, 2)]
    assert read(reader, 1, b"".join(entry(0, each) for each in records)) == [(0, each) for each in records]


def test_records_of_one_shape_are_packed_and_those_of_several_mixed() -> None:
    reader = reader_of(Item.TIME)
    (batch,) = reader.read(putting(b"".join(entry(n % 2, record(n)) for n in range(100))), None)
    assert isinstance(batch, RecordTable)
    assert len(batch.parts) == 1
    (batch,) = reader.read(putting(b"".join(entry(1, record(n, b"x" * (n % 3))) for n in range(100))), None)
    assert isinstance(batch, RecordTable)
    assert len(batch.parts) == 3
    assert list(batch) == [(1, record(n, b"x" * (n % 3))) for n in range(100)]


def test_stack_traces_are_records_and_ends_are_collected() -> None:
    flags = flags_of(Item.STACK_TRACE)
    body = header_struct(flags, "little").pack(flags, 0, 0) + b"trace"
    reader = reader_of(Item(0))
    assert read(reader, None, entry(1, body, Entry.TRACE)) == [(1, body)]
    ends = entry(2, bytes(8), Entry.ENDED) + entry(9, LIMIT.to_bytes(8, "little"), Entry.ENDED)
    piece = entry(1, body, Entry.TRACE) + ends + entry(0, bytes(4), Entry.PROCESS)
    assert read(reader, None, piece) == [(1, body)]
    assert reader.refused == 1  # no handler in a process says that one is out of scope
    assert reader.ended == [(2, ProbeState.REMOVED), (9, ProbeState.DISABLED)]
    assert reader.counts[1] == 2


def test_only_a_probepoint_that_may_have_a_last_hit_has_one() -> None:
    reader = reader_of(Item(0))
    reader.limit(4, {2})
    ends = (entry(probe, bytes(8), Entry.ENDED) for probe in (1, 2, 3, 4))
    read(reader, None, b"".join(ends))
    assert reader.ended == [(2, ProbeState.REMOVED)]
    assert reader.refused == 3


@pytest.mark.parametrize("seed", range(rounds(40)))
def test_a_ring_full_of_anything_raises_nothing(seed: int) -> None:
    random = Random(seed)
    items = random.choice([Item(0), Item.TIME, NAMED, Item.UID | Item.PID])
    reader = reader_of(items)
    kinds = [*Entry, 99]
    for _ in range(20):
        parts = []
        for _ in range(random.randrange(40)):
            flags = flags_of(items) if random.random() < 0.7 else random.getrandbits(32)
            body = flags.to_bytes(4, "little") + random.randbytes(random.choice((0, 3, 8, 60, 300)))
            parts.append(
                entry(random.choice((0, 1, 15, 16, 70000)), body, random.choice(kinds), tid=random.randrange(3))
            )
        piece = bytearray(b"".join(parts))
        for _ in range(random.choice((0, 0, 3, 100)) if piece else 0):
            piece[random.randrange(len(piece))] = random.choice((0, 1, 8, 0xFF, random.getrandbits(8)))
        before = None if random.random() < 0.2 else time.monotonic_ns()
        for probe, record in read(reader, before, bytes(piece)):
            assert probe < 16
            decode_record(record)
    read(reader, None)


def test_many_sizes_of_records_are_too_many_for_one_batch_and_none_is_missing() -> None:
    reader = reader_of(Item.TIME, 1 << 20)
    records = [record(n, b"x" * (n % 400)) for n in range(1000)]
    assert read(reader, None, b"".join(entry(3, each) for each in records)) == [(3, each) for each in records]
    assert reader.counts[3] == 1000


def test_what_is_no_entry_ends_a_piece_and_is_noted() -> None:
    reader = reader_of(Item.TIME)
    assert len(read(reader, None, entry(1, record(1)) + (1 << 29).to_bytes(8, "little"), entry(1, record(2)))) == 2
    assert reader.damaged == 1


def test_records_are_of_the_thread_that_they_name() -> None:
    reader, pid = reader_of(NAMED), os.getpid()
    ids: list[int] = []
    leave = threading.Event()
    has_begun = threading.Barrier(2)

    def other() -> None:
        Path("/proc/thread-self/comm").write_text("another one")
        ids.append(threading.get_native_id())
        has_begun.wait()
        leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    has_begun.wait()
    pieces = [entry(1, named(time, pid, tid, b"log"), tid=tid) for time, tid in ((1, pid), (2, ids[0]), (3, pid))]
    found = decoded(read(reader, None, b"".join(pieces)))
    leave.set()
    thread.join()
    mine = Path("/proc/self/comm").read_text().strip()
    assert [each.process_name for each in found] == [mine, "another one", mine]
    assert [each.tid for each in found] == [pid, ids[0], pid]
    assert {(each.pid, each.uid, each.data) for each in found} == {(pid, os.getuid(), b"log")}


def test_records_of_a_thread_that_is_gone_wait_for_what_the_tracer_tells() -> None:
    reader = reader_of(NAMED)
    assert read(reader, 100, entry(1, named(1, NOBODY, NOBODY), tid=NOBODY)) == []
    assert read(reader, 100) == []
    assert reader.names is not None
    reader.names.told(ThreadIdentity(NOBODY, NOBODY, b"short-lived", 77))
    (found,) = decoded(read(reader, 100))
    assert (found.process_name, found.uid, found.pid, found.tid) == ("short-lived", 77, NOBODY, NOBODY)
    assert reader.counts[1] == 1


def test_records_of_which_nobody_tells_are_called_as_others_of_the_process() -> None:
    reader = reader_of(NAMED)
    assert reader.names is not None
    reader.names.told(ThreadIdentity(NOBODY, NOBODY, b"known", 5))
    piece = entry(1, named(1, NOBODY, NOBODY + 1), tid=NOBODY + 1)
    readings = 1
    while not (found := read(reader, 100, piece)):
        piece = b""
        readings += 1
    assert readings > 10
    assert [(each.process_name, each.uid, each.tid) for each in decoded(found)] == [("known", 5, NOBODY + 1)]
    (last,) = decoded(read(reader, None, entry(1, named(1, 77, NOBODY + 2), tid=NOBODY + 2)))
    assert (last.process_name, last.uid) == ("", 0)


@pytest.mark.parametrize("seed", range(rounds(40)))
def test_random_entries_come_out_as_they_went_in(seed: int) -> None:
    random = Random(seed)
    reader = reader_of(Item.TIME, 1 << 20)
    expected: list[tuple[int, int, bytes]] = []
    found: list[tuple[int, bytes]] = []
    now = 1000
    for _ in range(random.randrange(1, 5)):
        pieces = []
        for _ in range(random.randrange(4)):
            piece, time = b"", now
            for _ in range(random.choice((0, 3, 50, 300))):
                time += random.randrange(20)
                own = time - random.randrange(60) if random.random() < 0.02 else time
                if random.random() < 0.05:
                    piece += entry(0, b"", flags=DISCARDED)
                    continue
                probe, body = random.randrange(5), record(own, random.randbytes(random.choice((8, 8, 16, 3))))
                expected.append((own, probe, body))
                piece += entry(probe, body)
            pieces.append(piece)
        now += random.randrange(3000)
        found += read(reader, now, *pieces)
    found += read(reader, None)
    assert sorted(found) == sorted((probe, body) for _, probe, body in expected)
    assert [reader.counts[probe] for probe in range(5)] == [
        sum(each == probe for _, each, _ in expected) for probe in range(5)
    ]
    reader.close()


def test_what_is_younger_than_what_a_ring_may_still_have_waits() -> None:
    """A thread of the second ring is interrupted while it writes: what comes behind is not seen so far."""
    reader = reader_of(Item.TIME)
    found = reader.read(putting(entry(1, record(10)), entry(2, record(20))), 30)
    assert [each.time for batch in found for each in decoded(list(batch))] == [10, 20]
    found = reader.read(putting(entry(1, record(40)), waiting=[1]), 50)
    assert found == []
    found = reader.read(putting(b"", entry(2, record(35)) + entry(2, record(60))), 70)
    assert [each.time for batch in found for each in decoded(list(batch))] == [35, 40, 60]


def test_nobody_waits_for_ever_for_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    reader = reader_of(Item.TIME)
    assert reader.read(putting(entry(1, record(40)), waiting=[1]), 50) == []
    now[0] += 1
    (batch,) = reader.read(putting(waiting=[1]), 60)
    assert [each.time for each in decoded(list(batch))] == [40]


def test_a_ring_that_has_given_more_than_others_is_left_alone_for_a_while() -> None:
    reader = reader_of(Item.TIME)
    left_alone: list[list[int]] = []

    def move(pieces: list[tuple[bytes, bool]]) -> Callable[[EntryBuffer, Collection[int]], set[int]]:
        def put_them(buffer: EntryBuffer, without: Collection[int]) -> set[int]:
            left_alone.append(sorted(without))
            for ring, (piece, has_more) in enumerate(pieces):
                ctypes.memmove(buffer.address + buffer.end, piece, len(piece))
                buffer.add(len(piece), ring, has_more=has_more)
            return set()

        return put_them

    one = entry(1, record(10)) + entry(1, record(20))
    other = entry(2, record(15)) + entry(2, record(90))
    found = reader.read(move([(one, True), (other, True)]), 1000)
    assert [each.time for batch in found for each in decoded(list(batch))] == [10, 15]
    assert reader.is_busy
    found = reader.read(move([(entry(1, record(30)) + entry(1, record(95)), False)]), 1000)
    assert [each.time for batch in found for each in decoded(list(batch))] == [20, 30, 90]
    found = reader.read(move([(b"", False), (entry(2, record(91)), False)]), 1000)
    assert [each.time for batch in found for each in decoded(list(batch))] == [91, 95]
    assert left_alone == [[], [1], []]
    assert not reader.is_busy


def test_no_ring_is_left_alone_because_of_one_that_has_come_to_its_end() -> None:
    reader = reader_of(Item.TIME)
    left_alone: list[list[int]] = []

    def nothing(_: EntryBuffer, without: Collection[int]) -> set[int]:
        left_alone.append(sorted(without))
        return set()

    reader.read(putting(entry(1, record(10)), entry(2, record(20))), None)
    reader._ahead = {1}
    for _ in range(2):
        assert reader.read(nothing, 1000) == []
    assert left_alone == [[1], []]


def test_records_wait_for_others_unless_there_are_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    reader = reader_of(Item.TIME)
    assert reader.horizon == 10_000_000
    read(reader, None, *[entry(1, record(n, b"x" * 2000)) for n in range(10)])
    assert reader.is_busy
    assert reader.horizon == 0
    now[0] += 0.2
    assert reader.horizon == 10_000_000
