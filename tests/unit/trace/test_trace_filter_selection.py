"""What is selected of a trace: the same, whether it is counted, read, or looked at from its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_table import RecordTable
from dprobes.trace.packed_blocks import table_frame
from dprobes.trace.trace_content import LostRecords, TraceRecord, merged
from dprobes.trace.trace_filter import Selection, compile_filter
from dprobes.trace.trace_reader import TraceParser
from support.trace_files import WALL_OFFSET, clock, header, lost, program, records, seen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.trace.packed_blocks import Block

PIDS = st.lists(st.integers(0, 3), max_size=40)


def trace(blocks: list[list[int]]) -> list[Block | LostRecords]:
    """Return blocks of records with these process ids, each but the first behind lost ones."""
    data = header() + program()
    for number, pids in enumerate(blocks):
        if number:
            data += lost(1, number)
        data += records(1, *((0, encode_record(LogRecord(major=number, pid=pid))) for pid in pids))
    return list(TraceParser("trace.dpt").feed(data))


def mixed(pids: list[int]) -> list[Block | LostRecords]:
    """Return a block of records of several sizes with these process ids."""
    found = [(0, encode_record(LogRecord(major=n, pid=pid, data=bytes(pid % 3)))) for n, pid in enumerate(pids)]
    several = RecordTable.of_records(found)
    assert isinstance(several, RecordTable)
    return list(TraceParser("trace.dpt").feed(header() + program() + table_frame(1, 1_000, several)))


FILTERED = Selection([compile_filter("pid > 0"), compile_filter("pid < 3")])


@given(st.lists(PIDS, max_size=6), st.sampled_from([Selection(), FILTERED]))
def test_counting_and_reading_agree(blocks: list[list[int]], selection: Selection) -> None:
    found = trace(blocks)
    wanted = [pid for pids in blocks for pid in pids if selection is not FILTERED or 0 < pid < 3]
    assert sum(selection.count(each) for each in found if not isinstance(each, LostRecords)) == len(wanted)
    read = list(selection.records(found))
    assert [each.record[8] for each in read if isinstance(each, TraceRecord)] == wanted
    assert [each.count for each in read if isinstance(each, LostRecords)] == list(range(1, len(blocks)))


@given(st.lists(PIDS, max_size=6), st.integers(0, 60), st.sampled_from([Selection(), FILTERED]))
def test_the_last_ones_are_the_end_of_all(blocks: list[list[int]], count: int, selection: Selection) -> None:
    found = trace(blocks)
    everything = list(selection.records(found))
    last = selection.last(found, count)
    kept = [each for each in last if isinstance(each, TraceRecord)]
    assert kept == [each for each in everything if isinstance(each, TraceRecord)][-count:] if count else kept == []
    # Lost records that are noted behind the first of them are there, and no others than those right before it.
    assert seen(last) == seen(everything)[len(everything) - len(last) :]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 60), st.sampled_from([Selection(), FILTERED]))
def test_mixed_records_are_selected_in_their_order(pids: list[int], count: int, selection: Selection) -> None:
    pids = [0, 1, *pids]
    found = mixed(pids)
    wanted = [(n, pid) for n, pid in enumerate(pids) if selection is not FILTERED or 0 < pid < 3]
    assert sum(selection.count(each) for each in found if not isinstance(each, LostRecords)) == len(wanted)
    for read, expected in (
        (selection.records(found), wanted),
        (selection.last(found, count), wanted[-count:] if count else []),
    ):
        records_read = [each.record for each in read if isinstance(each, TraceRecord)]
        assert [(record[4], record[8]) for record in records_read] == expected


def timed(host: str, *times: tuple[int, int | None]) -> Iterator[TraceRecord | LostRecords]:
    """Return records with these times: of being written, and of their own."""
    data = header(host=host) + program(1, host)
    for written, time in times:
        data += records(1, (0, encode_record(LogRecord(time=time))), written=written)
    return Selection().records(TraceParser(host).feed(data))


def test_a_merge_is_in_the_order_of_the_wall_clock() -> None:
    second = 10**9
    alpha = timed("alpha", (second, 5), (second, 9), (2 * second, None), (4 * second, 3 * second))
    beta = timed("beta", (second, 7), (second, 6), (3 * second, 2 * second))
    found = [(each.program.name, each.wall_time - WALL_OFFSET) for each in merged([alpha, beta])]
    assert found == [
        ("alpha", 5), ("beta", 6), ("beta", 7), ("alpha", 9), ("alpha", 2 * second), ("beta", 2 * second),
        ("alpha", 3 * second),
    ]  # fmt: skip


def test_clocks_that_differ_are_compared_by_the_time_of_day() -> None:
    one = header() + program(1, "one") + records(1, (0, encode_record(LogRecord(time=100))))
    one += clock(WALL_OFFSET - 80) + records(1, (0, encode_record(LogRecord(time=110))))
    two = header(wall_offset=WALL_OFFSET + 50) + program(1, "two") + records(1, (0, encode_record(LogRecord(time=0))))
    traces = [Selection().records(TraceParser("x").feed(data)) for data in (one, two)]
    assert [(each.program.name, each.wall_time - WALL_OFFSET) for each in merged(traces)] == [
        ("one", 30), ("two", 50), ("one", 100),
    ]  # fmt: skip


@given(st.lists(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 900)), max_size=20), max_size=4))
def test_a_merge_keeps_all_records_and_orders_those_that_were_written_in_time(
    files: list[list[tuple[int, int]]],
) -> None:
    # Each record is written at most 0.9 s after its hit, in frames whose times grow.
    data = []
    for name, file in enumerate(files):
        frames = header() + program(1, str(name))
        for second, late in sorted(file):
            written = second * 10**9
            frames += records(1, (0, encode_record(LogRecord(time=max(0, written - late * 10**6)))), written=written)
        data.append(frames)
    traces = [list(Selection().records(TraceParser("x").feed(each))) for each in data]
    found = list(merged(traces))
    assert sorted(map(id, found)) == sorted(id(each) for trace in traces for each in trace)
    times = [each.wall_time for each in found]
    assert times == sorted(times)
