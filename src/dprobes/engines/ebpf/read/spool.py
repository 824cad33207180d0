"""
What was taken from the ring and has not been given out: pieces of it in memory or in a file, then records.

Taking a piece is one copy, so that the ring is emptied a hundred times faster than records are formatted.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from dprobes.bpf.layout import PROBE_MAX
from dprobes.engines.ebpf.read.entries import EntryReader
from dprobes.engines.ebpf.read.overflow import Overflow
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.ebpf.read.heldrecords import Ended, HeldRecords
    from dprobes.engines.ebpf.read.userstacks import UserStacks
    from dprobes.engines.interface import RecordBatch

__all__ = ["Spool"]

_MEMORY = 8 << 20
_OVERFLOW = 1 << 30
"""Bytes that are kept in memory, and beyond that in a file, before anybody has looked at them."""


class _Piece(NamedTuple):
    """A piece of the ring: its bytes, or how many of them are in the overflow, and when and in which drain it came."""

    data: bytes
    size: int
    stamp: float
    drain: int


class Spool:
    """
    Take over what the ring held, and give it out in order; records go through ``held``.

    ``limit`` is how many bytes are kept in memory before ``is_full``, where no file can take more. ``bank_size`` and
    ``stacks`` are those of an ``EntryReader``.
    """

    def __init__(
        self, held: HeldRecords, limit: int, bank_size: int = PROBE_MAX, stacks: UserStacks | None = None
    ) -> None:
        self._held = held
        self._reader = EntryReader(held, bank_size, stacks)
        self._limit = limit
        self._pieces: deque[_Piece] = deque()
        self._overflow = Overflow(_OVERFLOW)
        self._size = 0
        self._drains = 0
        self._drained = float("-inf")

    @property
    def is_full(self) -> bool:
        """Whether no more should be added now."""
        return self._size >= self._limit

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to give out, not even something that is held back."""
        return not self._pieces and not self._held

    @property
    def is_holding(self) -> bool:
        """Whether something is held back, and will be given out when time has passed."""
        return bool(self._held) and not self._pieces

    def add(self, data: memoryview | bytes, now: float, *, is_all: bool = True) -> None:
        """
        Take a copy of what the ring held at the time ``now``; empty data say that there was nothing.

        Without ``is_all`` the ring may have held more.
        """
        self._drained = now
        self._drains += is_all
        size = len(data)
        if not size:
            return
        is_kept = self._size + size <= _MEMORY or not self._overflow.write(data)
        kept = bytes(data) if is_kept else b""
        self._pieces.append(_Piece(kept, size, now, self._drains))
        self._size += len(kept)

    def take(self) -> Iterator[RecordBatch | Ended | None]:
        """
        Iterate over what need not be held back.

        None comes for a piece of which everything is held back: others may want to do something meanwhile.
        """
        while self._pieces:
            piece = self._pieces.popleft()
            self._size -= len(piece.data)
            self._reader.read(piece.data or self._overflow.read(piece.size), piece.stamp)
            # What has been added meanwhile may hold signals: nothing newer than the piece counts.
            certain = self._held.take(piece.stamp, piece.drain, self._drains)
            yield from certain or (None,)
        yield from self._held.take(self._drained, self._drains, self._drains)

    def close(self) -> None:
        """Give up what has not been taken."""
        self._overflow.close()
