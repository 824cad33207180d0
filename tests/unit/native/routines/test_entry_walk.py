"""A walk over entries finds each of them, with its time and group, and no more than there are."""

from __future__ import annotations

import ctypes

import pytest

from dprobes.bpf.map_layouts import Entry
from dprobes.engines.inline.shared_memory import own_function
from dprobes.native.routines.entry_walk import (
    GROUP_SIZE,
    GROUPS_MAX,
    WALK_SIZE,
    RecordPlaces,
    Walk,
    WalkResult,
    complete_routine,
    walk_routine,
)
from dprobes.native.routines.handler_ring import BUSY, DISCARDED
from support.ring_entries import entry

LATEST = 1 << 40
FLAGS = 0x0803
TIMED = RecordPlaces(time=0, uid=None, name=None)
UNTIMED = RecordPlaces(time=None, uid=None, name=None)


def timed(time: int, size: int = 8) -> bytes:
    return time.to_bytes(8, "little").ljust(size, b"x")


class Walker:
    """A walk over some bytes, behind which others follow."""

    def __init__(self, data: bytes, places: RecordPlaces = TIMED, *, again: bool = False) -> None:
        self._data = ctypes.create_string_buffer(data + bytes(256), len(data) + 256)
        self._lines = (ctypes.c_uint64 * (len(data) // 8 + 2))()
        self._groups = (ctypes.c_uint64 * (2 * GROUPS_MAX))()
        self.counts = (ctypes.c_uint64 * 8)()
        self.walk = (ctypes.c_uint64 * (WALK_SIZE // 8))()
        self._function = own_function(walk_routine(places, again=again))
        start = ctypes.addressof(self._data)
        for place, value in (
            (Walk.AT, start),
            (Walk.BASE, start),
            (Walk.END, start + len(data)),
            (Walk.LINE, ctypes.addressof(self._lines)),
            (Walk.GROUPS, ctypes.addressof(self._groups)),
            (Walk.GROUPS_END, ctypes.addressof(self._groups)),
            (Walk.COUNTS, ctypes.addressof(self.counts)),
            (Walk.PROBES, len(self.counts)),
            (Walk.LATEST, LATEST),
        ):
            self.walk[place // 8] = value

    def run(self) -> WalkResult:
        return WalkResult(self._function(ctypes.addressof(self.walk)))

    @property
    def refused(self) -> int:
        return self.walk[Walk.REFUSED // 8]

    @property
    def lines(self) -> list[tuple[int, int, int]]:
        """Time, place and group of each line."""
        end = (self.walk[Walk.LINE // 8] - ctypes.addressof(self._lines)) // 8
        words = self._lines[:end]
        return [(time, word & 0xFFFF_FFFF, word >> 32) for time, word in zip(words[::2], words[1::2], strict=True)]

    @property
    def groups(self) -> list[tuple[int, int, int]]:
        """Kind, length and count of each group."""
        count = (self.walk[Walk.GROUPS_END // 8] - ctypes.addressof(self._groups)) // GROUP_SIZE
        pairs = [(self._groups[2 * n], self._groups[2 * n + 1]) for n in range(count)]
        return [(key >> 32, key & 0xFFFF_FFFF, count) for key, count in pairs]


def test_each_entry_has_a_line_with_its_time_and_group() -> None:
    pieces = [entry(1, timed(70)), entry(2, timed(50, 13)), entry(1, timed(60))]
    walker = Walker(b"".join(pieces))
    assert walker.run() is WalkResult.DONE
    assert walker.lines == [(70, 0, 0), (50, 24, 1), (60, 56, 0)]
    assert walker.groups == [(Entry.RECORD, 16, 2), (Entry.RECORD, 21, 1)]
    assert list(walker.counts[:3]) == [0, 2, 1]


def test_what_was_walked_over_before_is_not_counted_again() -> None:
    walker = Walker(entry(1, timed(70)), again=True)
    assert walker.run() is WalkResult.DONE
    assert (len(walker.lines), list(walker.counts)) == (1, [0] * 8)


def test_discarded_entries_have_no_line() -> None:
    walker = Walker(entry(1, timed(5), flags=DISCARDED) + entry(2, timed(6)) + entry(3, b"", flags=DISCARDED))
    assert walker.run() is WalkResult.DONE
    assert walker.lines == [(6, 24, 0)]


def test_other_entries_have_the_time_of_the_record_before_them() -> None:
    walker = Walker(entry(0, timed(9)) + entry(3, timed(1), Entry.ENDED) + entry(0, timed(12)))
    assert walker.run() is WalkResult.DONE
    assert [time for time, _, _ in walker.lines] == [9, 9, 12]
    assert walker.groups == [(Entry.RECORD, 16, 2), (Entry.ENDED, 16, 1)]
    assert list(walker.counts[:4]) == [2, 0, 0, 0]


def test_records_without_a_time_have_none() -> None:
    walker = Walker(entry(0, timed(9)), UNTIMED)
    assert walker.run() is WalkResult.DONE
    assert [time for time, _, _ in walker.lines] == [0]


@pytest.mark.parametrize("end", [entry(0, timed(2))[:-8], (1 << 29).to_bytes(8, "little")])
def test_a_walk_ends_at_what_is_no_entry(end: bytes) -> None:
    walker = Walker(entry(0, timed(1)) + end)
    assert walker.run() is WalkResult.NONSENSE
    assert [time for time, _, _ in walker.lines] == [1]


def flagged(flags: int = FLAGS, size: int = 16) -> bytes:
    return flags.to_bytes(4, "little").ljust(size, b"x")


@pytest.mark.parametrize(
    ("places", "refused"),
    [
        (TIMED, entry(8, timed(1))),
        (TIMED, entry(0xFF_FFFF, bytes(8), Entry.ENDED)),
        (TIMED, entry(0, timed(LATEST + 1))),
        (TIMED, entry(0, timed(1 << 63))),
        (TIMED, (4).to_bytes(16, "little")),
        (TIMED, entry(0, bytes(4), Entry.ENDED)),
        *((TIMED, entry(0, timed(1), kind)) for kind in (*Entry, 200) if kind not in (0, 1, 2, 6, 8)),
        (RecordPlaces(None, None, None, FLAGS, 16), entry(0, flagged(FLAGS + 4))),
        (RecordPlaces(None, None, None, FLAGS, 16), entry(0, flagged(), Entry.TRACE)),
        (RecordPlaces(None, None, None, FLAGS, 16), entry(0, flagged(size=15))),
        (RecordPlaces(None, None, None, FLAGS, 16), entry(0, flagged(size=15), Entry.STACKED)),
    ],
)
def test_what_no_handler_writes_is_passed_over_and_counted(places: RecordPlaces, refused: bytes) -> None:
    last = entry(7, timed(2) if places is TIMED else flagged())
    walker = Walker(refused + last, places)
    assert walker.run() is WalkResult.DONE
    assert (len(walker.lines), walker.refused) == (1, 1)
    assert list(walker.counts) == [0] * 7 + [1]


def test_a_stack_trace_has_its_flag() -> None:
    walker = Walker(entry(0, flagged(FLAGS | 0x1000), Entry.TRACE), RecordPlaces(None, None, None, FLAGS, 16))
    assert walker.run() is WalkResult.DONE
    assert (len(walker.lines), walker.refused) == (1, 0)


def test_a_walk_stops_where_there_are_no_more_groups() -> None:
    pieces = [entry(0, timed(n, 8 + n)) for n in range(GROUPS_MAX + 3)]
    walker = Walker(b"".join(pieces))
    assert walker.run() is WalkResult.GROUPS
    assert len(walker.lines) == len(walker.groups) == GROUPS_MAX
    at = walker.walk[Walk.AT // 8] - walker.walk[Walk.BASE // 8]
    assert at == len(b"".join(pieces[:GROUPS_MAX]))


@pytest.mark.parametrize(
    ("last", "is_complete"),
    [
        (b"", True),
        (bytes(24), False),
        (entry(0, timed(1), flags=BUSY), False),
        (entry(0, timed(1), flags=BUSY | DISCARDED), False),
        (entry(0, timed(1), flags=DISCARDED), True),
        (entry(0, timed(1))[:-8], False),
    ],
)
def test_entries_are_complete_up_to_the_first_one_that_is_not(last: bytes, is_complete: bool) -> None:
    whole = entry(0, timed(1)) + entry(1, timed(2, 11))
    data = ctypes.create_string_buffer(whole + last, len(whole) + len(last))
    start = ctypes.addressof(data)
    found = own_function(complete_routine())(start, start + len(data)) - start
    assert found == len(whole) + (len(last) if is_complete else 0)
