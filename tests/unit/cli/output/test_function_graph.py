"""The lines of a function graph, from events in all orders that real programs cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.cli.output.function_graph import GRAPH_HEADER, CallEvent, FunctionGraph, GraphView
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import RecordSource
from dprobes.sinks import Batch

if TYPE_CHECKING:
    import pytest


def lines(*events: CallEvent) -> list[str]:
    graph = FunctionGraph()
    return [*graph.lines_of(events), *graph.rest()]


def event(depth: int, function: str, took: int | None = None, tid: int = 7) -> CallEvent:
    return CallEvent(5, tid, depth, function, took)


def test_calls_are_indented_and_one_without_calls_is_one_line() -> None:
    assert GRAPH_HEADER == "  thread  duration  | function"
    assert lines(
        event(0, "outer"), event(1, "leaf"), event(1, "leaf", 12), event(1, "inner"), event(2, "leaf"),
        event(2, "leaf", 1500), event(1, "inner", 2_000_000), event(0, "outer", 3_000_000_000),
    ) == [
        "       7            | outer() {",
        "       7  12 ns     |   leaf();",
        "       7            |   inner() {",
        "       7  1.5 us    |     leaf();",
        "       7  2 ms      |   } /* inner */",
        "       7  3 s       | } /* outer */",
    ]  # fmt: skip


def test_functions_that_were_left_end_at_the_next_record_of_the_thread() -> None:
    assert lines(event(0, "a"), event(1, "b"), event(2, "c"), event(1, "d"), event(1, "d", 3), event(0, "a", 9)) == [
        "       7            | a() {",
        "       7            |   b() {",
        "       7            |     c() {",
        "       7            |     } /* c: left without a return */",
        "       7            |   } /* b: left without a return */",
        "       7  3 ns      |   d();",
        "       7  9 ns      | } /* a */",
    ]
    assert lines(event(0, "a"), event(1, "b"), event(0, "a", 9)) == [
        "       7            | a() {",
        "       7            |   b() {",
        "       7            |   } /* b: left without a return */",
        "       7  9 ns      | } /* a */",
    ]


def test_each_thread_has_its_own_depth() -> None:
    assert lines(event(0, "a"), event(0, "b", tid=8), event(1, "c"), event(0, "b", 4, tid=8), event(1, "c", 2)) == [
        "       7            | a() {",
        "       8            | b() {",
        "       7            |   c() {",
        "       8  4 ns      | } /* b */",
        "       7  2 ns      |   } /* c */",
    ]


def test_a_return_whose_entry_was_not_seen_is_printed() -> None:
    assert lines(event(2, "c", 5), event(1, "b", 9), event(1, "d")) == [
        "       7  5 ns      |     } /* c */",
        "       7  9 ns      |   } /* b */",
        "       7            |   d() {",
    ]


def test_records_that_no_handler_can_have_written_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    view = GraphView(["f", "g"], ["f", "g"])

    def record(minor: int, data: bytes) -> bytes:
        return encode_record(LogRecord(minor=minor, pid=5, tid=7, time=1, data=data))

    good = [record(0, bytes(8)), record(2, (25 << 8).to_bytes(8, "little"))]
    bad = [record(4, bytes(8)), record(65535, bytes(8)), record(1, b""), record(1, bytes(16))]
    view.log_events(Batch(RecordSource(1, "x"), [good[0], *bad, good[1]], (), 0))
    view.close()
    assert capsys.readouterr().out.splitlines() == [GRAPH_HEADER, "       7  25 ns     | f();"]
    assert (view.refused, view.events) == (4, 2)
