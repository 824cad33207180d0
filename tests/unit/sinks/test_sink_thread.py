"""Log targets: what they make of failures, and of other targets that come and go."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.errors import FormatError, RecordsRefusedError, SinkError
from dprobes.sinks import Batch, SinkOptions, target_kinds
from dprobes.sinks.sink_thread import LogTarget, LogTargets, close_all
from dprobes.sinks.target_kinds import LogTargetName, SinkKind, parse_target
from unit.sinks.records import OTHER, PLACE, SOURCE, batch, record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dprobes.record.record_origin import RecordSource


def await_true(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


class Receiver:
    """Take what sinks write, and make them fail; each opening of a sink writes to the same lists."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.taken: list[bytes] = []
        self.lost = 0
        self.failures: list[Exception] = []
        self.gate = threading.Event()
        self.gate.set()

    def open(self, argument: str = "", options: SinkOptions | None = None) -> Receiver:
        self.told.append("open")
        return self

    def create_event(self, source: RecordSource) -> None:
        self.told.append(f"create {source.name}")

    def log_events(self, batch: Batch) -> None:
        self.gate.wait()
        if self.failures:
            failure = self.failures.pop()
            if isinstance(failure, SinkError):
                self.taken += batch.records[: failure.taken]
            raise failure
        self.lost += batch.lost
        self.taken += batch.records

    def destroy_event(self, source: RecordSource) -> None:
        self.told.append(f"destroy {source.name}")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.told.append("close")


def test_a_file_is_appended_to_and_only_with_the_programs_records(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    target = LogTarget(str(path), lambda: parse_target(str(path)).open(SinkOptions()), module="app")
    target.create([SOURCE, OTHER])
    target.put(batch(1, 2))
    target.put(batch(3, source=OTHER))
    status = target.close()
    assert (status.written, status.lost, status.problem) == (2, 0, None)
    assert path.read_text() == "before\nmain  01 02\nmain  01 02\n"


def test_a_target_that_blocks_holds_nobody_up_and_counts_what_it_loses() -> None:
    receiver = Receiver()
    receiver.gate.clear()
    target = LogTarget("blocked", receiver.open)
    for _ in range(70):
        target.put(batch(*[1] * 1000))
    status = target.status()
    assert (status.written, status.waiting, status.lost) == (0, 65_536, 70_000 - 65_536)
    receiver.gate.set()
    await_true(lambda: target.status().waiting == 0)
    target.put(batch(2))
    assert target.close().lost == 70_000 - 65_536
    assert len(receiver.taken) == 65_537
    assert receiver.lost == 70_000 - 65_536


def test_a_sink_that_fails_is_opened_again_and_gets_what_it_had_not_taken() -> None:
    receiver = Receiver()
    problems: list[str] = []
    target = LogTarget("broken", receiver.open, on_problem=problems.append)
    target.create([SOURCE])
    await_true(lambda: len(receiver.told) == 2)
    receiver.failures.append(SinkError("it is broken", taken=2))
    target.put(batch(1, 2, 3))
    await_true(lambda: target.status().problem is not None)
    assert target.status().problem == "it is broken"
    assert (target.status().written, target.status().waiting) == (2, 1)
    target.put(batch(4))
    await_true(lambda: target.status().written == 4)
    status = target.close()
    assert (status.lost, status.problem) == (0, None)
    assert receiver.taken == [record(n) for n in (1, 2, 3, 4)]
    assert receiver.told == ["open", "create app", "close", "open", "create app", "close"]
    assert problems == ["it is broken"]


def test_what_a_plug_in_cannot_take_is_lost_and_the_rest_goes_on() -> None:
    receiver = Receiver()
    target = LogTarget("plug-in", receiver.open)
    receiver.failures.append(ZeroDivisionError("division by zero"))
    target.put(batch(1, 2))
    await_true(lambda: target.status().problem is not None)
    assert target.status().problem == "ZeroDivisionError: division by zero"
    target.put(batch(3))
    await_true(lambda: target.status().written == 1)
    assert receiver.taken == [record(3)]
    assert target.close().lost == 2


def test_a_sink_that_fails_at_the_end_is_tried_until_the_patience_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dprobes.sinks.sink_backlog._RETRY", 0.01)
    receiver = Receiver()
    target = LogTarget("broken", receiver.open)
    receiver.gate.clear()
    receiver.failures.extend([SinkError("it is broken")] * 10)
    target.put(batch(1))
    target.finish()
    receiver.gate.set()
    status = target.close(patience=60)
    assert (status.written, status.lost, status.problem) == (1, 0, None)


def test_a_sink_that_stays_broken_at_the_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dprobes.sinks.sink_backlog._RETRY", 0.01)
    receiver = Receiver()
    target = LogTarget("broken", receiver.open)
    receiver.failures.extend([SinkError("it is broken")] * 100_000)
    target.put(batch(1))
    status = target.close(patience=0.5)
    assert (status.written, status.lost, status.problem) == (0, 1, "it is broken")
    assert len(receiver.failures) < 100_000 - 5


def test_a_sink_that_comes_back_for_a_moment_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dprobes.sinks.sink_backlog._RETRY", 0.2)
    receiver = Receiver()
    target = LogTarget("broken", receiver.open)
    receiver.gate.clear()
    receiver.failures.extend([SinkError("it is broken", taken=1)] * 1000)
    target.put(batch(*[1] * 1000))
    receiver.gate.set()
    status = target.close(patience=0.5)
    assert status.lost > 0
    assert status.written + status.lost == 1000


def test_a_broken_sink_that_nothing_waits_for_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dprobes.sinks.sink_backlog._RETRY", 20)
    receiver = Receiver()
    target = LogTarget("broken", receiver.open)
    target.create([SOURCE])
    receiver.failures.append(SinkError("it has gone", taken=1))
    target.put(batch(1))
    await_true(lambda: target.status().problem is not None)

    def fail() -> Receiver:
        raise SinkError("it has gone for good")

    target._open = fail
    target.destroy(SOURCE)
    begun = time.monotonic()
    status = target.close(patience=60)
    assert time.monotonic() - begun < 30
    assert (status.written, status.lost, status.problem) == (1, 0, "it has gone for good")


def test_refused_records_are_lost_and_the_sink_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dprobes.sinks.sink_backlog._RETRY", 1000)  # whoever waits would wait for long

    class Picky(Receiver):
        def log_events(self, batch: Batch) -> None:
            super().log_events(batch)
            raise RecordsRefusedError("it wants other records", lost=1)

        def flush(self) -> None:
            if len(self.taken) == 4:
                raise RecordsRefusedError("it is full", lost=1)

    receiver = Picky()
    problems: list[str] = []
    target = LogTarget("picky", receiver.open, on_problem=problems.append)
    target.create([SOURCE])
    for number in (1, 2):
        target.put(batch(number, number))
        await_true(lambda n=number: target.status().waiting == 0 and len(receiver.taken) == 2 * n)  # type: ignore[misc]
    status = target.close()
    assert (status.written, status.lost, status.problem) == (1, 3, "it is full")
    assert receiver.told == ["open", "create app", "close"]
    assert problems == ["it wants other records", "it is full"]


def test_what_a_sink_has_not_taken_out_of_the_middle_comes_again() -> None:
    receiver = Receiver()
    target = LogTarget("broken", receiver.open)
    receiver.failures.append(SinkError("it is broken", taken=2, left=[1, 3]))
    target.put(batch(1, 2, 3, 4))
    status = target.close()
    assert (status.written, status.lost, status.problem) == (4, 0, None)
    assert receiver.taken == [record(n) for n in (1, 2, 2, 4)]  # the first two are what this receiver keeps


def test_a_sink_that_asks_to_be_left_alone_is() -> None:
    receiver = Receiver()
    target = LogTarget("busy", receiver.open)
    receiver.failures.append(SinkError("it is busy", wait=3000))
    target.put(batch(1))
    await_true(lambda: target.status().problem is not None)
    status = target.close(patience=0.2)
    assert (status.written, status.lost, receiver.told) == (0, 1, ["open", "close"])


def test_records_that_come_one_by_one_are_handed_over_together() -> None:
    sizes = []

    class Counting(Receiver):
        def log_events(self, batch: Batch) -> None:
            super().log_events(batch)
            sizes.append(len(batch.records))

    receiver = Counting()
    receiver.gate.clear()
    target = LogTarget("slow", receiver.open)
    for _ in range(200):
        target.put(batch(1))
    receiver.gate.set()
    assert target.close().written == 200
    assert len(sizes) < 10


def test_what_turns_out_to_be_lost_later_is_no_longer_counted_as_written() -> None:
    receiver = Receiver()
    target = LogTarget("broken", receiver.open)
    target.put(batch(1, 2, 3))
    await_true(lambda: target.status().written == 3)
    receiver.failures.append(SinkError("it has died", taken=1, lost=2))
    target.put(batch(4, 5))
    await_true(lambda: target.status().problem == "it has died")
    status = target.status()
    assert (status.written, status.waiting, status.lost) == (2, 1, 2)
    status = target.close()
    assert (status.written, status.waiting, status.lost) == (3, 0, 2)


@pytest.mark.parametrize("failure", [FormatError("no record"), SystemExit("enough"), KeyError(1)])
def test_what_would_fail_again_does_not_hold_up_the_rest(failure: Exception) -> None:
    receiver = Receiver()
    target = LogTarget("plug-in", receiver.open)
    receiver.failures.append(failure)
    target.put(batch(1))
    await_true(lambda: target.status().problem is not None)
    target.put(batch(2))
    status = target.close()
    assert (status.written, status.lost) == (1, 1)
    assert receiver.taken == [record(2)]


def test_what_cannot_be_opened_again_keeps_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dprobes.sinks.sink_backlog._RETRY", 0.01)
    receiver = Receiver()
    fails = threading.Event()
    tries = 0

    def open_sink() -> Receiver:
        nonlocal tries
        tries += 1
        if fails.is_set():
            raise ZeroDivisionError("a plug-in's mistake")
        return receiver

    target = LogTarget("plug-in", open_sink)
    fails.set()
    receiver.failures.append(SinkError("it is broken"))
    target.put(batch(1, 2))
    await_true(lambda: tries > 4)
    assert target.status().problem == "ZeroDivisionError: a plug-in's mistake"
    assert (target.status().waiting, target.status().lost) == (2, 0)
    fails.clear()
    assert target.close().written == 2


def test_a_problem_that_comes_and_goes_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dprobes.sinks.sink_backlog._RETRY", 0.001)
    receiver = Receiver()
    problems: list[str] = []
    target = LogTarget("broken", receiver.open, on_problem=problems.append)
    for n in range(20):
        receiver.failures.append(SinkError("it is broken"))
        target.put(batch(n))
        await_true(lambda n=n: target.status().written == n + 1)  # type: ignore[misc]
    receiver.failures.append(SinkError("it is on fire"))
    target.put(batch(1))
    assert target.close().lost == 0
    assert problems == ["it is broken", "it is on fire"]


def test_at_the_end_it_is_waited_as_long_as_the_sink_takes_something() -> None:
    class Slow(Receiver):
        def log_events(self, batch: Batch) -> None:
            time.sleep(0.01 * len(batch.records))
            super().log_events(batch)

    receiver = Slow()
    target = LogTarget("slow", receiver.open)
    said: list[str] = []
    target.put(batch(*range(400)))  # 4 s, with patience for 2
    status = target.close(patience=2, on_wait=lambda status: said.append(status.name))
    assert (status.written, status.waiting, status.lost, said) == (400, 0, 0, ["slow"])
    assert receiver.taken == [record(n) for n in range(400)]


@pytest.mark.parametrize("limits", [{"patience": 0.2}, {"limit": 0.2}])
def test_a_sink_that_hangs_is_not_waited_for(limits: dict[str, Any]) -> None:
    receiver = Receiver()
    receiver.gate.clear()
    target = LogTarget("hanging", receiver.open)
    target.put(batch(1, 2, 3))
    status = target.close(**limits)
    assert (status.written, status.waiting, status.lost) == (0, 0, 3)
    receiver.gate.set()
    target._thread.join(20)
    assert not target._thread.is_alive()
    assert (target.status().written, target.status().lost) == (0, 3)  # said is said


def test_targets_that_are_closed_share_the_time_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limits = 100.0, list[float | None]()

    def close(target: LogTarget, patience: float = 0, limit: float | None = None, on_wait: object = None) -> None:
        nonlocal now
        limits.append(limit)
        now += 2

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(LogTarget, "close", close)
    both = [LogTarget(name, Receiver().open) for name in ("one", "two")]
    statuses = close_all(both, limit=5)
    for target in both:
        target._thread.join(20)
    assert (limits, [status.name for status in statuses]) == ([5, 3], ["one", "two"])


def test_an_interrupt_gives_up_what_waits(
    two: tuple[LogTargets, Receiver, Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    targets, first, _ = two
    first.gate.clear()
    targets.add(name("first"), None, SinkOptions())
    targets.add(name("second"), None, SinkOptions())
    targets.create_event(SOURCE)
    targets.log_events(batch(1, 2))

    def interrupt(status: object) -> None:
        raise KeyboardInterrupt

    statuses = targets.close(on_wait=interrupt)
    assert [(status.name, status.written, status.lost) for status in statuses] == [("first", 0, 2), ("second", 2, 0)]
    first.gate.set()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> tuple[LogTargets, Receiver, Receiver]:
    first, second = Receiver(), Receiver()
    receivers = {"first": first, "second": second}
    monkeypatch.setattr(target_kinds, "_opener", lambda kind: receivers[kind.name].open)
    return LogTargets(), first, second


def name(text: str) -> LogTargetName:
    return LogTargetName(SinkKind(text, text, "a test", "none"), "")


def test_a_late_target_is_told_of_what_is_active_and_the_others_lose_and_double_nothing(
    two: tuple[LogTargets, Receiver, Receiver],
) -> None:
    targets, first, second = two
    options = SinkOptions()
    assert targets.add(name("first"), None, options)
    assert not targets.add(name("first"), None, options)
    targets.create_event(SOURCE)
    targets.create_event(OTHER)
    targets.create_event(replace(OTHER, build_ids=("12ab",)))
    sent = 0
    stop = threading.Event()

    def send() -> None:
        nonlocal sent
        while not stop.is_set() or sent < 100:
            targets.log_events(Batch(SOURCE, [record(1, sent.to_bytes(4, "little"))], [PLACE], 0))
            sent += 1
            time.sleep(0)

    sender = threading.Thread(target=send)
    sender.start()
    for _ in range(50):
        assert targets.add(name("second"), None, options)
        (taken,) = targets.take("second", None)
        taken.close()
    targets.destroy_event(OTHER)
    assert targets.add(name("second"), None, options)
    stop.set()
    sender.join()
    statuses = targets.close()
    assert [status.lost for status in statuses] == [0, 0]
    assert first.told == ["open", "create app", "create other", "create other", "destroy other", "close"]
    assert first.taken == [record(1, n.to_bytes(4, "little")) for n in range(sent)]
    assert second.told[:4] == ["open", "create app", "create other", "close"]
    assert second.told[-3:] == ["open", "create app", "close"]
    numbers = [int.from_bytes(each[-4:], "little") for each in second.taken]
    assert numbers == sorted(set(numbers))


def test_targets_of_one_program_go_with_it(two: tuple[LogTargets, Receiver, Receiver]) -> None:
    targets, first, second = two
    targets.add(name("first"), "app", SinkOptions())
    targets.add(name("second"), None, SinkOptions())
    targets.create_event(SOURCE)
    targets.create_event(OTHER)
    targets.log_events(batch(1))
    targets.log_events(batch(2, source=OTHER))
    assert [target.close().written for target in targets.take_of("app")] == [1]
    assert targets.names() == ["second"]
    assert [status.written for status in targets.close()] == [2]
    assert first.taken == [record(1)]
    assert second.told == ["open", "create app", "create other", "close"]


def test_a_target_that_takes_no_tables_says_so_once() -> None:
    receiver = Receiver()
    problems: list[str] = []
    target = LogTarget("plain", receiver.open, on_problem=problems.append)
    for _ in range(3):
        target.put_tables(SOURCE, [])
    assert target.close().problem is None
    assert problems == ["it takes no keyed tables; a trace file ('-o FILE.dpt') keeps them"]
