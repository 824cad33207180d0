"""A program of the tracer: probepoints come and go, in any order."""

from __future__ import annotations

from dprobes.engines.ptrace.breakpoint_sites import Site, Sites
from dprobes.resolve.probepoints import ProbeState
from dprobes.vm import Point
from support.ptrace_programs import NO_LIMITS, inserted_program


def sites(*numbers: int) -> Sites:
    return Sites(tuple(Site(number, 0, 16 * number, b"\x55", (0, 1), point=Point()) for number in numbers))


def warn(message: str, hint: str | None) -> None:
    raise AssertionError(message)


def test_a_probepoint_that_was_removed_before_its_file_was_mapped_is_never_active() -> None:
    program = inserted_program()
    program.definitions = (NO_LIMITS,)
    assert program.remove([1]) == []
    assert program.enter(sites(0, 1, 2), (5, 7), warn) == [program.probes[1]]
    assert {number: probe.state for number, probe in program.probes.items()} == {
        0: ProbeState.COMPILED,
        1: ProbeState.REMOVED,
        2: ProbeState.COMPILED,
    }


def test_a_probepoint_that_is_there_is_given_to_who_removes_it() -> None:
    program = inserted_program()
    program.definitions = (NO_LIMITS,)
    assert program.enter(sites(0, 1), (5, 7), warn) == []
    assert program.remove([1, 9]) == [program.probes[1]]


def test_an_answer_for_another_copy_of_a_file_brings_nothing_twice() -> None:
    program = inserted_program()
    program.definitions = (NO_LIMITS,)
    program.enter(sites(0), (5, 7), warn)
    probe = program.probes[0]
    program.remove([0])
    assert program.enter(sites(0), (5, 7), warn) == []
    assert program.probes[0] is probe
