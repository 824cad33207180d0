"""When a run ends, and what is said of one that ended before there was anything to say of its probepoints."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from dprobes.cli.console import Progress
from dprobes.cli.output.run_summary import SummaryOptions
from dprobes.cli.runs.early_interrupt import EarlyInterrupt
from dprobes.cli.runs.run_follower import Run
from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import Begun, Finished, Scope, StateEvent, Stop
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.engines.engine_interface import Attachment, Change, Event


class EmptySession:
    """A session of a program whose module no process has mapped; SIGINT comes after so many events."""

    probes = ()
    left_out = ()
    is_debugging = False

    def __init__(self, interrupted_after: int, *before: Event) -> None:
        self._before = before
        self.mapped_files: dict[str, str] = {}
        self._interrupted_after = interrupted_after
        self.is_stopped = False

    def poll(self) -> Iterator[Event]:
        events: tuple[Event, ...] = *self._before, Begun(), Finished((), None)
        for number, event in enumerate(events):
            if number == self._interrupted_after:
                os.kill(os.getpid(), signal.SIGINT)
                assert self.is_stopped
            yield event

    def change(self, changes: Sequence[Change]) -> None:
        assert list(changes) == [Stop()]
        self.is_stopped = True

    def hurry(self) -> bool:
        return False


class NoOutputs:
    """Outputs of no records."""

    is_holding = False
    is_waiting = False
    problem = None

    def flush(self, *, is_last: bool = False) -> int:
        return 0

    def give_up(self) -> bool:
        return False


SUMMARY = SummaryOptions("ptrace")


def conclusion_of(session: EmptySession, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit status of a run, and the last line of what it says."""
    program = parse_source(SourceFile("p.rpn", 'name = "libm.so.6"\noffset = 1\nexit\n'), Diagnostics())
    outputs = cast("Any", NoOutputs())
    run = Run(program, cast("Attachment", session), outputs, Scope(pid=1), Progress(), SUMMARY, exit_status=False)
    status = run.conclude(run.follow(EarlyInterrupt(deferred=False)))
    return status, capsys.readouterr().err.splitlines()[-1]


def test_a_run_that_ctrl_c_ends_before_it_has_begun_says_nothing_of_what_was_mapped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = "dprobes: note: the run was ended before a probepoint was inserted"
    assert conclusion_of(EmptySession(interrupted_after=0), capsys) == (0, expected)


def test_later_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    expected = "dprobes: error: no probepoint was inserted: no process mapped 'libm.so.6' as code"
    assert conclusion_of(EmptySession(interrupted_after=1), capsys) == (1, expected)


def test_a_run_that_has_met_a_conflict_is_not_early(capsys: pytest.CaptureFixture[str]) -> None:
    conflict = StateEvent((0,), os.getpid(), ProbeState.CONFLICT, "other code is there")
    expected = "dprobes: error: no probepoint was inserted: no process mapped 'libm.so.6' as code"
    assert conclusion_of(EmptySession(1, conflict), capsys) == (1, expected)


class LastingSession:
    """A session with probepoints that goes on until it is told to end; ``early`` and ``late`` are what it gives out."""

    left_out = ()
    is_debugging = False

    def __init__(self, probes: Sequence[int], early: Iterable[Event], late: Iterable[Event] = ()) -> None:
        self.probes = [SimpleNamespace(number=number, never_returns=False) for number in probes]
        self.mapped_files: dict[str, str] = {}
        self._early = early
        self._late = late
        self.has_begun = threading.Event()
        self._goes_on = threading.Event()
        self.is_stopped = threading.Event()

    def go_on(self) -> None:
        self._goes_on.set()

    def poll(self) -> Iterator[Event]:
        yield from self._early
        self.has_begun.set()
        assert self._goes_on.wait(60)
        yield from self._late
        assert self.is_stopped.wait(60)
        yield Finished((), None)

    def change(self, changes: Sequence[Change]) -> None:
        assert list(changes) == [Stop()]
        self.is_stopped.set()

    def hurry(self) -> bool:
        return False


def run_of(session: LastingSession, scope: Scope, source: str = "", duration: float | None = None) -> Run:
    text = source or 'name = "libm.so.6"\noffset = 1\nexit\n'
    program = parse_source(SourceFile("p.rpn", text), Diagnostics())
    outputs, given = cast("Any", NoOutputs()), cast("Attachment", session)
    return Run(program, given, outputs, scope, Progress(), SUMMARY, exit_status=False, duration=duration)


ACTIVE = StateEvent((0,), 0, ProbeState.ACTIVE)
TWO = 'name = "libm.so.6"\noffset = 1\nexit\noffset = 2\nexit\n'


def test_the_time_of_a_run_counts_from_when_its_probepoints_are_in() -> None:
    session = LastingSession([0], (), (ACTIVE, Begun()))
    run = run_of(session, Scope(pid=1), duration=0.001)
    is_stopped: list[bool] = []

    def go_on() -> None:
        session.has_begun.wait(60)
        is_stopped.append(session.is_stopped.wait(0.1))
        session.go_on()

    thread = threading.Thread(target=go_on)
    thread.start()
    run.follow(EarlyInterrupt(deferred=False))
    thread.join(60)
    assert is_stopped == [False]
    assert run.is_over_in_time


def test_the_time_of_a_command_counts_from_its_first_probepoint() -> None:
    session = LastingSession([0], (Begun(),), (ACTIVE,))
    session.go_on()
    run = run_of(session, Scope(command=("sleep",)), duration=0.001)
    assert run.follow(EarlyInterrupt(deferred=False)) is not None
    assert run.is_over_in_time


@pytest.mark.parametrize("scope", [Scope(pid=1), Scope(command=("sleep",))])
@pytest.mark.parametrize("duration", [None, 60.0])
def test_who_awaits_the_beginning_goes_on_with_the_probepoints(scope: Scope, duration: float | None) -> None:
    happened: list[str] = []

    def late() -> Iterator[Event]:
        happened.append("probed")
        yield from (Begun(), ACTIVE) if scope.command else (ACTIVE, Begun())

    session = LastingSession([0], (), late())
    run = run_of(session, scope, duration=duration)

    def go_on() -> None:
        session.has_begun.wait(60)
        waiting.join(0.1)
        session.go_on()
        waiting.join(60)
        session.change([Stop()])

    def wait() -> None:
        run.await_beginning()
        happened.append("begun")

    waiting, thread = threading.Thread(target=wait), threading.Thread(target=go_on)
    waiting.start()
    thread.start()
    run.follow(EarlyInterrupt(deferred=False))
    thread.join(60)
    assert happened == ["probed", "begun"]


def test_who_awaits_the_beginning_goes_on_at_the_end() -> None:
    session = LastingSession([0], ())
    session.go_on()
    session.change([Stop()])
    run = run_of(session, Scope(pid=1))
    assert run.follow(EarlyInterrupt(deferred=False)) is not None
    run.await_beginning()


def test_a_run_ends_with_its_last_probepoint(capsys: pytest.CaptureFixture[str]) -> None:
    gone = (StateEvent((0,), 0, ProbeState.DISABLED), StateEvent((1,), 0, ProbeState.REMOVED))
    session = LastingSession([0, 1], (ACTIVE, Begun()), gone)
    session.go_on()
    run_of(session, Scope(pid=1), TWO).follow(EarlyInterrupt(deferred=False))
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "dprobes: note: all probepoints have been removed or disabled: the run ends"


@pytest.mark.parametrize(
    ("probes", "scope", "source"),
    [
        pytest.param([0], Scope(pid=1), TWO, id="another definition is to come"),
        pytest.param([0], Scope(command=("sleep",)), "", id="a command goes on"),
        pytest.param([0], Scope(pid=1), 'name = "m"\noffset = 1\nexit 3\n', id="a core is being written"),
    ],
)
def test_a_run_does_not_end_with_a_probepoint_if(probes: list[int], scope: Scope, source: str) -> None:
    session = LastingSession(probes, (ACTIVE, Begun(), StateEvent((0,), 0, ProbeState.REMOVED)))
    is_stopped: list[bool] = []

    def end() -> None:
        session.has_begun.wait(60)
        is_stopped.append(session.is_stopped.is_set())
        session.change([Stop()])
        session.go_on()

    thread = threading.Thread(target=end)
    thread.start()
    run_of(session, scope, source).follow(EarlyInterrupt(deferred=False))
    thread.join(60)
    assert is_stopped == [False]
