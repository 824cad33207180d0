"""The reader of rings, also of such that a program has written nonsense to; writers are in ``native.routines``."""

from __future__ import annotations

import struct
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.inline.entry_index import EntryBuffer
from dprobes.engines.inline.entry_reader import SharedRing, SharedRings
from dprobes.engines.inline.shared_memory import Region
from dprobes.engines.ring_spans import entries_in
from dprobes.native.generated_code import MapShape
from dprobes.native.routines.handler_ring import BUSY, DATA, DISCARDED, ENTRY_HEADER, PRODUCER, RingShape

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 4096


@pytest.fixture
def rings() -> Iterator[SharedRings]:
    region = Region(64 << 10)
    made = SharedRings(region, RingShape(2, SIZE))
    yield made
    made.close()
    region.close()


def ring_of(memory: bytearray) -> SharedRing:
    return SharedRing(memoryview(memory), SIZE)


def put(memory: bytearray, data: bytes, flags: int = 0) -> None:
    """Write an entry as the routine does."""
    (position,) = struct.unpack_from("=Q", memory, PRODUCER)
    at = DATA + position % SIZE
    memory[at + ENTRY_HEADER : at + ENTRY_HEADER + len(data)] = data
    struct.pack_into("=I", memory, at, len(data) | flags)
    struct.pack_into("=Q", memory, PRODUCER, position + (len(data) + ENTRY_HEADER + 7 & ~7))


def test_where_they_are(rings: SharedRings) -> None:
    assert rings.place.shape is MapShape.RINGS
    assert rings.place.address % DATA == 0
    assert rings.drain() == []
    assert [ring.pending for ring in rings.rings] == [0, 0]


def test_a_window_is_read_in_parts() -> None:
    memory = bytearray(DATA + SIZE)
    ring = ring_of(memory)
    for n in range(10):
        put(memory, bytes((n,)) * 16)
    window = ring.window()
    assert len(window) == 240
    window.release()
    ring.advance(24)
    assert ring.pending == 216
    assert ring.drain() == [bytes((n,)) * 16 for n in range(1, 10)]
    assert not any(memory[DATA:])


def test_what_is_discarded_is_no_entry() -> None:
    memory = bytearray(DATA + SIZE)
    ring = ring_of(memory)
    put(memory, b"one")
    put(memory, b"gone", DISCARDED)
    put(memory, b"two")
    assert ring.drain() == [b"one", b"two"]


def test_positions_may_pass_the_end_of_the_memory_often() -> None:
    memory = bytearray(DATA + SIZE)
    ring = ring_of(memory)
    for n in range(3000):
        put(memory, struct.pack("=I", n) * 6)
        assert ring.drain() == [struct.pack("=I", n) * 6]
    assert ring.pending == 0


def test_an_entry_that_is_being_written_is_none_yet() -> None:
    memory = bytearray(DATA + SIZE)
    ring = ring_of(memory)
    put(memory, b"first")
    put(memory, b"second, which takes long", BUSY)
    put(memory, b"third")
    assert ring.drain() == [b"first"]
    assert ring.skip()
    assert ring.drain() == [b"third"]
    assert not ring.skip()
    assert ring.pending == 0
    assert not any(memory[DATA:])


@pytest.mark.parametrize("filled", [0, SIZE - 64])
def test_a_place_that_was_only_taken_is_skipped(filled: int) -> None:
    """Its length is not known; at the end of the memory it ends there."""
    memory = bytearray(DATA + SIZE)
    ring = ring_of(memory)
    if filled:
        put(memory, bytes(filled - ENTRY_HEADER))
        ring.drain()
    (position,) = struct.unpack_from("=Q", memory, PRODUCER)
    struct.pack_into("=Q", memory, PRODUCER, position + 64)
    assert ring.drain() == []
    put(memory, b"behind it")
    assert ring.drain() == []
    assert ring.skip()
    assert ring.drain() == [b"behind it"]
    assert ring.pending == 0


def test_a_complete_entry_is_not_skipped() -> None:
    memory = bytearray(DATA + SIZE)
    ring = ring_of(memory)
    assert not ring.skip()
    put(memory, b"entry")
    assert not ring.skip()
    assert ring.drain() == [b"entry"]


def test_the_rest_of_all_rings_is_what_is_complete(rings: SharedRings) -> None:
    assert rings.drain_rest() == ([], 0)


def test_nonsense_ends_the_reading_and_nothing_else() -> None:
    """The program has the memory as well: whatever it writes there, the reader neither fails nor goes on for ever."""
    random = Random(6)
    for _ in range(500):
        memory = bytearray(DATA + SIZE)
        ring = ring_of(memory)
        for _ in range(random.randrange(5)):
            put(memory, random.randbytes(random.randrange(1, 100)))
        for _ in range(random.randrange(1, 4)):
            at = random.choice((PRODUCER, 0, DATA, DATA + 8 * random.randrange(60)))
            struct.pack_into("=Q", memory, at, random.getrandbits(random.choice((8, 16, 32, 64))))
        entries = ring.drain()
        while ring.skip():
            entries += ring.drain()
        assert sum(map(len, entries)) <= 2 * SIZE
        ring.close()


def moved(ring: SharedRing, limit: int, room: int = 1 << 16) -> tuple[list[bytes], list[bool], bool]:
    """Return the entries that are moved, whether there are more behind each part, and what is said of the ring."""
    buffer = EntryBuffer(room)
    result = ring.move(buffer, limit)
    data = buffer.memory[: buffer.end]
    parts = [part.has_more for part in buffer.parts]
    buffer.close()
    return [data[start:stop] for start, stop in entries_in(data)], parts, result


def test_entries_are_moved_and_their_room_is_given_back() -> None:
    memory = bytearray(DATA + SIZE)
    ring = ring_of(memory)
    for n in range(10):
        put(memory, bytes((n,)) * 16)
    assert moved(ring, 24 * 7 + 8) == ([bytes((n,)) * 16 for n in range(7)], [True], True)
    assert moved(ring, SIZE) == ([bytes((n,)) * 16 for n in range(7, 10)], [False], True)
    assert moved(ring, SIZE) == ([], [], True)
    assert not any(memory[DATA:])


def test_an_entry_that_is_larger_than_what_is_wanted_is_moved_alone() -> None:
    memory = bytearray(DATA + SIZE)
    ring = ring_of(memory)
    put(memory, b"x" * 1000)
    put(memory, b"y")
    assert moved(ring, 64) == ([b"x" * 1000], [True], True)
    assert moved(ring, 64) == ([b"y"], [False], True)


def test_a_ring_whose_first_entry_is_not_complete_says_so() -> None:
    memory = bytearray(DATA + SIZE)
    ring = ring_of(memory)
    put(memory, b"whole")
    put(memory, b"half", BUSY)
    put(memory, b"behind")
    assert moved(ring, SIZE) == ([b"whole"], [True], True)
    assert moved(ring, SIZE) == ([], [], False)
    struct.pack_into("=I", memory, DATA + 16, 4)
    assert moved(ring, SIZE) == ([b"half", b"behind"], [False], True)


def test_entries_are_moved_from_the_end_and_the_beginning_of_the_memory() -> None:
    memory = bytearray(DATA + SIZE)
    ring = ring_of(memory)
    put(memory, b"z" * (SIZE - 56))
    assert moved(ring, SIZE)[2]
    for n in range(4):
        put(memory, bytes((n,)) * 16)
    assert moved(ring, SIZE) == ([bytes((n,)) * 16 for n in range(4)], [True, False], True)


def test_no_more_is_moved_than_there_is_room_for(rings: SharedRings) -> None:
    memory = bytearray(DATA + SIZE)
    ring = ring_of(memory)
    for n in range(10):
        put(memory, bytes((n,)) * 16)
    assert moved(ring, SIZE, 100)[:2] == ([bytes((n,)) * 16 for n in range(4)], [True])
    buffer = EntryBuffer(1 << 16)
    assert rings.move(buffer) == set()
    assert buffer.end == 0
    assert rings.move_rest(buffer) == 0
    buffer.close()


def test_only_what_writers_have_left_is_given_up() -> None:
    memory = bytearray(DATA + SIZE)
    ring = ring_of(memory)
    put(memory, b"left", BUSY)
    put(memory, b"one")
    assert ring.stalled_at == 0
    end = ring.end
    put(memory, b"being written", BUSY)
    put(memory, b"two")
    assert ring.drain() == []
    ring.leave(end)
    assert moved(ring, SIZE) == ([b"one"], [True], True)
    assert ring.skipped == 1
    assert ring.stalled_at == end
    assert ring.drain() == []
    ring.leave(ring.end)
    assert ring.drain() == [b"two"]
    assert ring.skipped == 2
    assert ring.stalled_at is None


def test_what_was_not_begun_is_given_up_as_far_as_writers_have_left_it() -> None:
    memory = bytearray(DATA + SIZE)
    ring = ring_of(memory)
    struct.pack_into("=Q", memory, PRODUCER, 48)  # two entries of 24 bytes
    ring.leave(24)
    assert ring.drain() == []
    assert (ring.skipped, ring.stalled_at) == (1, 24)


@pytest.mark.parametrize("producer", [8 * SIZE, (1 << 64) - 1, 3, 1 << 63])
def test_a_ring_that_makes_no_sense_begins_anew(producer: int) -> None:
    memory = bytearray(DATA + SIZE)
    ring, buffer = ring_of(memory), EntryBuffer(1 << 16)
    put(memory, b"before")
    assert ring.move(buffer, SIZE)
    struct.pack_into("=Q", memory, PRODUCER, producer)
    struct.pack_into("=Q", memory, 0, producer)  # how far it is read, for those who write
    assert ring.stalled_at is None
    assert not ring.skip()
    assert ring.move(buffer, SIZE)
    assert ring.damaged == 1
    put(memory, b"behind")
    assert ring.move(buffer, SIZE)
    assert buffer.memory[ENTRY_HEADER:14] + buffer.memory[16 + ENTRY_HEADER : 30] == b"beforebehind"
    ring.leave(ring.end)
    assert ring.damaged == 1


@pytest.mark.parametrize("length", [SIZE, DISCARDED - 1, DISCARDED | SIZE, 17])
def test_an_entry_that_reaches_too_far_gives_all_up(length: int) -> None:
    memory = bytearray(DATA + SIZE)
    ring, buffer = ring_of(memory), EntryBuffer(1 << 16)
    put(memory, bytes(16))
    struct.pack_into("=I", memory, DATA, length)
    ring.move(buffer, SIZE)
    assert (buffer.end, ring.damaged, ring.pending) == (0, 1, 0)


def test_whoever_goes_on_writing_does_not_keep_the_reader(rings: SharedRings) -> None:
    ring, buffer = rings.rings[0], EntryBuffer(1 << 16)
    former = ring.skip

    def writing(before: int | None = None) -> bool:
        # A thread that takes new places all the time, and completes none.
        ring._producer[0] = ring._position + 64
        return former(before)

    ring._producer[0] = 64
    ring.skip = writing  # type: ignore[method-assign]
    assert rings.move_rest(buffer) == 1
