"""What is known of a program without its tracer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dprobes.engines.engine_interface import Counts
from dprobes.engines.ptrace.client.program_run import ProgramRun
from dprobes.engines.ptrace.shared_counters import SharedCounters


def test_records_that_came_are_what_is_certain_of_a_killed_tracer() -> None:
    answers: Any = SimpleNamespace(probes=[None] * 3)
    debuggers: Any = None
    run = ProgramRun(answers, SharedCounters.new(0, 0), debuggers)
    for probe in (2, 0, 2):
        run.take_record(probe, b"record")
    assert run.counts_of_received() == (Counts(hits=1, records=1), Counts(), Counts(hits=2, records=2))
