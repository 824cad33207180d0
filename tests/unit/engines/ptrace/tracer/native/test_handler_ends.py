"""Threads are held at a moment in which none is in a handler: those outside wait for the others, but not for long."""

from __future__ import annotations

import itertools
import signal
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.native import handler_ends
from dprobes.engines.ptrace.tracer.native.handler_ends import HandlerEnds
from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadState, ThreadTable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.ptrace.tracer.tracer_state import TracerState


class Tracer:
    """A tracer of two threads; ``inside`` says how often each is found in a handler."""

    def __init__(self, inside: dict[int, int]) -> None:
        self.inside = inside
        self.looks: list[int] = []
        self.handled = 0
        self.threads = ThreadTable()
        self.space = AddressSpace.closed(8)
        self.first, self.second = (self.threads.enter(tid, 7, self.space) for tid in (7, 8))
        stopper = Stopper(self.threads, lambda _: None, lambda _: None)
        vars(stopper).update(stop=self.stop, release=self.release)
        state = SimpleNamespace(connection=None, threads=self.threads)
        self.ends = HandlerEnds(cast("TracerState", state), stopper)

    def stop(self, threads: Iterable[Thread]) -> list[Thread]:
        running = [thread for thread in threads if thread.state is ThreadState.RUNNING]
        for thread in running:
            thread.state = ThreadState.STOPPED
        return running

    def release(self, thread: Thread) -> None:
        assert thread.state is ThreadState.STOPPED
        thread.state = ThreadState.RUNNING

    def is_outside(self, space: AddressSpace, thread: Thread) -> bool:
        assert space is self.space
        self.looks.append(thread.tid)
        self.inside[thread.tid] -= 1
        return self.inside[thread.tid] < 0

    def go_on(self) -> int:
        self.handled += 1
        return 1

    def hold(self) -> list[Thread] | None:
        return self.ends.hold_outside([self.space], self.go_on)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each look at the clock find a hundredth of a second gone."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks) / 100)
    monkeypatch.setattr(signal, "sigtimedwait", lambda *_: None)


def tracer_of(monkeypatch: pytest.MonkeyPatch, first: int, second: int) -> Tracer:
    tracer = Tracer({7: first, 8: second})
    monkeypatch.setattr(handler_ends, "is_outside", tracer.is_outside)
    return tracer


@pytest.mark.usefixtures("clock")
def test_threads_outside_of_handlers_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = tracer_of(monkeypatch, 0, 0)
    assert tracer.hold() == [tracer.first, tracer.second]
    assert tracer.looks == [7, 8]
    assert not tracer.handled


@pytest.mark.usefixtures("clock")
def test_who_is_outside_is_held_until_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = tracer_of(monkeypatch, 0, 2)
    assert tracer.hold() == [tracer.first, tracer.second]
    assert tracer.looks == [7, 8, 8, 8]
    assert tracer.handled == 2
    assert tracer.first.state is tracer.second.state is ThreadState.STOPPED


@pytest.mark.usefixtures("clock")
def test_all_are_let_run_if_one_never_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = tracer_of(monkeypatch, 0, 1000)
    assert tracer.hold() is None
    assert tracer.first.state is tracer.second.state is ThreadState.RUNNING
    assert tracer.handled > 2


@pytest.mark.usefixtures("clock")
def test_one_that_has_stopped_in_its_handler_for_something_else_is_not_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracer = tracer_of(monkeypatch, 0, 1)
    tracer.second.state = ThreadState.STOPPED  # go_on() sees to that
    assert tracer.hold() == [tracer.first]
    assert tracer.second.state is ThreadState.STOPPED
