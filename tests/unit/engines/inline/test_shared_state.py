"""What two processes find of the state of a program, each with a mapping of its own."""

from __future__ import annotations

import itertools
import os
import struct
import threading

from dprobes.diagnostics import Diagnostics
from dprobes.engines.hits.hit_lifecycle import ProbeLimits
from dprobes.engines.inline.handler_hits import new_state
from dprobes.engines.inline.shared_state import PROBES_MAX, SharedHits, SharedState
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile

HEADER = "vars = 3\ngvars = 2\ncvars = 3\ntvars = 2\ntable = t, sum, word\n"


def limits(passcount: int = 0, maxhits: int = 0) -> ProbeLimits:
    return ProbeLimits(passcount, maxhits, keep_on_fault=False, keep_ip=False)


def state_of(header: str = HEADER) -> SharedState:
    text = f"name = x\n{header}offset = 0\nexit\n"
    return new_state(parse_source(SourceFile("a.rpn", text), Diagnostics(), CompileOptions()))


def seen_by_another(state: SharedState) -> SharedState:
    """Return the state as the tracer has it."""
    return state.plan.opened(os.dup(state.plan.descriptor))


def test_both_see_the_same_variables() -> None:
    one = state_of()
    other = seen_by_another(one)
    one.local_variables.add(2, 5, 8)
    one.variables.by_cpu[0][1] = 6
    one.global_variables[1] = 7
    assert [list(other.variables.local), list(other.variables.by_cpu[0])] == [[0, 0, 5], [0, 6, 0]]
    assert list(other.global_variables) == [0, 7]
    other.local_variables.add(2, -1, 8)
    assert one.variables.local[2] == 4


def test_both_see_the_same_tables() -> None:
    one = state_of()
    other = seen_by_another(one)
    (first,), (second,) = one.tables, other.tables
    first.tally(struct.pack("=Q", 9), 4)
    second.tally(struct.pack("=Q", 9), -6)
    assert first.value(struct.pack("=Q", 9)) == second.value(struct.pack("=Q", 9)) == -2
    assert first.contents() == second.contents()


def test_they_see_the_same_tables_with_call_stacks_as_keys() -> None:
    one = state_of("table = t, count, ustack[4]\ntable = u, count\n")
    key = struct.pack("=5Q", 1, 2, 3, 4, 5)
    seen_by_another(one).tables[0].tally(key)
    one.tables[0].tally(key)
    assert one.tables[0].contents().rows == ((key, (2,)),)


def test_threads_have_variables_until_they_are_no_more() -> None:
    one = state_of()
    other = seen_by_another(one)
    mine = one.thread_variables(77)
    assert mine is not None
    mine[1] = 3
    theirs = other.thread_variables(77)
    assert theirs is not None
    assert list(theirs) == [0, 3]
    other.forget_thread(77)
    fresh = one.thread_variables(77)
    assert fresh is not None
    assert list(fresh) == [0, 0]


def test_there_may_be_too_many_threads() -> None:
    state = state_of()
    found = [state.thread_variables(tid) for tid in range(1, 4200)]
    assert sum(each is not None for each in found) == 4096


def test_each_hit_is_drawn_once_whoever_draws() -> None:
    one = state_of()
    ways = [one, seen_by_another(one), seen_by_another(one)]
    drawn: list[list[bool | None]] = [[] for _ in ways]

    def draw(number: int) -> None:
        hits = ways[number].hits_of(5, limits(passcount=1000, maxhits=500))
        assert hits is not None
        drawn[number] = [hits.draw() for _ in range(2000)]

    threads = [threading.Thread(target=draw, args=(number,)) for number in range(len(ways))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = [*itertools.chain(*drawn)]
    assert [together.count(each) for each in (False, True, None)] == [1000, 500, 4500]


def test_a_hit_that_is_given_back_can_be_drawn_again() -> None:
    hits = state_of().hits_of(0, limits(maxhits=1))
    assert hits is not None
    assert (hits.draw(), hits.is_over, hits.draw()) == (True, True, None)
    hits.give_back()
    assert (hits.is_over, hits.draw()) == (False, True)


def test_nothing_is_drawn_where_there_is_no_limit() -> None:
    hits = state_of().hits_of(0, limits())
    assert hits is not None
    assert not hits.is_limited
    assert not hits.is_over
    hits.disable()
    assert hits.is_over


def test_a_probepoint_may_have_a_number_that_is_too_high() -> None:
    state = state_of()
    assert isinstance(state.hits_of(PROBES_MAX - 1, limits()), SharedHits)
    assert state.hits_of(PROBES_MAX, limits()) is None
