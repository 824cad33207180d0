"""The list of processes that are stopped for a core, and who of them goes on."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.core_stop_layout import COUNT, FIRST, STOP_SIZE, STOPS_MAX, STOPS_SIZE
from dprobes.engines.ebpf.read.stop_guard import CoreStops, StopGuard, await_stop, is_stop_pending, release
from integration.support import await_true, kernel_state

if TYPE_CHECKING:
    from collections.abc import Iterator


class ListOfStops:
    """What handlers write to the list."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("stops")
        os.ftruncate(self.descriptor, 2 * STOPS_SIZE)  # whole pages are mapped
        self.count = 0

    def note(self, pid: int, keeper: int = 0, ago: float = 0) -> None:
        stop = struct.pack("=IIQ", pid, keeper, time.monotonic_ns() - int(ago * 1e9))
        os.pwrite(self.descriptor, stop, FIRST + self.count % STOPS_MAX * STOP_SIZE)
        self.count += 1
        os.pwrite(self.descriptor, struct.pack("=Q", self.count), COUNT)


@pytest.fixture
def noted() -> Iterator[ListOfStops]:
    found = ListOfStops()
    yield found
    os.close(found.descriptor)


@pytest.fixture
def stops(noted: ListOfStops) -> Iterator[CoreStops]:
    with CoreStops(noted.descriptor) as found:
        yield found


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that was started before all stops, and is stopped."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        time.sleep(0.05)  # longer than the ticks in which a start is measured
        process.send_signal(signal.SIGSTOP)
        assert await_stop(process.pid)
        yield process.pid
        process.kill()


def test_a_process_goes_on_once(noted: ListOfStops, stops: CoreStops, sleeper: int) -> None:
    noted.note(sleeper)
    assert [stop.pid for stop in stops.waiting()] == [sleeper]
    stops.let_go_on(sleeper)
    await_true(lambda: kernel_state(sleeper) == "S", "its going on")
    assert stops.waiting() == []
    assert stops.has(sleeper)
    os.kill(sleeper, signal.SIGSTOP)
    await_true(lambda: kernel_state(sleeper) == "T", "the stop of somebody else")
    stops.let_go_on(sleeper)
    assert kernel_state(sleeper) == "T"


def test_a_process_that_is_not_in_the_list_is_left_alone(stops: CoreStops, sleeper: int) -> None:
    stops.let_go_on(sleeper)
    assert kernel_state(sleeper) == "T"
    assert not stops.has(sleeper)


def test_a_process_that_somebody_else_has_stopped_too_stays_stopped(
    noted: ListOfStops, stops: CoreStops, sleeper: int
) -> None:
    noted.note(sleeper)
    assert not is_stop_pending(sleeper)
    os.kill(sleeper, signal.SIGSTOP)
    assert is_stop_pending(sleeper)
    stops.let_go_on(sleeper)
    assert kernel_state(sleeper) == "T"
    assert stops.waiting() == []


def test_two_stops_of_ours_end_together(noted: ListOfStops, stops: CoreStops, sleeper: int) -> None:
    noted.note(sleeper)
    noted.note(sleeper)
    os.kill(sleeper, signal.SIGSTOP)
    stops.let_go_on(sleeper)
    await_true(lambda: kernel_state(sleeper) == "S", "its going on")
    assert stops.waiting() == []


def test_a_process_that_was_started_after_the_stop_is_another_one(
    noted: ListOfStops, stops: CoreStops, sleeper: int
) -> None:
    noted.note(sleeper, ago=60)
    assert stops.waiting() == []
    stops.let_go_on(sleeper)
    assert kernel_state(sleeper) == "T"


def test_a_process_that_is_gone_does_not_wait(noted: ListOfStops, stops: CoreStops) -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    noted.note(process.pid)
    assert stops.waiting() == []


def test_nobody_has_heard_of_a_stop(noted: ListOfStops, stops: CoreStops, sleeper: int) -> None:
    noted.note(sleeper)
    assert stops.unheard(60) == []
    assert stops.unheard(0) == [sleeper]
    stops.entrust(sleeper, os.getpid())
    assert stops.unheard(0) == []
    assert [stop.keeper for stop in stops.waiting()] == [os.getpid()]


def test_the_places_are_used_again(noted: ListOfStops, stops: CoreStops, sleeper: int) -> None:
    for _ in range(STOPS_MAX):
        noted.note(1 << 22, 1)
    noted.note(sleeper)
    (stop,) = stops.waiting()
    assert (stop.place, stop.pid) == (0, sleeper)


def test_who_is_to_write_a_core_and_is_gone_keeps_nobody(noted: ListOfStops, stops: CoreStops, sleeper: int) -> None:
    with subprocess.Popen(["true"]) as writer:
        pass
    noted.note(sleeper, writer.pid)
    release(stops)
    await_true(lambda: kernel_state(sleeper) == "S", "its going on")


def test_the_guard_releases_at_its_end(noted: ListOfStops, sleeper: int) -> None:
    guard = StopGuard(noted.descriptor)
    noted.note(sleeper)
    guard.close()
    await_true(lambda: kernel_state(sleeper) == "S", "its going on")


def test_a_guard_that_has_ended_is_started_anew(noted: ListOfStops, sleeper: int) -> None:
    guard = StopGuard(noted.descriptor)
    assert not guard.look()
    first = guard.pid
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert guard.look()
    assert guard.pid != first
    noted.note(sleeper)
    guard.close()
    await_true(lambda: kernel_state(sleeper) == "S", "its going on")
