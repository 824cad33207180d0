"""What handlers have counted without the tracer, while it can be read and when it was given up."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.map_layouts import ProbeField
from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import Counts
from dprobes.engines.hits.hit_lifecycle import ProbeLimits
from dprobes.engines.inline.entry_reader import RingReader
from dprobes.engines.inline.handler_hits import Damage, HandlerHits, HandlerMaps, new_state
from dprobes.engines.inline.shared_state import PROBES_MAX
from dprobes.native.routines.handler_ring import DATA, PRODUCER
from dprobes.record.log_record import Item
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile
from support.ring_entries import entry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.inline.shared_state import SharedState
    from dprobes.rpn.rpn_program import Program

JUMPS = {0: {"jump"}, 1: {"window", "jump"}}
HOW = ("inline (jump)", "inline (window)")


@pytest.fixture
def program() -> Program:
    text = "name = x\noffset = 0\nexit\noffset = 1\nexit\n"
    return parse_source(SourceFile("a.rpn", text), Diagnostics(), CompileOptions())


@pytest.fixture
def state(program: Program) -> SharedState:
    return new_state(program)


@pytest.fixture
def maps(program: Program, state: SharedState) -> HandlerMaps:
    return HandlerMaps(state, program)


@pytest.fixture
def hits(maps: HandlerMaps, state: SharedState) -> Iterator[HandlerHits]:
    maps.region.place = 0
    made = HandlerHits(maps, RingReader(Item(0), maps.rings.size, PROBES_MAX, None), state)
    yield made
    made.close()


def hit(state: SharedState, probe: int, times: int, passcount: int = 0, maxhits: int = 0) -> None:
    """Draw hits as handlers do, which count on when all that were wanted have been."""
    shared = state.hits_of(probe, ProbeLimits(passcount, maxhits, keep_on_fault=False, keep_ip=False))
    assert shared is not None
    for _ in range(times):
        shared.draw()


def counted(hits: HandlerHits, limits: dict[int, tuple[int, int]], before: int = 0) -> list[Counts]:
    counts = [Counts(hits=before, executed=("emulated",)) for _ in range(2)]
    hits.add_counts(counts, JUMPS, limits)
    return counts


def test_hits_of_handlers_are_added_to_those_of_breakpoints(hits: HandlerHits, state: SharedState) -> None:
    hit(state, 0, 5)
    hit(state, 1, 2)
    first, second = counted(hits, {0: (0, 0), 1: (0, 0)}, before=3)
    assert (first.hits, first.executed) == (8, ("emulated", HOW[0]))
    assert (second.hits, second.executed) == (5, ("emulated", *HOW))


def test_limited_hits_are_drawn_by_all_together(hits: HandlerHits, state: SharedState) -> None:
    hit(state, 0, 9, passcount=2, maxhits=3)
    hit(state, 1, 1, passcount=4)
    first, second = counted(hits, {0: (2, 3), 1: (4, 0)}, before=3)
    assert (first.hits, first.passed) == (5, 2)
    assert (second.hits, second.passed) == (1, 1)


def test_records_are_taken_once_and_counted_after_the_end(
    hits: HandlerHits, maps: HandlerMaps, state: SharedState
) -> None:
    flags = int(Item.MAJOR | Item.MINOR | Item.WIDE)
    written, ring = entry(1, struct.pack("=III", flags, 0, 0) + b"one more"), maps.rings.place.address
    maps.region.mapping[ring + DATA : ring + DATA + len(written)] = written
    struct.pack_into("=Q", maps.region.mapping, ring + PRODUCER, len(written))
    batches, ended = hits.take(is_over=True)
    assert [probe for batch in batches for probe, _ in batch] == [1]
    assert ended == []
    hits.close()
    assert hits.take(is_over=True) == ([], [])
    assert [each.records for each in counted(hits, {0: (0, 0), 1: (0, 0)})] == [0, 1]
    assert hits.to_be_released() is None
    hits.released(is_done=True)


@pytest.mark.parametrize("field", [ProbeField.HITS, ProbeField.LOST, ProbeField.MISSED])
def test_a_number_that_is_no_count_is_left_out(hits: HandlerHits, state: SharedState, field: ProbeField) -> None:
    hit(state, 1, 2)
    state.probes.words[field // 8] = (1 << 64) - 1
    first, second = counted(hits, {0: (0, 0), 1: (0, 0)}, before=3)
    assert (first.hits, first.lost, first.missed) == (3, 0, 0)
    assert second.hits == 5
    assert hits.damage == Damage(counts=1)
    hits.close()
    assert hits.damage == Damage(counts=1)
