"""What Perfetto's own messages find in a trace: tracks, slices, instants, values, clocks, losses."""

from __future__ import annotations

import time
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import pytest

from dprobes.errors import SinkError
from dprobes.keyed.table_entries import TableStore
from dprobes.record.log_record import ByteOrder, LogRecord, encode_record
from dprobes.record.record_origin import Place, RecordSource
from dprobes.rpn.keyed_tables import Key, KeyKind, Table, TableKind
from dprobes.sinks import Batch, SinkOptions
from dprobes.sinks.target_kinds import parse_target
from support.perfetto_messages import packets_of, read_perfetto
from unit.sinks.perfetto.traces import SOURCE, WALL, batch, entry, leaving, opened
from unit.sinks.typed import Shown, random_data, random_fields, template_files

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATES = 60
RECORDS = 1000
SHAPES: list[tuple[Literal[4, 8], ByteOrder]] = [(4, "little"), (8, "little"), (4, "big"), (8, "big")]
THREAD = "thread 1 2"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def test_a_call_is_a_slice_with_what_both_records_say(path: Path) -> None:
    sink = opened(path)
    sink.log_events(batch(entry("work", 10, 0x100, cpu=1, uid=5, ip=7, data=b"\1\2")))
    sink.log_events(batch(leaving("work", 30, 0x108, cpu=0, data=b"\3")))
    trace = read_perfetto(path)
    (call,) = trace.events
    assert (call.name, call.track, call.begin, call.end, call.depth) == ("app:work", THREAD, 10, 30, 0)
    codes = {"major": ("uint", 1), "minor": ("uint", 2)}
    assert call.arguments == {
        "data": ("string", "01 02"),
        "record": codes | {"cpu": ("uint", 1), "uid": ("uint", 5), "ip": ("pointer", 7), "sp": ("pointer", 0x100)},
    }
    returned = {"data": ("string", "03"), "record": codes | {"cpu": ("uint", 0), "sp": ("pointer", 0x108)}}
    assert call.returned == {"return": returned}
    assert trace.tracks == {"process 1": {"name": "app"}, THREAD: {"name": "app", "parent": "process 1"}}


def test_what_has_no_pair_is_an_instant(path: Path) -> None:
    sink = opened(path)
    record = encode_record(LogRecord(1, 2, pid=1, tid=2, time=5))
    stack = encode_record(LogRecord(0, 0, pid=1, time=6, is_stack_trace=True, data=b"\1"))
    places = [Place("m", "entry+0x4"), Place("m", "work", "work", at_return=True), Place("m", "work", is_paired=True)]
    sink.log_events(Batch(SOURCE, [record, record, stack], places, WALL))
    nobody = encode_record(LogRecord(1, 2, time=7))
    sink.log_events(Batch(SOURCE, [nobody, b"\1"], [places[2], places[2]], WALL))
    trace = read_perfetto(path)
    assert not any(event.is_slice for event in trace.events)
    assert [(event.name, event.track) for event in trace.events] == [
        ("m:entry+0x4", THREAD),
        ("m:work (return)", THREAD),
        ("m:work: stack trace", "process 1"),
        ("m:work", "dprobes: app"),
        ("m:work", "dprobes: app"),  # what is no record has the time of now, and its bytes
    ]
    assert trace.events[2].arguments["stack_trace"] == ("string", "01")
    assert trace.events[4].arguments == {"data": ("string", "01"), "record": []}


def test_calls_nest_by_thread_whatever_the_batches_are(path: Path) -> None:
    sink = opened(path)
    for tid in (2, 3):
        sink.log_events(batch(entry("f", 10 + tid, 0x100, tid), entry("f", 20 + tid, 0x80, tid)))
    for tid in (3, 2):
        sink.log_events(batch(entry("g", 30 + tid, 0x40, tid), leaving("g", 40 + tid, 0x48, tid)))
        sink.log_events(batch(leaving("f", 50 + tid, 0x88, tid), leaving("f", 60 + tid, 0x108, tid)))
    trace = read_perfetto(path)
    for tid in (2, 3):
        assert [(e.name, e.begin - tid, e.end and e.end - tid, e.depth) for e in trace.on(f"thread 1 {tid}")] == [
            ("app:f", 10, 60, 0),
            ("app:f", 20, 50, 1),
            ("app:g", 30, 40, 2),
        ]


def test_a_tail_call_and_its_caller_return_together(path: Path) -> None:
    opened(path).log_events(
        batch(entry("f", 1, 0x100), entry("g", 2, 0x100), leaving("g", 5, 0x108), leaving("f", 5, 0x108))
    )
    assert [(e.name, e.begin, e.end, e.depth) for e in read_perfetto(path).events] == [
        ("app:f", 1, 5, 0),
        ("app:g", 2, 5, 1),
    ]


def test_calls_whose_return_was_not_seen_end_when_the_stack_is_above_them(path: Path) -> None:
    opened(path).log_events(
        batch(
            entry("f", 1, 0x1000), entry("g", 2, 0x800), entry("h", 3, 0x400),
            entry("g", 4, 0x900),  # as after longjmp
            entry("h", 5, 0x300),
            leaving("f", 9, 0x1008),  # the return of the second g was lost
            leaving("h", 10, 0x308),  # and this is of no call
        )
    )  # fmt: skip
    assert [(e.name, e.begin, e.end, e.depth, e.is_slice) for e in read_perfetto(path).events] == [
        ("app:f", 1, 9, 0, True),
        ("app:g", 2, 4, 1, True),
        ("app:h", 3, 4, 2, True),
        ("app:g", 4, 9, 1, True),
        ("app:h", 5, 9, 2, True),
        ("app:h (return)", 10, None, 0, False),
    ]


def test_a_return_ends_what_was_called_beside_it(path: Path) -> None:
    opened(path).log_events(
        batch(
            entry("f", 1, 0x1000),
            entry("jumps", 2, 0x800), entry("g", 3, 0x800), leaving("g", 4, 0x808),  # is it a tail call?
            entry("g", 5, 0x800), leaving("g", 6, 0x808),  # it was none
            leaving("f", 7, 0x1008),
        )
    )  # fmt: skip
    assert [(e.name, e.begin, e.end, e.depth) for e in read_perfetto(path).events] == [
        ("app:f", 1, 7, 0),
        ("app:jumps", 2, 5, 1),
        ("app:g", 3, 4, 2),
        ("app:g", 5, 6, 1),
    ]


def test_without_stack_pointers_the_last_call_of_the_function_returns(path: Path) -> None:
    opened(path).log_events(batch(entry("f", 1), entry("f", 2), entry("g", 3), leaving("f", 4), leaving("f", 5)))
    assert [(e.name, e.begin, e.end) for e in read_perfetto(path).events] == [
        ("app:f", 1, 5),
        ("app:f", 2, 4),
        ("app:g", 3, 4),
    ]


def test_another_stack_tells_nothing_of_the_calls_on_this_one(path: Path) -> None:
    far = 0x7F0000000000
    opened(path).log_events(
        batch(entry("f", 1, 0x1000), entry("g", 2, far), leaving("g", 3, far + 8), leaving("f", 4, 0x1008))
    )
    assert [(e.name, e.begin, e.end) for e in read_perfetto(path).events] == [("app:f", 1, 4), ("app:g", 2, 3)]


def test_calls_are_those_of_one_program(path: Path) -> None:
    other = RecordSource(2, "other", "other", 1)
    sink = opened(path, SOURCE, other)
    sink.log_events(batch(entry("f", 1, 0x100)))
    sink.log_events(batch(entry("g", 2, 0x80), leaving("g", 3, 0x88), source=other))
    sink.log_events(batch(leaving("g", 4, 0x88)))
    sink.log_events(batch(leaving("f", 5, 0x108)))
    assert [(e.name, e.begin, e.end) for e in read_perfetto(path).events] == [
        ("app:f", 1, 5),
        ("app:g", 2, 3),
        ("app:g (return)", 4, None),
    ]


def test_a_thread_is_described_again_when_its_name_changes(path: Path) -> None:
    sink = opened(path)
    for n, name in enumerate(("a", "a", 'b"\n', "é" * 7)):
        sink.log_events(batch(entry("f", n, process_name=name)))
    sink.log_events(batch(entry("f", 9, tid=1, process_name="main"), entry("f", 10, tid=None)))
    descriptors = [p.track_descriptor for p in packets_of(path) if p.HasField("track_descriptor")]
    names = [d.thread.thread_name or d.process.process_name for d in descriptors]
    assert names == ["a", "a", 'b"\n', "é" * 7, "main", "main"]
    assert read_perfetto(path).tracks["process 1"] == {"name": "main"}


def test_clocks_are_said_at_first_and_when_the_wall_clock_was_set(path: Path) -> None:
    sink = opened(path)
    before = time.monotonic_ns()
    for wall in (WALL, WALL, WALL + 5, -(10**19)):
        sink.log_events(batch(entry("f", 1), wall=wall))
    clocks = read_perfetto(path).clocks
    assert [clock[1] - clock[3] for clock in clocks[:2]] == [WALL, WALL + 5]
    assert clocks[2][1] == 0  # before 1970 there is no time
    assert all(before <= clock[3] <= time.monotonic_ns() <= clock[6] + 10**9 for clock in clocks)
    first = packets_of(path)[1]
    assert (first.first_packet_on_sequence, first.sequence_flags) == (True, 1)


def test_lost_records_are_said_to_be_lost(path: Path) -> None:
    sink = opened(path)
    sink.log_events(batch(entry("f", 1)))
    sink.log_events(batch(lost=2))
    sink.log_events(batch(entry("f", 2), lost=3))
    trace = read_perfetto(path)
    assert trace.losses == 1
    (event,) = trace.on("dprobes: app")
    assert (event.name, event.begin, event.arguments) == ("dprobes:5 records lost", 2, {"count": ("uint", 5)})
    sink.log_events(batch(lost=4))
    sink.destroy_event(SOURCE)
    _, last = read_perfetto(path).on("dprobes: app")
    assert (last.name, last.arguments) == ("dprobes:4 records lost", {"count": ("uint", 4)})


@pytest.mark.parametrize("seed", range(2))
def test_random_templates_and_records(path: Path, seed: int) -> None:
    random = Random(seed)
    fields = [random_fields(random) for _ in range(TEMPLATES)]
    source = RecordSource(1, "app", "app", 7, (), template_files(7, fields))
    sink = opened(path, source)
    expected, records = [], []
    for n in range(RECORDS):
        word_size, order = random.choice(SHAPES)
        minor = random.randrange(TEMPLATES)
        data, shown = random_data(fields[minor], random, word_size, order)
        record = LogRecord(7, minor, time=n, data=data, word_size=word_size, byte_order=order)
        records.append(encode_record(record))
        expected.append({name: _annotation(one) for name, one in shown.items()})
    sink.log_events(Batch(source, records, [Place("m", "f")] * RECORDS, WALL))
    found = [event.arguments for event in read_perfetto(path).events]
    for arguments in found:
        del arguments["record"]
    assert found == expected


def _annotation(shown: Shown) -> Any:
    match shown.value:
        case int() as value if shown.conversion == "c":
            return ("string", _character(value))
        case int() as value:
            kind = {"d": "int", "p": "pointer", "a": "pointer"}.get(shown.conversion, "uint")
            return (kind, value)
        case str() as value:
            return ("string", value)
        case bytes() as value:
            return ("string", value.hex(" "))
        case values if shown.conversion == "c":
            return ("string", "".join(_character(int(value)) for value in values))
        case values:
            return [_annotation(Shown(value, shown.conversion)) for value in values]


def _character(code: int) -> str:
    if code > 0x10FFFF:
        return f"<{code:#x}>"
    return f"\\u{code:x}" if 0xD800 <= code < 0xE000 else chr(code)


def test_names_may_be_anything(path: Path) -> None:
    name = 'a"b\\c\n\0*/ é\udcff' + "x" * 5000
    source = RecordSource(1, name, name, 1)
    sink = opened(path, source)
    sink.log_events(Batch(source, [encode_record(LogRecord(1, 2))], [Place(name, name)], WALL, 1))
    trace = read_perfetto(path)
    shown = name.replace("\udcff", "\\udcff")
    assert trace.tracks == {f"dprobes: {shown}": {}}
    assert trace.events[1].name == f" é\\udcff{'x' * 5000}:{shown}"


def test_the_target_needs_a_path() -> None:
    with pytest.raises(SinkError) as caught:
        parse_target("perfetto:").open(SinkOptions())
    assert caught.value.message == "log target 'perfetto' needs a path: perfetto:FILE"


def test_a_row_of_a_table_is_a_counter_and_a_value_of_several_numbers_several(path: Path) -> None:
    hits = TableStore(Table("hits", TableKind.COUNT, (Key(KeyKind.WORD),)))
    sizes = TableStore(Table("sizes", TableKind.AVG))
    sink = opened(path)
    for number in (1, 2):
        hits.tally((7).to_bytes(8, "little"))
        sizes.tally(b"", 4 * number + 1)
        sink.log_tables(SOURCE, [hits.contents(), sizes.contents()])
    packets = packets_of(path)
    tracks = {
        packet.track_descriptor.uuid: packet.track_descriptor
        for packet in packets
        if packet.HasField("track_descriptor")
    }
    found = []
    for packet in packets:
        event = packet.track_event
        if event.type == event.TYPE_COUNTER:
            track = tracks[event.track_uuid]
            assert track.HasField("counter")
            assert tracks[track.parent_uuid].name == "dprobes: app"
            is_whole = event.HasField("counter_value")
            found.append((track.name, event.counter_value if is_whole else event.double_counter_value))
    assert found == [
        ("@hits[7]", 1), ("@sizes count", 1), ("@sizes sum", 5), ("@sizes average", 5.0),
        ("@hits[7]", 2), ("@sizes count", 2), ("@sizes sum", 14), ("@sizes average", 7.0),
    ]  # fmt: skip
