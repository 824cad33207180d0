"""Rings in shared memory (``native.routines.handler_ring``): the reader's side."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING

from dprobes.engines.inline.memory.shared_memory import own_function
from dprobes.engines.ring_spans import complete_end, entries_in
from dprobes.native.generated_code import MapPlace, MapShape
from dprobes.native.routines.entry_walk import complete_routine
from dprobes.native.routines.handler_ring import BUSY, CONSUMER, DATA, DISCARDED, ENTRY_HEADER, PRODUCER, RingShape

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from dprobes.engines.inline.hits.entry_index import EntryBuffer
    from dprobes.engines.inline.memory.shared_memory import Region

__all__ = ["SharedRing", "SharedRings"]

_AT_ONCE, _AT_ONCE_MIN = 4 << 20, 64 << 10
"""Bytes of all rings together, and of each, that are looked at in one go."""


_WORD_MAX = (1 << 64) - 1


@lru_cache(1)
def _complete() -> Callable[..., int]:
    return own_function(complete_routine())


class SharedRing:
    """
    The reader of one ring.

    Probed processes can write whatever they like into it. Where that can be no work of a handler, all that is in the
    ring is given up, and it begins anew.
    """

    def __init__(self, memory: memoryview, size: int, number: int = 0) -> None:
        self.size = size
        self._number = number
        self._consumer = memory[CONSUMER : CONSUMER + 8].cast("Q")
        self._producer = memory[PRODUCER : PRODUCER + 8].cast("Q")
        self._data = memory[DATA : DATA + size]
        self._lengths = self._data.cast("I")
        first = ctypes.c_char.from_buffer(self._data)
        self._address = ctypes.addressof(first)
        del first
        self._position: int = self._consumer[0] & ~7
        """How far it is read: what the memory says of that is for handlers only."""
        self._left = 0
        self.skipped = 0
        """How many entries were given up because their writers had left them."""
        self.damaged = 0
        """How often it has begun anew."""

    @property
    def stalled_at(self) -> int | None:
        """The position of the first entry if that is incomplete, so that all behind it wait; None if it is not."""
        if not self.pending:
            return None
        length = self._lengths[(self._position & self.size - 1) >> 2]
        return self._position if not length or length & BUSY else None

    @property
    def end(self) -> int:
        """The position behind the last entry."""
        return self._position + self.pending

    def leave(self, end: int) -> None:
        """Take notice that entries before a position that are incomplete stay so."""
        self._left = max(self._left, end)

    @property
    def pending(self) -> int:
        """How many bytes wait to be read, incomplete entries included."""
        pending: int = self._producer[0] - self._position
        if 0 <= pending <= self.size and not pending & 7:
            return pending
        self._begin_anew()
        return 0

    def _begin_anew(self) -> None:
        """Give up all that is there, which makes no sense."""
        self.damaged += 1
        ctypes.memset(self._address, 0, self.size)
        self._consumer[0] = self._producer[0] = self._position & _WORD_MAX

    def window(self) -> memoryview:
        """
        Return the complete entries up to the first one that is not, or to the end of the ring's memory.

        Their room is given back by ``advance``.
        """
        pending = self.pending
        start = self._position & self.size - 1
        end = min(self.size, start + pending)
        return self._data[start : complete_end(self._lengths, start, end, is_cleared=True)]

    def advance(self, size: int) -> None:
        """Give back the room of the first ``size`` bytes of ``window``."""
        place = self._position & self.size - 1
        ctypes.memset(self._address + place, 0, size)
        self._go_on(size)

    def _go_on(self, size: int) -> None:
        self._position += size
        self._consumer[0] = self._position & _WORD_MAX

    def move(self, buffer: EntryBuffer, limit: int) -> bool:
        """
        Move complete entries to a buffer: about ``limit`` bytes, but one entry at least, as far as it has room.

        Return False if there are entries, but none that is complete.
        """
        self._skip_left()
        pending = self.pending
        for is_second in (False, True):  # up to the end of the ring's memory, and from its beginning on
            place = self._position & self.size - 1
            room = min(self.size - place, pending, max(limit, self._first_size(place)), buffer.room - buffer.end)
            if room <= 0:
                return True
            start = self._address + place
            size = _complete()(start, start + room) - start
            if not size:
                if self._reaches_too_far(place, pending):
                    self._begin_anew()
                return is_second
            ctypes.memmove(buffer.address + buffer.end, start, size)
            ctypes.memset(start, 0, size)
            self._go_on(size)
            limit -= size
            pending -= size
            buffer.add(size, self._number, has_more=pending > 0)
            if limit <= 0 or place + size < self.size:
                break
        return True

    def _reaches_too_far(self, place: int, pending: int) -> bool:
        """Return whether the entry at some place says that it is complete, and cannot be."""
        length = self._lengths[place >> 2]
        return 0 < length < BUSY and self._first_size(place) > min(self.size - place, pending)

    def _first_size(self, place: int) -> int:
        """Return how many bytes the entry at some place of the ring takes."""
        return (self._lengths[place >> 2] & ~(BUSY | DISCARDED)) + ENTRY_HEADER + 7 & ~7

    def skip(self, before: int | None = None) -> bool:
        """
        Give up an incomplete entry, whose writer is no more, if there is one; return whether there was.

        With ``before`` writers have left no more than what is before that position.
        """
        pending = self.pending
        place = self._position & self.size - 1
        left = pending if before is None else min(pending, before - self._position)
        if left <= 0:
            return False
        end = min(self.size, place + left)
        length = self._lengths[place >> 2]
        if length & BUSY:
            behind = place + ((length & ~(BUSY | DISCARDED)) + ENTRY_HEADER + 7 & ~7)
        elif length:
            return False
        else:  # nothing has been written, and what follows begins with a length
            behind = place + ENTRY_HEADER
            while behind < end and not self._lengths[behind >> 2]:
                behind += ENTRY_HEADER
        self.advance(min(behind, end) - place)
        return True

    def pieces(self) -> Iterator[bytes]:
        """Iterate over complete entries as they stand in the ring, many at once, and give their room back."""
        while size := len(window := self.window()):
            piece = bytes(window)
            window.release()
            self.advance(size)
            yield piece
        if self._skip_left():
            yield from self.pieces()

    def _skip_left(self) -> bool:
        """Give up incomplete entries that their writers have left; return whether there were any."""
        before = self.skipped
        while self.skip(self._left):
            self.skipped += 1
        return self.skipped > before

    def drain(self) -> list[bytes]:
        """Return the data of all complete entries, and give their room back."""
        return [piece[start:stop] for piece in self.pieces() for start, stop in entries_in(piece)]

    def close(self) -> None:
        """Release the views."""
        for view in (self._lengths, self._data, self._producer, self._consumer):
            view.release()


class SharedRings:
    """The rings of all CPUs."""

    def __init__(self, region: Region, shape: RingShape) -> None:
        self.shape = shape
        self._region = region
        self._offset = region.take(shape.rings * shape.stride, DATA)
        with memoryview(region.mapping) as whole:
            starts = range(self._offset, self._offset + shape.rings * shape.stride, shape.stride)
            self.rings = [
                SharedRing(whole[start : start + shape.stride], shape.size, number)
                for number, start in enumerate(starts)
            ]

    @property
    def size(self) -> int:
        """How many bytes of entries they have room for."""
        return self.shape.rings * self.shape.size

    @property
    def place(self) -> MapPlace:
        """Where the probed process has them."""
        return MapPlace(self._region.place + self._offset, MapShape.RINGS)

    def drain(self) -> list[bytes]:
        """Return the data of all complete entries, ring by ring, and give their room back."""
        return [entry for ring in self.rings for entry in ring.drain()]

    def pieces(self) -> list[bytes]:
        """Return complete entries as they stand in the rings, and give their room back."""
        return [piece for ring in self.rings for piece in ring.pieces()]

    def rest(self) -> tuple[list[bytes], int]:
        """
        Return all entries as ``pieces`` does, and how many are incomplete for ever: when no writer lives any more.

        Those behind an incomplete one are there as well.
        """
        pieces, skipped = self.pieces(), 0
        for ring in self.rings:
            while ring.skip():
                skipped += 1
                pieces += ring.pieces()
        return pieces, skipped

    def move(self, buffer: EntryBuffer, without: Collection[int] = ()) -> set[int]:
        """
        Move complete entries to a buffer, as many from each ring as a processor's cache can hold; from some rings none.

        Return the numbers of the rings whose first entry is not complete: what is behind that waits for it.
        """
        limit = max(_AT_ONCE // len(self.rings), _AT_ONCE_MIN)
        rings = [(number, ring) for number, ring in enumerate(self.rings) if number not in without]
        return {number for number, ring in rings if not ring.move(buffer, limit)}

    def move_rest(self, buffer: EntryBuffer) -> int:
        """Move all entries as ``rest`` returns them; return how many are incomplete for ever."""
        skipped = 0
        for ring in self.rings:
            end = ring.end  # whoever still writes does not keep us here
            ring.move(buffer, ring.size)
            while buffer.end < buffer.room and ring.skip(end):
                skipped += 1
                ring.move(buffer, ring.size)
        return skipped

    def drain_rest(self) -> tuple[list[bytes], int]:
        """Return the data of the entries of ``rest``."""
        pieces, skipped = self.rest()
        return [piece[start:stop] for piece in pieces for start, stop in entries_in(piece)], skipped

    @property
    def damaged(self) -> int:
        """How often one of them had something in it that no handler writes, and was emptied."""
        return sum(ring.damaged for ring in self.rings)

    def close(self) -> None:
        """Release the views."""
        for ring in self.rings:
            ring.close()
