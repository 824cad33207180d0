"""What is counted has been taken when it is told: a session whose records and states come late."""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING, Any, cast

from dprobes.engines.engine_interface import Begun, Counts, Finished, Pause, RecordBatch, Stop
from dprobes.rpn.rpn_program import Program
from dprobes.runs.followed_program import FollowedProgram, settled_counts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.engine_interface import Attachment, Change, Event

AT_ONCE = -1.0
"""A time that is over."""


class LateSession:
    """Count ``records``, and give out those that ``arrive`` was called for when it is woken up."""

    probes = ()

    def __init__(self) -> None:
        self.records = 0
        self._arrived = 0
        self._wishes: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def arrive(self, count: int) -> None:
        self._arrived += count

    def counts(self) -> tuple[Counts, ...]:
        return (Counts(self.records, self.records),)

    def wake(self) -> None:
        self._wishes.put(True)

    def change(self, changes: Sequence[Change]) -> None:
        assert list(changes) == [Stop()]
        self._wishes.put(False)

    def poll(self) -> Iterator[Event]:
        yield Begun()
        while self._wishes.get():
            count, self._arrived = self._arrived, 0
            if count:
                yield RecordBatch([(0, b"")] * count)
            yield Pause()
        yield Finished(self.counts())

    def close(self) -> None:
        pass


class Taker(FollowedProgram):
    def __init__(self, session: LateSession) -> None:
        super().__init__("late", Program("late"), cast("Attachment", session))
        self.records = 0
        self.start(10)

    def take_records(self, records: Sequence[tuple[int, bytes]]) -> None:
        self.records += len(records)

    def take_end(self, lost: int) -> None:
        pass


def settled(taker: Taker, until: float) -> tuple[Any, int]:
    ((counts, pending),) = settled_counts([taker], until)
    return counts, pending


def test_counts_wait_for_the_records_that_they_count() -> None:
    session = LateSession()
    taker = Taker(session)
    session.records = 3
    session.arrive(3)
    assert settled(taker, time.monotonic() + 60) == ((Counts(3, 3),), 0)
    assert taker.records == 3
    taker.stop()
    assert taker.wait()


def test_what_does_not_come_is_pending() -> None:
    session = LateSession()
    taker = Taker(session)
    session.records = 5
    session.arrive(2)
    until = time.monotonic() + 0.2
    assert settled(taker, until) == ((Counts(5, 5),), 3)
    assert taker.records == 2
    assert time.monotonic() >= until
    taker.stop()
    assert taker.wait()
    assert settled(taker, AT_ONCE) == ((Counts(5, 5),), 0)


def test_records_that_are_given_up_are_not_waited_for() -> None:
    session = LateSession()
    taker = Taker(session)

    class Fewer:
        """Count a record of an instruction that turns out to have faulted."""

        looks = 0

        def __call__(self) -> tuple[Counts, ...]:
            self.looks += 1
            return (Counts(4, 4 if self.looks == 1 else 3),)

    session.counts = Fewer()  # type: ignore[method-assign]
    session.arrive(3)
    assert settled(taker, time.monotonic() + 60) == ((Counts(4, 3),), 0)
    taker.stop()
    assert taker.wait()


def test_several_programs_are_waited_for_together() -> None:
    sessions = [LateSession() for _ in range(50)]
    takers = [Taker(session) for session in sessions]
    for number, session in enumerate(sessions):
        session.records = number
        session.arrive(number)
    found = settled_counts(takers, time.monotonic() + 60)
    assert found == [((Counts(number, number),), 0) for number in range(50)]
    assert [taker.records for taker in takers] == list(range(50))
    for taker in takers:
        taker.stop()
    assert all(taker.wait() for taker in takers)
