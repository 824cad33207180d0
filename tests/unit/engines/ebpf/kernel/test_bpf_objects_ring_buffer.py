"""The reader's walk over a ring, on memory laid out as the kernel does; with real programs: tests/integration/ebpf."""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.engines.ebpf.kernel.bpf_objects import RingBuffer
from dprobes.engines.ring_spans import entries_in, sizes_in, spans_in

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 4096
BUSY = 1 << 31
DISCARDED = 1 << 30


class FakeRing(RingBuffer):
    """A ring whose kernel side is this test; the data is mapped twice by writing everything twice."""

    def __init__(self) -> None:
        self.fd = -1
        self.size = SIZE
        self._closed = False
        self._own = mmap.mmap(-1, mmap.PAGESIZE)
        self._kernels = mmap.mmap(-1, mmap.PAGESIZE + 2 * SIZE)
        self._consumer = memoryview(bytearray(8)).cast("Q")
        self._producer = memoryview(bytearray(8)).cast("Q")
        self._data = memoryview(self._kernels)[mmap.PAGESIZE :]
        self._words = self._data.cast("I")

    def start_at(self, position: int) -> None:
        self._consumer[0] = self._producer[0] = position

    def produce(self, data: bytes, flags: int = 0) -> int:
        """Write an entry and return its position."""
        entry = struct.pack("=II", len(data) | flags, 0) + data
        position = self._producer[0]
        for number, byte in enumerate(entry):
            place = (position + number) % SIZE
            self._data[place] = self._data[place + SIZE] = byte
        self._producer[0] = position + (len(entry) + 7 & ~7)
        return position

    def complete(self, position: int, length: int) -> None:
        for place in (position % SIZE, position % SIZE + SIZE):
            struct.pack_into("=I", self._data, place, length)


@pytest.fixture
def ring() -> Iterator[FakeRing]:
    made = FakeRing()
    yield made
    made.close()


def test_an_empty_ring_gives_nothing(ring: FakeRing) -> None:
    assert ring.drain() == []
    assert bytes(ring.window()) == b""


def test_entries_come_in_order_and_without_their_padding(ring: FakeRing) -> None:
    for data in (b"a", b"12345678", b"", b"xyz"):
        ring.produce(data)
    assert ring.drain() == [b"a", b"12345678", b"", b"xyz"]
    assert ring.pending == 0


def test_a_busy_entry_holds_back_those_behind_it(ring: FakeRing) -> None:
    ring.produce(b"first")
    busy = ring.produce(b"second", BUSY)
    ring.produce(b"third")
    assert ring.drain() == [b"first"]
    assert ring.drain() == []
    ring.complete(busy, 6)
    assert ring.drain() == [b"second", b"third"]


def test_a_discarded_entry_is_passed_over(ring: FakeRing) -> None:
    ring.produce(b"first")
    ring.produce(b"never", DISCARDED)
    ring.produce(b"third")
    assert ring.drain() == [b"first", b"third"]


def test_an_entry_that_is_busy_and_discarded_is_waited_for(ring: FakeRing) -> None:
    ring.produce(b"never", BUSY | DISCARDED)
    assert ring.drain() == []
    assert ring.pending == 16


@pytest.mark.parametrize("before_the_end", [8, 16, 24])
def test_entries_wrap_around(ring: FakeRing, before_the_end: int) -> None:
    ring.start_at(7 * SIZE - before_the_end)
    ring.produce(b"0123456789abcdef01")
    ring.produce(b"second")
    assert ring.drain() == [b"0123456789abcdef01", b"second"]


def test_the_window_shows_complete_entries_with_their_headers(ring: FakeRing) -> None:
    ring.start_at(SIZE - 8)
    ring.produce(b"first")
    ring.produce(b"never", DISCARDED)
    ring.produce(b"busy", BUSY)
    window = ring.window()
    expected = struct.pack("=II5s3x", 5, 0, b"first") + struct.pack("=II5s3x", 5 | DISCARDED, 0, b"never")
    assert bytes(window) == expected
    assert bytes(ring.window(1)) == bytes(ring.window(16)) == expected[:16]
    assert bytes(ring.window(17)) == expected
    ring.advance(len(window))
    assert bytes(ring.window()) == b""
    assert ring.pending == 16


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 100), st.booleans()), max_size=20))
def test_spans_hold_all_entries_of_a_window_in_order(runs: list[tuple[int, int, bool]]) -> None:
    window = b""
    for size, count, is_discarded in runs:
        entry = struct.pack("=II", size | (DISCARDED if is_discarded else 0), 0) + bytes(size) + bytes(-size % 8)
        window += entry * count
    found: list[tuple[int, int]] = []
    end = 0
    for span in spans_in(window):
        assert span.start == end
        end = span.stop
        entries = list(entries_in(window, span.start, span.stop))
        found += entries
        if span.stride:
            assert len(entries) == (span.stop - span.start) // span.stride
            assert len({stop - start for start, stop in entries}) == 1
    assert end == len(window)
    assert found == list(entries_in(window))


def test_many_entries_of_one_size_are_a_span() -> None:
    window = (struct.pack("=II", 16, 0) + bytes(16)) * 10_000
    assert sum(span.stop - span.start for span in spans_in(window) if span.stride) > 0.99 * len(window)


def test_entries_are_told_apart_by_their_sizes() -> None:
    sizes = [3, 16, 3, 9, 16, 3] * 5
    window = b"".join(struct.pack("=II", size, 0) + bytes(size + -size % 8) for size in sizes)
    entries = list(entries_in(window))
    found = sizes_in(window, 0, len(window))
    assert found is not None
    groups, order = found
    assert order == bytes([0, 1, 0, 2, 1, 0] * 5)
    assert [stride for stride, _ in groups] == [16, 24, 24]
    assert [[at + 8 for at in places] for _, places in groups] == [
        [start for start, stop in entries if stop - start == size] for size in (3, 16, 9)
    ]
    assert sizes_in(window, 16, len(window)) is not None
    assert sizes_in(window, 0, 16) is None, "one entry is not worth it"
    discarded = struct.pack("=II", 3 | DISCARDED, 0) + bytes(8)
    assert sizes_in(window + discarded, 0, len(window) + len(discarded)) is None


def test_a_window_of_many_alike_ends_at_the_incomplete_one(ring: FakeRing) -> None:
    ring.start_at(SIZE - 8)
    for number in range(100):
        ring.produce(struct.pack("=Q", number), BUSY if number == 70 else 0)
    with ring.window() as window:
        assert [bytes(window[start:stop]) for start, stop in entries_in(window)] == [
            struct.pack("=Q", number) for number in range(70)
        ]
