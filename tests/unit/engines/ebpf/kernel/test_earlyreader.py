from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.engines.ebpf.kernel import ring
from dprobes.engines.ebpf.kernel.earlyreader import EarlyReader

if TYPE_CHECKING:
    from collections.abc import Iterator


class Ring:
    """A ring that is only here; what is written is one piece."""

    size = 1024

    def __init__(self) -> None:
        self.content = bytearray()
        self.is_closed = self.is_ours = False

    @property
    def pending(self) -> int:
        return len(self.content)

    def window(self) -> memoryview:
        return memoryview(bytes(self.content))

    def advance(self, size: int) -> None:
        del self.content[:size]

    def detach(self) -> int:
        self.is_ours = True
        return 5

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    made = Ring()

    class Rings:
        @staticmethod
        def of(descriptor: int, size: int) -> Any:
            assert (descriptor, size) == (5, 1024)
            return made

    monkeypatch.setattr(ring, "RingBuffer", Rings)
    yield made
    assert made.is_closed
    assert made.is_ours  # the descriptor is left to its owner


def until_empty(found: Ring) -> None:
    until = time.monotonic() + 20
    while found.content:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_what_has_room_stays_in_the_ring(found: Ring) -> None:
    reader = EarlyReader(5, 1024)
    found.content += b"x" * 255
    time.sleep(0.05)
    assert reader.stop() == []
    assert found.pending == 255


def test_pieces_are_taken_in_order(found: Ring) -> None:
    reader = EarlyReader(5, 1024)
    before = time.monotonic()
    for letter in b"abc":
        found.content += bytes([letter]) * 256
        until_empty(found)
    taken = reader.stop()
    assert [piece for piece, _ in taken] == [b"a" * 256, b"b" * 256, b"c" * 256]
    times = [before, *(stamp for _, stamp in taken), time.monotonic()]
    assert times == sorted(times)
