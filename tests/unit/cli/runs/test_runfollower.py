"""What is said of a run that Ctrl-C ended before there was anything to say of its probepoints."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any, cast

from dprobes.cli.progress import Progress
from dprobes.cli.runs.interrupts import EarlyInterrupt
from dprobes.cli.runs.runfollower import Run
from dprobes.diagnostics import Diagnostics
from dprobes.engines.interface import Begun, Finished, Scope, StateEvent
from dprobes.resolve.probestate import ProbeState
from dprobes.rpn.pipeline import parse_source
from dprobes.source import SourceFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from dprobes.engines.interface import ControlledSession, Event


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

    def events(self) -> Iterator[Event]:
        events: tuple[Event, ...] = *self._before, Begun(), Finished((), None)
        for number, event in enumerate(events):
            if number == self._interrupted_after:
                os.kill(os.getpid(), signal.SIGINT)
                assert self.is_stopped
            yield event

    def stop(self) -> None:
        self.is_stopped = True

    def hurry(self) -> bool:
        return False


class NoOutputs:
    """Outputs of no records."""

    is_holding = False
    problem = None

    def flush(self, *, is_last: bool) -> int:
        return 0


def conclusion_of(session: EmptySession, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit status of a run, and the last line of what it says."""
    program = parse_source(SourceFile("p.rpn", 'name = "libm.so.6"\noffset = 1\nexit\n'), Diagnostics())
    outputs = cast("Any", NoOutputs())
    run = Run(program, cast("ControlledSession", session), outputs, Scope(pid=1), Progress(), exit_status=False)
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
