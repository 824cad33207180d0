"""Calls are awaited where they return, by thread and by frame; what is forgotten needs no breakpoint any more."""

from __future__ import annotations

from typing import Any, cast

from dprobes.engines.gdb.remote_protocol import ThreadId
from dprobes.engines.gdb.stub_context import AwaitedReturns, CallEntry, PendingCall

ONE, OTHER = ThreadId(1, 10), ThreadId(1, 11)
ENTRY = CallEntry(5, {})


class Probe:
    """What stands for a probepoint."""


OUTER, INNER = cast("Any", Probe()), cast("Any", Probe())


def call(probe: Any, address: int, top: int, thread: ThreadId = ONE) -> PendingCall:
    return PendingCall(thread, address, top, probe, ENTRY)


def test_a_return_is_that_of_the_same_frame_and_thread() -> None:
    returns = AwaitedReturns(0)
    first, second = call(OUTER, 0x100, 0x8000), call(OUTER, 0x100, 0x7000)
    for each in (first, second, call(OUTER, 0x100, 0x8000, OTHER)):
        returns.enter(each)
    assert returns.addresses == {0x100}
    assert returns.arrive(ONE, 0x100, 0x7008) == []
    assert returns.arrive(ONE, 0x200, 0x7000) == []
    assert returns.arrive(ONE, 0x100, 0x7000) == [second]
    assert returns.arrive(ONE, 0x100, 0x7000) == []
    assert returns.arrive(ONE, 0x100, 0x8000) == [first]
    assert returns.addresses == {0x100}
    assert len(returns.arrive(OTHER, 0x100, 0x8000)) == 1
    assert returns.addresses == set()


def test_after_a_tail_call_both_functions_return_the_inner_one_first() -> None:
    returns = AwaitedReturns(0)
    outer, inner = call(OUTER, 0x100, 0x8000), call(INNER, 0x100, 0x8000)
    returns.enter(outer)
    returns.enter(inner)
    assert returns.arrive(ONE, 0x100, 0x8000) == [inner, outer]


def test_arguments_may_be_dropped_where_functions_do_that() -> None:
    returns = AwaitedReturns(255)
    returns.enter(call(OUTER, 0x100, 0x8000))
    assert len(returns.arrive(ONE, 0x100, 0x800C)) == 1
    wide = AwaitedReturns(0)
    wide.enter(call(OUTER, 0x100, 0x8000))
    assert wide.arrive(ONE, 0x100, 0x800C) == []


def test_a_call_that_never_returned_is_forgotten_when_its_frame_is_entered_again() -> None:
    returns = AwaitedReturns(0)
    returns.enter(call(OUTER, 0x100, 0x8000))
    returns.enter(call(OUTER, 0x200, 0x8000))
    assert returns.addresses == {0x200}


def test_calls_do_not_grow_without_end() -> None:
    returns = AwaitedReturns(0)
    for number in range(20000):
        returns.enter(call(OUTER, 0x100 + number, 0x8000 + number))
    assert len(returns.addresses) == 1 << 14
    assert min(returns.addresses) == 0x100 + 20000 - (1 << 14)


def test_a_probepoint_is_dropped_with_its_calls() -> None:
    returns = AwaitedReturns(0)
    returns.enter(call(OUTER, 0x100, 0x8000))
    returns.enter(call(INNER, 0x200, 0x7000))
    returns.drop(OUTER)
    assert returns.addresses == {0x200}
    returns.clear()
    assert returns.addresses == set()
