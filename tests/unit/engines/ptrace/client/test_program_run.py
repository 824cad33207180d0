"""What is known of a program without its tracer."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dprobes.engines.engine_interface import Counts, RecordBatch
from dprobes.engines.ptrace.client.program_run import ProgramRun, death_notices, merged
from dprobes.engines.ptrace.client.tracer_conversation import Conversation
from dprobes.engines.ptrace.client.tracer_link import Inbox
from dprobes.engines.ptrace.shared_counters import SharedCounters
from dprobes.record.log_record import Item, LogRecord, encode_record
from dprobes.record.record_table import RecordTable

if TYPE_CHECKING:
    from collections.abc import Sequence


def test_records_that_came_are_what_is_certain_of_a_killed_tracer() -> None:
    answers: Any = SimpleNamespace(probes=[None] * 3)
    debuggers: Any = None
    run = ProgramRun(answers, SharedCounters.new(0, 0), debuggers)
    for probe in (2, 0, 2):
        run.take_record(probe, b"record")
    assert run.counts_of_received() == (Counts(hits=1, records=1), Counts(), Counts(hits=2, records=2))


def test_the_notices_of_a_tracers_death_count_what_was_removed() -> None:
    """The engine has a breakpoint of its own in the dynamic linker, also for a program with watchpoints only."""
    assert [each.message for each in death_notices(-9, 1, 1, 1)] == [
        "the tracer was killed by signal 9; 1 breakpoint (the engine's own included) was removed from outside",
        "the debug registers of 1 thread were cleared from outside",
        "the debug registers of 1 thread could not be cleared: it does not stop",
    ]
    assert [each.message for each in death_notices(3, 0, 2, 4)] == [
        "the tracer ended with status 3; 0 breakpoints (the engine's own included) were removed from outside",
        "the debug registers of 2 threads were cleared from outside",
        "the debug registers of 4 threads could not be cleared: they do not stop",
    ]


def at(*times: int, probe: int = 0) -> list[tuple[int, bytes]]:
    """Return records of a probepoint with these times."""
    return [(probe, encode_record(LogRecord(Item.TIME, time=time))) for time in times]


def test_records_come_among_packed_ones_by_their_times() -> None:
    table = RecordTable.of_records(at(10, 20, 30, 40))
    assert table is not None
    found = list(merged([table, at(50, 60)], at(5, 20, 31, 32, 55, 70, probe=1)))
    assert [record for batch in found for record in batch] == [
        *at(5, probe=1),
        *at(10),
        *at(20, probe=1),
        *at(20, 30),
        *at(31, 32, probe=1),
        *at(40, 50),
        *at(55, probe=1),
        *at(60),
        *at(70, probe=1),
    ]
    assert sum(isinstance(batch, RecordTable) for batch in found) == 3  # what needs not be taken apart stays packed
    assert list(merged([table], [])) == [table]
    assert list(merged([], at(1))) == [at(1)]


class _Native:
    """Handlers in processes whose records before ``settled`` have arrived."""

    has_breakpoints = True
    settled: int | None = 0

    def take(self, *, is_over: bool, patience: int) -> tuple[list[Sequence[tuple[int, bytes]]], list[Any]]:
        assert is_over or patience >= 100_000_000
        return [], []


def test_records_of_the_tracer_wait_for_those_of_handlers_in_processes() -> None:
    answers: Any = SimpleNamespace(probes=[None])
    debuggers: Any = None
    native: Any = _Native()
    run = ProgramRun(answers, SharedCounters.new(0, 0), debuggers)
    run.native = native
    for record in (*at(30), *at(10), *at(20)):  # of several threads
        run.take_record(*record)

    def taken(heard: int | None) -> list[tuple[int, bytes]]:
        run.take_native(heard)
        return [each for item in run.take_all() if isinstance(item, RecordBatch) for each in item.records]

    assert taken(0) == []
    native.settled = 20
    assert taken(0) == at(10)
    native.settled = 21
    assert taken(0) == at(20)
    run.take_record(0, b"\0\0\0\0")  # it has no time
    assert taken(0) == [(0, b"\0\0\0\0")]
    assert taken(None) == at(30)


def test_no_record_is_lost_that_another_thread_adds_meanwhile() -> None:
    answers: Any = SimpleNamespace(probes=[None])
    debuggers: Any = None
    native: Any = _Native()
    native.settled = 10_000
    run = ProgramRun(answers, SharedCounters.new(0, 0), debuggers)
    run.native = native
    records = at(*range(20_000))

    def arrive() -> None:
        for record in records:
            run.take_record(*record)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        reader = threading.Thread(target=arrive)
        reader.start()
        while reader.is_alive():
            run.take_native(0)
        reader.join()
    finally:
        sys.setswitchinterval(interval)
    run.take_native(None)
    taken = [each for item in run.take_all() if isinstance(item, RecordBatch) for each in item.records]
    assert sorted(taken) == sorted(records)


def test_no_record_is_left_behind_when_the_tracer_is_gone() -> None:
    answers: Any = SimpleNamespace(probes=[None])
    debuggers: Any = None
    native: Any = _Native()
    run = ProgramRun(answers, SharedCounters.new(0, 0), debuggers)
    run.native = native
    run.take_record(*at(7)[0])
    run.release()
    assert [item.records for item in run.take_all() if isinstance(item, RecordBatch)] == [at(7)]


def test_everything_is_heard_while_another_thread_waits_at_an_empty_pipe() -> None:
    reader, writer = os.pipe()
    conversation: Any = Conversation.__new__(Conversation)
    conversation._inbox, conversation._heard = Inbox(reader), 0
    try:
        conversation._is_listening = False
        assert conversation.heard == 0
        conversation._is_listening = True
        before = time.monotonic_ns()
        assert conversation.heard >= before
        os.write(writer, b"message")
        assert conversation.heard == 0
    finally:
        os.close(reader)
        os.close(writer)
