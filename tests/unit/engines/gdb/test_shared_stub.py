"""Sessions at one stub have its target stand still, each time they want it, and let it go on."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import pytest

from dprobes.engines.gdb.shared_stub import SharedStub
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable


class FakeTarget:
    """A target that stops when it is interrupted."""

    is_over = False

    def __init__(self) -> None:
        self.is_running = True
        self.interrupts = 0

    def interrupt(self) -> None:
        self.interrupts += 1
        self.is_running = False

    def resume(self, *_: object) -> None:
        self.is_running = True


class FakeMember:
    """A program that wants a stop now and then."""

    wants_stop = False
    due = math.inf


class FakeDriver:
    """What interrupts the target once for each request, as ``TargetDriver`` does."""

    has_asked = False

    def __init__(self, shared: SharedStub, target: FakeTarget) -> None:
        self._shared, self._target = shared, target

    def turn(self) -> bool:
        if self._shared.is_wanted and not self.has_asked:
            self.has_asked = True
            self._target.interrupt()
            self._shared.resume()
        return not self._target.is_running

    def forget_request(self) -> None:
        self.has_asked = False


class FakeConnection:
    """A connection to such a target."""

    warn: Callable[..., None]

    def __init__(self) -> None:
        self.target = FakeTarget()


@pytest.fixture
def shared() -> SharedStub:
    made: SharedStub = SharedStub(cast("Any", FakeConnection()))
    made.members.append(cast("Any", FakeMember()))
    made.driver = cast("Any", FakeDriver(made, cast("FakeTarget", made.target)))
    return made


def test_each_request_interrupts_the_target(shared: SharedStub) -> None:
    """Also if nobody has looked between two of them."""
    target = cast("FakeTarget", shared.target)
    for number in (1, 2, 3):
        with shared.standing_still():
            assert not target.is_running
        assert target.is_running
        assert target.interrupts == number


def test_the_target_goes_on_when_the_last_one_lets_it(shared: SharedStub) -> None:
    target = cast("FakeTarget", shared.target)
    with shared.standing_still():
        with shared.standing_still():
            pass
        assert not target.is_running
    assert target.is_running


def test_requests_of_many_threads_are_counted(shared: SharedStub) -> None:
    def hold() -> None:
        for _ in range(200):
            with shared.standing_still():
                pass

    threads = [threading.Thread(target=hold) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not shared.is_wanted
    assert shared.target.is_running


def test_a_target_that_has_ended_cannot_stand_still(shared: SharedStub) -> None:
    shared.is_over = True
    shared.target.stub = cast("Any", type("Stub", (), {"name": "tcp:1"}))
    with (
        pytest.raises(EngineError, match=r"what is behind the stub tcp:1 has ended"),
        shared.standing_still(),
    ):
        pass


def test_a_stop_is_awaited_until_a_member_wants_one(shared: SharedStub) -> None:
    member = cast("Any", shared.members[0])
    member.due = time.monotonic() + 3600
    assert shared.patience() == pytest.approx(0.1)
    member.due = time.monotonic() - 1
    assert shared.patience() == 0
    member.wants_stop = True
    assert shared.patience() == pytest.approx(0.1)
    shared.members.clear()
    assert shared.patience() == pytest.approx(0.1)
