"""The memory in which a tracer shows counts and variables: two mappings of it, as tracer and client have them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.engine_interface import Counts
from dprobes.engines.ptrace.breakpoint_sites import Placement
from dprobes.engines.ptrace.shared_counters import SharedCounters

if TYPE_CHECKING:
    from collections.abc import MutableSequence


@pytest.fixture
def client() -> SharedCounters:
    return SharedCounters.new(3, 2)


@pytest.fixture
def tracer(client: SharedCounters) -> SharedCounters:
    return SharedCounters(os.dup(client.descriptor), 3, 2)


def fill(values: MutableSequence[int], first: int) -> None:
    for index in range(len(values)):
        values[index] = first + index


def test_what_one_side_counts_is_what_the_other_reads_however_many_probepoints_there_are(
    client: SharedCounters, tracer: SharedCounters
) -> None:
    for probe in (2000, 0, 511, 512):
        tally = tracer.tally(probe)
        tally.hits += probe + 1
        tally.records = 1
        tally.lost = 2
        tally.note(Placement.PAGE)
        tally.note(Placement.IN_PLACE)
        tally.note(Placement.PAGE)
    counts = client.counts(2001)
    assert counts[512] == Counts(513, 1, 2, executed=("in a page", "in place"))
    assert [number for number, count in enumerate(counts) if count != Counts()] == [0, 511, 512, 2000]
    assert [counts[number].hits for number in (0, 511, 2000)] == [1, 512, 2001]


def test_variables_lie_beside_each_other(client: SharedCounters, tracer: SharedCounters) -> None:
    fill(tracer.variables.local, 10)
    for cpu, values in enumerate(tracer.variables.by_cpu):
        fill(values, 100 * cpu + 100)
    tracer.tally(0).hits = 7
    assert client.local_variables() == [10, 11, 12]
    cpus = client.cpu_variables()
    assert cpus == [[100 * cpu + 100, 100 * cpu + 101] for cpu in range(len(cpus))]
    assert len(cpus) >= (os.cpu_count() or 1)
    tracer.variables.local[2] = (1 << 64) - 1
    assert client.local_variables()[2] == (1 << 64) - 1


def test_a_reset_shows_at_once_and_is_made_between_two_handlers(client: SharedCounters, tracer: SharedCounters) -> None:
    fill(tracer.variables.local, 1)
    fill(tracer.variables.by_cpu[0], 5)
    tracer.tally(3).hits = 9
    client.ask_for_reset()
    # A handler that is at work may still write what it has read before.
    tracer.variables.local[0] += 1
    assert client.local_variables() == [0, 0, 0]
    assert client.cpu_variables()[0] == [0, 0]
    tracer.reset_if_asked()
    assert list(tracer.variables.local) == [0, 0, 0]
    tracer.variables.local[0] += 1
    tracer.reset_if_asked()
    assert client.local_variables() == [1, 0, 0]
    assert client.cpu_variables()[0] == [0, 0]
    assert client.counts(4)[3].hits == 9


def test_a_reset_of_some_variables_leaves_the_others_as_they_are(
    client: SharedCounters, tracer: SharedCounters
) -> None:
    fill(tracer.variables.local, 1)
    fill(tracer.variables.by_cpu[0], 5)
    client.ask_for_reset(1, 1)
    assert client.local_variables() == [1, 0, 3]
    assert client.cpu_variables()[0] == [5, 0]
    tracer.variables.local[0] += 10
    tracer.variables.local[1] += 10
    assert client.local_variables() == [11, 0, 3]
    client.ask_for_reset(2, 100)
    assert client.local_variables() == [11, 0, 0]
    assert client.cpu_variables()[0] == [5, 0]
    tracer.reset_if_asked()
    assert list(tracer.variables.local) == client.local_variables() == [11, 0, 0]
    tracer.variables.local[1] += 1
    # What was made is not made again.
    client.ask_for_reset(0, 0)
    tracer.reset_if_asked()
    assert list(tracer.variables.local) == client.local_variables() == [0, 1, 0]
    assert client.cpu_variables()[0] == [0, 0]


def test_a_program_may_have_no_variables() -> None:
    counters = SharedCounters.new(0, 0)
    counters.ask_for_reset()
    counters.reset_if_asked()
    assert counters.local_variables() == []
    assert set(map(tuple, counters.cpu_variables())) == {()}
