"""A thread that has mapped code waits for its jumps, but not for ever, and not where there is nothing to wait for."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.native.handler_ends import JumpWaits
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadState, ThreadTable

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper

PLACE = 0x1000


class Tracer:
    """
    A tracer of one thread, whose space has a breakpoint that is not written.

    ``now`` is the time, ``work`` the processor time of the client.
    """

    def __init__(self) -> None:
        self.released: list[Thread] = []
        self.threads = ThreadTable()
        self.thread = self.threads[7] = Thread(7, 7, AddressSpace.closed(8), ThreadState.STOPPED)
        self.thread.space.unwritten.add(PLACE)
        waits = SimpleNamespace(hide_interruption=lambda _: None)
        self.deferred: dict[int, int] = {}
        stopper = SimpleNamespace(release=self.released.append, waits=waits, deferred=self.deferred)
        self.waits = JumpWaits(self.threads, cast("Stopper", stopper), client=9)
        self.now = 100.0
        self.work = 5.0


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    made = Tracer()
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: made.work if clock == ~9 << 3 | 2 else 0.0)
    return made


def test_a_thread_waits_until_its_jumps_are_there(tracer: Tracer) -> None:
    assert tracer.waits.look_after() is None
    tracer.waits.begin(tracer.thread)
    assert tracer.waits.take(tracer.thread)
    assert tracer.waits.look_after() == pytest.approx(10.0)
    tracer.thread.space.unwritten.clear()
    assert tracer.waits.look_after() is None
    assert tracer.released == [tracer.thread]
    assert not tracer.thread.awaits_jumps


def test_breakpoints_are_written_if_none_come(tracer: Tracer) -> None:
    tracer.waits.begin(tracer.thread)
    assert tracer.waits.take(tracer.thread)
    tracer.now += 9.5
    assert tracer.waits.look_after() == pytest.approx(0.5)
    tracer.now += 0.6
    assert tracer.waits.look_after() is None
    assert tracer.released == [tracer.thread]
    assert tracer.thread.space.unwritten == set()


def test_a_thread_waits_for_a_client_that_has_little_of_a_processor(tracer: Tracer) -> None:
    tracer.waits.begin(tracer.thread)
    assert tracer.waits.take(tracer.thread)
    for _ in range(9):
        tracer.now, tracer.work = tracer.now + 10.5, tracer.work + 1.0
        assert tracer.waits.look_after() == pytest.approx(10.0)
    tracer.now, tracer.work = tracer.now + 10.5, tracer.work + 1.0
    assert tracer.waits.look_after() is None  # it has had ten seconds of it
    assert tracer.released == [tracer.thread]


def test_a_thread_that_has_not_stopped_yet_is_not_let_run(tracer: Tracer) -> None:
    tracer.waits.begin(tracer.thread)
    tracer.thread.space.unwritten.clear()
    assert tracer.waits.look_after() is None
    assert tracer.released == []
    assert not tracer.waits.take(tracer.thread)


def test_nobody_waits_without_a_reason(tracer: Tracer) -> None:
    tracer.thread.space.unwritten.clear()
    tracer.waits.begin(tracer.thread)
    assert not tracer.waits.take(tracer.thread)
    tracer.thread.space.unwritten.add(PLACE)
    tracer.thread.space.shared_with.add(8)  # its parent waits for it (vfork)
    tracer.waits.begin(tracer.thread)
    assert not tracer.waits.take(tracer.thread)


def test_a_thread_that_has_been_killed_is_forgotten(tracer: Tracer) -> None:
    tracer.waits.begin(tracer.thread)
    assert tracer.waits.take(tracer.thread)
    del tracer.threads[7]
    assert tracer.waits.look_after() is None
    assert tracer.released == []


def test_all_threads_of_a_process_wait_for_a_short_time(tracer: Tracer) -> None:
    other = tracer.threads.enter(8, 7, tracer.thread.space)
    other.state = ThreadState.STOPPED
    tracer.waits.hold(tracer.thread.space, [tracer.thread, other])
    assert tracer.waits.holds(tracer.thread)
    assert tracer.waits.holds(other)
    assert tracer.waits.look_after() == pytest.approx(0.5)
    tracer.now += 0.6
    assert tracer.waits.look_after() is None
    assert tracer.released == [tracer.thread, other]
    assert tracer.thread.space.unwritten == set()
    assert not tracer.waits.holds(other)


def test_one_that_has_stopped_for_something_else_waits_when_that_is_handled(tracer: Tracer) -> None:
    other = tracer.threads.enter(8, 7, tracer.thread.space)
    tracer.deferred[8] = 0x57F
    tracer.waits.hold(tracer.thread.space, [tracer.thread])
    assert other.awaits_jumps
    assert not tracer.waits.holds(other)
    del tracer.deferred[8]
    other.state = ThreadState.STOPPED
    assert tracer.waits.take(other)
    tracer.thread.space.unwritten.clear()
    assert tracer.waits.look_after() is None
    assert tracer.released == [tracer.thread, other]


def test_one_that_begins_meanwhile_waits_as_well(tracer: Tracer) -> None:
    tracer.waits.hold(tracer.thread.space, [tracer.thread])
    born = tracer.threads.enter(8, 7, tracer.thread.space)
    born.state = ThreadState.STOPPED
    assert tracer.waits.take(born)
    tracer.thread.space.unwritten.clear()
    assert tracer.waits.look_after() is None
    assert tracer.released == [tracer.thread, born]
    assert not tracer.waits.take(tracer.threads.enter(9, 7, tracer.thread.space))


def test_breakpoints_are_written_at_once_if_a_thread_can_run_on(tracer: Tracer) -> None:
    tracer.threads.enter(8, 7, tracer.thread.space)
    tracer.waits.hold(tracer.thread.space, [tracer.thread])
    assert tracer.thread.space.unwritten == set()
    assert not tracer.waits.holds(tracer.thread)
    assert tracer.waits.look_after() is None


def test_who_waits_already_does_not_wait_longer_for_another_change(tracer: Tracer) -> None:
    tracer.waits.hold(tracer.thread.space, [tracer.thread])
    tracer.now += 0.4
    tracer.waits.hold(tracer.thread.space, [])
    assert tracer.waits.look_after() == pytest.approx(0.1)
