"""What stays as it is for a while is suspected of having been left, and given up once that is certain."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.map_layouts import MapName
from dprobes.diagnostics import Diagnostics
from dprobes.engines.inline.handler_hits import HandlerMaps, MemoryWatch, new_state
from dprobes.engines.inline.shared_memory import SharedHash
from dprobes.native.routines.handler_ring import BUSY, DATA, ENTRY_HEADER, PRODUCER
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def maps() -> Iterator[HandlerMaps]:
    text = "name = x\ntable = t, sum, word\noffset = 0\nexit\n"
    program = parse_source(SourceFile("a.rpn", text), Diagnostics(), CompileOptions())
    made = HandlerMaps(new_state(program), program)
    made.region.place = 0
    yield made
    made.close()


def claims_of(maps: HandlerMaps) -> list[int]:
    """Return where the claims are, and the locks."""
    return list(maps._arrays[MapName.CLAIMS].elements)


def put(maps: HandlerMaps, data: bytes, flags: int = 0, *, begun: bool = True) -> None:
    """Write an entry to the first ring, as a handler does; with ``begun`` false only its place is taken."""
    first = maps.rings.place.address
    (position,) = struct.unpack_from("=Q", maps.region.mapping, first + PRODUCER)
    at = first + DATA + position
    if begun:
        struct.pack_into("=I", maps.region.mapping, at, len(data) | flags)
        maps.region.mapping[at + ENTRY_HEADER : at + ENTRY_HEADER + len(data)] = data
    struct.pack_into("=Q", maps.region.mapping, first + PRODUCER, position + (len(data) + ENTRY_HEADER + 7 & ~7))


def test_nothing_is_suspected_of_what_moves(maps: HandlerMaps) -> None:
    left, claims = MemoryWatch(maps), claims_of(maps)
    for now in range(20):
        put(maps, b"an entry", BUSY)
        maps.region.mapping[claims[now % 4]] = 1
        assert not left.are_suspected(float(now))
        maps.region.mapping[claims[now % 4]] = 0
        assert maps.rings.rings[0].skip()


def test_an_entry_is_suspected_after_a_while_and_given_up_once_it_is_certain(maps: HandlerMaps) -> None:
    left = MemoryWatch(maps)
    put(maps, b"left", BUSY)
    put(maps, b"behind")
    put(maps, b"not begun", begun=False)
    assert not left.are_suspected(1.0)
    assert not left.are_suspected(1.4)
    assert left.are_suspected(1.6)
    assert left.note_asking() == ()
    assert not left.are_suspected(5.0)  # the answer is still to come
    put(maps, b"later", BUSY)
    assert maps.rings.drain() == []
    left.note_answer(is_done=True)
    assert maps.rings.drain() == [b"behind"]
    assert left.entries == 2
    assert maps.rings.rings[0].pending == ENTRY_HEADER + 8  # what was begun after the question stays


def test_claims_and_locks_are_words_to_be_released_once_they_are_old(maps: HandlerMaps) -> None:
    left = MemoryWatch(maps)
    (table,) = (part for part in maps._state.maps.values() if isinstance(part, SharedHash))
    old, young = (claims_of(maps)[1], table.locks[0]), table.locks[-1]
    assert old[1] != young
    for place in old:
        maps.region.mapping[place] = 1
    assert not left.are_suspected(1.0)
    maps.region.mapping[young] = 1
    assert not left.are_suspected(1.3)
    assert left.are_suspected(1.6)
    assert left.note_asking() == tuple((place, 8) for place in old)


def test_who_is_told_that_nothing_was_left_waits_longer(maps: HandlerMaps) -> None:
    left = MemoryWatch(maps)
    put(maps, b"slow", BUSY)
    assert not left.are_suspected(1.0)
    assert left.are_suspected(1.6)
    left.note_asking()
    left.note_answer(is_done=False)
    assert maps.rings.drain() == []
    assert not left.are_suspected(2.0)
    assert not left.are_suspected(2.9)
    assert left.are_suspected(3.1)
