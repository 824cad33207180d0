"""
Spans of the entries in a ring: runs of many entries of one size, and the parts between them.

::

    entry   u32 length, with bit 31 (busy: not complete yet) and bit 30 (discarded) | u32 | data, padded to a multiple
            of 8 bytes

This is the layout of entries in the kernel's BPF ring buffer (``kernel/bpf/ringbuf.c``), and in the rings of handlers
in processes.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["HEADER_SIZE", "Span", "complete_end", "entries_in", "sizes_in", "spans_in"]

_BUSY = 1 << 31
_DISCARDED = 1 << 30
HEADER_SIZE = 8
"""Size in bytes of an entry's header, before its data."""
_LENGTH = struct.Struct("=I")

_ALIKE_MIN = 16
"""Minimum number of consecutive entries of one length that form a run."""
_LAST_LIMIT = 1 << 16
"""Maximum number of entries in one comparison."""
_LAST_PATIENCE = 1024
"""Maximum number of entries that are read one by one before the next search for a run."""

_SIZES_MAX = 256
_EACH_MIN = 8
"""Maximum number of sizes of entries to be distinguished, and the minimum average number of entries of each."""


class _Runs:
    """
    Finder of runs of entries with the same length; ``words`` are the 32-bit words of the ring, or of a window of it.

    With ``is_cleared``, the reader clears the ring, and an entry with the length 0 is incomplete.
    """

    def __init__(self, words: memoryview, *, is_cleared: bool = False) -> None:
        self._words = words
        self._is_cleared = is_cleared
        self._limit = 2 * _ALIKE_MIN
        self._patience = _ALIKE_MIN
        self.left = 0
        """Number of entries to be read one by one before the next search for a run."""
        self._steps: dict[int, int] = {}
        """The size of an entry in 32-bit words, keyed by the first word of its header."""

    def passed(self, place: int, end: int) -> int:
        """
        Skip up to ``left`` entries one by one from the offset ``place``, and return the offset of the next entry.

        The result is that of an entry which is still being written if one comes first, or ``end``.
        """
        words, steps = self._words, self._steps
        at, stop = place >> 2, end >> 2
        for _ in range(self.left):
            if at >= stop:
                break
            try:
                at += steps[words[at]]
            except KeyError:
                length = words[at]
                if length & _BUSY or (self._is_cleared and not length):
                    break
                at += steps.setdefault(length, _stride(length & ~_DISCARDED) >> 2)
        self.left = 0
        return at << 2

    def count(self, place: int, stride: int, room: int) -> int:
        """
        Return the number of entries from the byte offset ``place`` on that have the same length; 0: too few for a run.

        ``stride`` is the size of the first entry, and ``room`` the number of bytes up to the end.
        """
        limit = min(room // stride, self._limit)
        if limit < _ALIKE_MIN:
            return 0
        first, step = place >> 2, stride >> 2
        heads = self._words[first : first + limit * step : step].tobytes()
        count = limit
        while count >= _ALIKE_MIN and heads[: count * _LENGTH.size] != heads[: _LENGTH.size] * count:
            count //= 2
        if count < _ALIKE_MIN:
            self.left = self._patience
            self._patience = min(2 * self._patience, _LAST_PATIENCE)
            self._limit = 2 * _ALIKE_MIN
            return 0
        self._patience = _ALIKE_MIN
        self._limit = min(4 * self._limit, _LAST_LIMIT) if count == limit else 2 * _ALIKE_MIN
        return count


def _stride(length: int) -> int:
    return length + HEADER_SIZE + 7 & ~7


class Span(NamedTuple):
    """
    Part of a window, from ``start`` up to ``stop``, exclusive; all are in bytes.

    Its entries are ``stride`` bytes apart, and none is discarded. If ``stride`` is 0, the entries are of any sizes.
    """

    start: int
    stop: int
    stride: int


def spans_in(window: bytes) -> Iterator[Span]:
    """Iterate over the parts of a window of a ring: runs of entries of one length, and the parts between runs."""
    position = begin = 0
    end, unpack = len(window), _LENGTH.unpack_from
    with memoryview(window) as view, view.cast("I") as words:
        runs = _Runs(words)
        while position < end:
            if runs.left:
                position = runs.passed(position, end)
                continue
            (length,) = unpack(window, position)
            stride = _stride(length & ~_DISCARDED)
            count = runs.count(position, stride, end - position) if length < _DISCARDED else 0
            if count:
                if begin < position:
                    yield Span(begin, position, 0)
                begin = position + count * stride
                yield Span(position, begin, stride)
            position += stride * max(count, 1)
    if begin < end:
        yield Span(begin, end, 0)


def sizes_in(window: bytes, start: int, stop: int) -> tuple[list[tuple[int, list[int]]], bytes] | None:
    """
    Return the stride and the offsets, in bytes, of the entries of each length; and a byte for each entry, its index.

    The index is that of the entry's length in the list. Return None if an entry is discarded, or if there are more than
    256 lengths, or fewer than 8 entries of each on average.
    """
    places: list[list[int]] = []
    numbers: dict[int, tuple[int, int, Callable[[int], None]]] = {}
    order = bytearray()
    add_number = order.append
    with memoryview(window) as view, view.cast("I") as words:
        at, end = start >> 2, stop >> 2
        while at < end:
            length = words[at]
            try:
                number, step, add = numbers[length]
            except KeyError:
                if length >= _DISCARDED or len(places) == _SIZES_MAX:
                    return None
                places.append([])
                number, step, add = numbers[length] = len(places) - 1, _stride(length) >> 2, places[-1].append
            add_number(number)
            add(at << 2)
            at += step
    if len(order) < len(places) * _EACH_MIN:
        return None
    strides = [_stride(length) for length in numbers]
    return list(zip(strides, places, strict=True)), bytes(order)


def entries_in(window: memoryview | bytes, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
    """
    Iterate over the start and stop offsets of the data of entries in a window of a ring, except discarded entries.

    ``start`` and ``stop`` are offsets of entries; ``stop`` is exclusive, by default the end of the window.
    """
    position, end, unpack = start, len(window) if stop is None else stop, _LENGTH.unpack_from
    while position < end:
        (length,) = unpack(window, position)
        start = position + HEADER_SIZE
        if length & _DISCARDED:
            length ^= _DISCARDED
        else:
            yield start, start + length
        position = start + length + 7 & ~7


def complete_end(words: memoryview, place: int, end: int, *, is_cleared: bool = False) -> int:
    """
    Return the end of the complete entries from ``place`` on, all in bytes; the last entry may reach beyond ``end``.

    ``words`` are the 32-bit words of the ring. An entry is incomplete if it is busy, or with ``is_cleared``, if its
    length is 0.
    """
    runs = _Runs(words, is_cleared=is_cleared)
    while place < end:
        if runs.left:
            place = runs.passed(place, end)
            if place >= end:
                break
        length = words[place >> 2]
        count = 1
        if length >= _DISCARDED:
            if length & _BUSY:
                break
            length ^= _DISCARDED
        elif is_cleared and not length:
            break
        else:
            count = runs.count(place, _stride(length), end - place) or 1
        place += count * _stride(length)
    return place
