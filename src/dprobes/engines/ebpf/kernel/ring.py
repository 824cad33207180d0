"""
The reader's side of a BPF ring buffer: entries in the order in which programs reserved their places.

The layout is that of ``struct bpf_ringbuf`` in ``kernel/bpf/ringbuf.c``, as user space sees it::

    page 0                 u64 consumer position, which we write
    page 1                 u64 producer position, which the kernel writes
    from page 2 on         the data, mapped twice in a row: an entry that wraps around is contiguous

    entry   u32 length, with bit 31 (busy: not complete yet) and bit 30 (discarded) | u32 page offset | data,
            filled up to a multiple of 8 bytes

Positions only grow; their low bits are places in the data.
"""

from __future__ import annotations

import contextlib
import mmap
import select
import struct
import sys
import time
from typing import TYPE_CHECKING

from dprobes.bpf.layout import Status
from dprobes.engines.ebpf.kernel.descriptors import Descriptor
from dprobes.engines.linux.mapcalls import MapType, create_map
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["RingBuffer", "Span", "entries_in", "sizes_in", "spans_in", "wait"]

_BUSY = 1 << 31
_DISCARDED = 1 << 30
_HEADER = 8
_LENGTH = struct.Struct("=I")

_ALIKE_MIN = 16
"""Fewer entries of the same length are looked at one by one."""
_LAST_LIMIT = 1 << 16
"""How many entries are compared at once at most."""
_LAST_PATIENCE = 1024
"""How many entries are looked at one by one at most before it is tried again to compare many."""

_SIZES_MAX = 256
_EACH_MIN = 8
"""How many sizes of entries are told apart, and how many entries there must be of each on average."""


class _Runs:
    """Find entries of the same length in a row; ``words`` are the ring's, or those of a window of it."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._limit = 2 * _ALIKE_MIN
        self._patience = _ALIKE_MIN
        self.left = 0
        """How many entries are still to be passed one by one, before it is worth to count again."""
        self._steps: dict[int, int] = {}
        """What the head of an entry says of how many words it takes."""

    def passed(self, place: int, end: int) -> int:
        """Return the place behind entries that are passed one by one: before a busy one, and not beyond ``end``."""
        words, steps = self._words, self._steps
        at, stop = place >> 2, end >> 2
        for _ in range(self.left):
            if at >= stop:
                break
            try:
                at += steps[words[at]]
            except KeyError:
                length = words[at]
                if length & _BUSY:
                    break
                at += steps.setdefault(length, _stride(length & ~_DISCARDED) >> 2)
        self.left = 0
        return at << 2

    def count(self, place: int, stride: int, room: int) -> int:
        """Return how many entries from ``place`` on have the length of the first one, or 0; ``room`` bytes are left."""
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
    return length + _HEADER + 7 & ~7


class Span(NamedTuple):
    """A part of a window; entries in it are ``stride`` bytes apart and not discarded, unless that is 0."""

    start: int
    stop: int
    stride: int


def spans_in(window: bytes) -> Iterator[Span]:
    """Cut a window of a ring, in order, into many entries of the same length in a row, and what is between those."""
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
    Return where entries of each size are, with their distance in bytes, and of each entry the number of its size.

    None if one was discarded, or the sizes are too many to be worth it.
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
    Iterate over the bounds of the data of those entries in a window of a ring that were not discarded.

    ``start`` and ``stop`` are where entries begin, or the end of the window.
    """
    position, end, unpack = start, len(window) if stop is None else stop, _LENGTH.unpack_from
    while position < end:
        (length,) = unpack(window, position)
        start = position + _HEADER
        if length & _DISCARDED:
            length ^= _DISCARDED
        else:
            yield start, start + length
        position = start + length + 7 & ~7


class RingBuffer(Descriptor):
    """
    A ring buffer of ``size`` bytes, a power of two and at least a page, that programs write to and we read.

    There is one reader at a time. Views of the data must not be kept beyond ``close``.
    """

    def __init__(self, size: int, name: str = "") -> None:
        super().__init__(create_map(MapType.RINGBUF, 0, 0, size, name=name))
        self.size = size
        page = mmap.PAGESIZE
        self._closed = False
        with contextlib.ExitStack() as undoing:
            undoing.callback(super().close)
            self._own = undoing.enter_context(mmap.mmap(self.fd, page))
            self._kernels = mmap.mmap(self.fd, page + 2 * size, prot=mmap.PROT_READ, offset=page)
            undoing.pop_all()
        with memoryview(self._own) as own, memoryview(self._kernels) as kernels:
            self._consumer = own.cast("Q")
            with kernels[:8] as position:
                self._producer = position.cast("Q")
            self._data = kernels[page:]
        self._words = self._data.cast("I")

    @property
    def pending(self) -> int:
        """How many bytes wait to be read, incomplete entries included."""
        pending: int = self._producer[0] - self._consumer[0]
        return pending

    def drain(self) -> list[bytes]:
        """Return the data of all entries up to the first incomplete one, and give their room back."""
        with self.window() as window:
            entries = [bytes(window[start:stop]) for start, stop in entries_in(window)]
            size = len(window)
        self.advance(size)
        return entries

    def window(self, size: int = sys.maxsize) -> memoryview:
        """
        Return entries up to the first incomplete one as they stand in the ring, with headers and discarded ones.

        Those that begin in the first ``size`` bytes are returned. Their room is given back by ``advance``, behind which
        the view shows other entries.
        """
        begin = self._consumer[0]
        place = start = begin & self.size - 1
        end = start + min(self._producer[0] - begin, size)
        words = self._words
        runs = _Runs(words)
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
            else:
                count = runs.count(place, _stride(length), end - place) or 1
            place += count * _stride(length)
        return self._data[start:place]

    def advance(self, size: int) -> None:
        """Give back the room of the first ``size`` bytes, which are whole entries of ``window``."""
        self._consumer[0] += size

    def close(self) -> None:
        """Give up the ring and its memory."""
        if not self._closed:
            self._closed = True
            for view in (self._words, self._data, self._producer, self._consumer):
                view.release()
            self._kernels.close()
            self._own.close()
        super().close()


_FIRST_SLEEP = 0.01
_LONGEST_SLEEP = 0.5


def wait(ring: RingBuffer, status: memoryview, timeout: float, others: Iterable[int] = ()) -> bool:
    """
    Sleep until there is something in the ring, and return whether there is.

    Also ends when one of the descriptors ``others`` can be read, or ``timeout`` seconds have passed. ``status`` are the
    64-bit words of STATUS: a program that finds ``Status.WAITING`` set takes it back and wakes us; the others need not.
    poll(2) looks at the ring before it sleeps, behind a barrier, which epoll_wait(2) would not do for an entry that
    came without a wake-up. A program that looked at the word before we set it, and wrote its entry after we
    looked at the ring, wakes nobody: so we look again after a short sleep, and then less and less often. The word stays
    set until something comes: where it has been set all the time, short sleeps are not needed any more.
    """
    poll = select.poll()
    for descriptor in (ring.fd, *others):
        poll.register(descriptor, select.POLLIN)
    end = time.monotonic() + timeout
    word = Status.WAITING // 8
    sleep = timeout if status[word] else _FIRST_SLEEP
    while True:
        status[word] = 1
        left = end - time.monotonic()
        if poll.poll(max(0.0, min(sleep, left)) * 1000) or left <= sleep:
            break
        sleep = min(2 * sleep, _LONGEST_SLEEP)
    if not ring.pending:
        return False
    status[word] = 0
    return True
