"""CTF traces as babeltrace2 reads them: order, losses, names, the clock, and what interrupts the writer."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import SinkError
from dprobes.formatters.templates.template_directory import DIRECTORY_FILE
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import Place, RecordSource
from dprobes.rpn.instruction_set import Token
from dprobes.sinks import Batch, SinkOptions
from dprobes.sinks.ctf.ctf_target import CtfSink
from dprobes.sinks.target_kinds import parse_target
from support.babeltrace import NEEDS_BABELTRACE, discarded_in, event_line, read_trace, text_of
from unit.sinks.ctf.traces import PLACE, SOURCE, batch, opened, times_in

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = NEEDS_BABELTRACE


def test_an_event_has_the_place_as_its_name_and_the_items_of_the_header(tmp_path: Path) -> None:
    record = LogRecord(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, "comm", 11, b"\xab", 4)
    sink = opened(tmp_path)
    places = [PLACE, Place("app", "main+0x4", at_return=True)]
    sink.log_events(Batch(SOURCE, [encode_record(record)] * 2, places, 0))
    context = {
        "major": "1", "minor": "2", "pid": "4", "uid": "5", "cs": "0x6", "ip": "0x7", "ss": "0x8", "sp": "0x9",
        "name": '"comm"', "tid": "11",
    }  # fmt: skip
    shown = [{"cpu_id": "3"}, context, {"_data_length": "1", "data": "[ [0] = 0xAB ]"}]
    assert read_trace(tmp_path) == [
        event_line(10, "libapp.so:work", *shown),
        event_line(10, "app:main+0x4:return", *shown),
    ]


def test_a_record_may_have_nothing_but_data(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.log_events(Batch(SOURCE, [encode_record(LogRecord(data=b"\1"))], [PLACE], 0))
    (line,) = read_trace(tmp_path)
    assert line.endswith("libapp.so:work: { }, { _data_length = 1, data = [ [0] = 0x1 ] }")
    assert not line.startswith("[0.")  # the time is that of the sink


def test_a_record_that_is_none_is_shown_as_bytes(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.log_events(Batch(SOURCE, [b"\1", encode_record(LogRecord(1, 2, time=5))], [PLACE] * 2, 0))
    whole, none = read_trace(tmp_path)
    assert whole.endswith("libapp.so:work: { major = 1, minor = 2 }, { _data_length = 0, data = [ ] }")
    assert none.endswith("libapp.so:work: { }, { _data_length = 1, data = [ [0] = 0x1 ] }")


def test_what_describes_itself_has_types_without_a_template(tmp_path: Path) -> None:
    data = (
        bytes([Token.STRING]) + b"\2\0hi" + bytes([Token.LOCAL_VARIABLES]) + b"\1\0" + bytes([9] + [0] * 7)
        + bytes([Token.SELECTOR_FAULT]) + b"\x08\0" + bytes([0x33] + [0] * 7) + bytes([Token.STRING]) + b"\2\0a\0"
    )  # fmt: skip
    sink = opened(tmp_path)
    sink.log_events(batch([1], data=data))
    (line,) = read_trace(tmp_path)
    shown = (
        f"data = {text_of(data)}, string = {text_of('hi')}, _lv_length = 1, lv = [ [0] = 9 ], selector_fault = 0x33, "
        r'string_2 = "a\\0" }'
    )
    assert line.endswith(shown)


def test_data_of_ever_new_shapes_stays_bytes(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    item = bytes([Token.STRING]) + b"\1\0x"
    for n in range(1, 80):
        sink.log_events(batch([n], data=item * n))
    lines = read_trace(tmp_path)
    assert [line.count("string_") for line in lines] == [min(n, 64 if n <= 64 else 1) - 1 for n in range(1, 80)]
    assert all(text_of(item * n) in line for n, line in enumerate(lines, 1))


def test_names_may_be_anything(tmp_path: Path) -> None:
    name = 'a"b\\c\n*/ é%s {};'
    long = "x" * 5000
    words = ("struct", "event", "int", "string", "_Bool", "__x", "align", "cpu_id", "timestamp", "Complex", "id")
    text = "".join(f"{word}=%bd " for word in words)
    files = {DIRECTORY_FILE: b"1 one\n", "one": f'major = 1\nminor = 2\nfmt = "{text}"\n'.encode()}
    source = RecordSource(1, name, name, 1, (name,), files)
    sink = CtfSink(tmp_path)
    sink.create_event(source)
    record = encode_record(LogRecord(1, 2, time=1, process_name='"\\\n', data=bytes(len(words))))
    places = [Place(f"/usr/{name}", name), Place("m", long, at_return=True)]
    sink.log_events(Batch(source, [record] * 2, places, 0))
    names = [{"Complex": "Complex_"}.get(word, word) for word in words]
    scopes = {"major": "1", "minor": "2", "name": r'"\"\\\\n"'}, dict.fromkeys(names, "0")
    assert read_trace(tmp_path) == [
        event_line(1, r' é%s {};:a"b\c\x0a*/ é%s {};', *scopes),
        event_line(1, "m:" + "x" * 1022, *scopes),
    ]


def test_names_that_readers_need_are_made_unlike_those_of_fields(tmp_path: Path) -> None:
    files = {
        DIRECTORY_FILE: b"1 one\n",
        "one": b'major = 1\nminor = 2\nfmt = "Bool=%bd Bool_=%bd _a_length=%bd a=%*bd a_fault=%*bd"\n',
    }
    sink = CtfSink(tmp_path)
    source = RecordSource(1, "app", "app", 1, (), files)
    sink.create_event(source)
    fault = bytes([Token.ADDRESS_FAULT]) + b"\x08\0" + bytes([9] + [0] * 7)
    numbers, array = b"\1\2\3", bytes([Token.MEMORY]) + b"\1\0\4"
    for time, data in enumerate((numbers + array + fault, numbers + fault + fault)):
        sink.log_events(Batch(source, [encode_record(LogRecord(1, 2, time=time, data=data))], [PLACE], 0))
    first, second = read_trace(tmp_path)
    shown = "{ Bool__ = 1, Bool_ = 2, _a_length = 3, "
    assert first.endswith(shown + "_a_length_ = 1, a = [ [0] = 4 ], a_fault_fault = 0x9 }")
    assert second.endswith(shown + "a_fault_2 = 0x9, a_fault_fault = 0x9 }")


def test_templates_that_come_later_hold_from_then_on(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.log_events(batch([1], data=b"\5"))
    files = {DIRECTORY_FILE: b"1 one\n", "one": b'major = 1\nminor = 2\nfmt = "n=%bd"\n'}
    sink.create_event(RecordSource(1, "app", "app", 1, ("12ab",), files))
    sink.log_events(batch([2], data=b"\5"))
    sink.destroy_event(SOURCE)
    ends = ["data = [ [0] = 0x5 ] }", "{ n = 5 }"]
    assert [line.endswith(end) for line, end in zip(read_trace(tmp_path), ends, strict=True)] == [True, True]
    (trace,) = tmp_path.iterdir()
    assert 'program_1_build_ids = "12ab";' in (trace / "metadata").read_text()


def test_records_that_come_late_keep_their_time(tmp_path: Path) -> None:
    random = Random(1)
    sink = opened(tmp_path)
    times = list(range(1, 1001))
    for start in range(0, 1000, 50):
        late = times[start : start + 50]
        random.shuffle(late)
        for part in (late[:20], late[20:]):
            sink.log_events(batch(part, cpu=random.randrange(3)))
    assert times_in(tmp_path) == times
    (trace,) = tmp_path.iterdir()
    assert len(list(trace.glob("stream_*"))) < 10


def test_lost_records_are_said_to_be_lost(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    for each in (batch([1], lost=3), batch([], lost=2), batch([2]), batch([3]), batch([4], cpu=1, lost=7)):
        sink.log_events(each)
    assert discarded_in(tmp_path) == 12


def test_each_opening_and_each_step_of_the_wall_clock_begins_a_trace(tmp_path: Path) -> None:
    second = 10**9
    first = opened(tmp_path)
    first.log_events(batch([1], wall_offset=5 * second))
    first.log_events(batch([2], wall_offset=3 * second))
    first.log_events(batch([3], wall_offset=3 * second))
    opened(tmp_path).log_events(batch([4], wall_offset=3 * second))
    assert times_in(tmp_path) == [3 * second + 2, 3 * second + 3, 3 * second + 4, 5 * second + 1]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_trace_can_be_read_while_it_grows_from_file_to_file(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    for count in range(1, 6):
        sink.log_events(batch(range(100 * count, 100 * count + 100), data=bytes(200)))
        sink.flush()
        assert times_in(tmp_path) == list(range(100, 100 * count + 100))
    (trace,) = tmp_path.iterdir()
    assert sorted(path.stat().st_size for path in trace.glob("stream_*")) == [1 << 15, 1 << 16, 1 << 17]


def test_arguments_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for argument, reason in ((file, "file exists"), (tmp_path / "a" / "b", "no such file or directory")):
        with pytest.raises(SinkError) as caught:
            parse_target(f"ctf:{argument}").open(SinkOptions())
        assert caught.value.message == f"'{argument}' cannot be written: {reason}"


def test_a_trace_is_not_continued(tmp_path: Path) -> None:
    opened(tmp_path).log_events(batch([1]))
    (trace,) = tmp_path.iterdir()
    with pytest.raises(SinkError) as caught:
        parse_target(f"ctf:{trace}").open(SinkOptions())
    assert caught.value.message == f"'{trace}' is a trace itself, which cannot be continued"
    assert caught.value.hint == "name the directory that is to hold traces"


def test_a_program_that_comes_again_adds_nothing_to_the_metadata(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.log_events(batch([1]))
    (trace,) = tmp_path.iterdir()
    metadata = (trace / "metadata").read_text()
    for number in range(2, 5):
        again = RecordSource(number, "app", "app", 1)
        sink.create_event(again)
        sink.log_events(batch([number])._replace(source=again))
        sink.destroy_event(again)
    assert times_in(tmp_path) == [1, 2, 3, 4]
    assert (trace / "metadata").read_text() == metadata


def test_ltt_is_a_directory_of_its_own(tmp_path: Path) -> None:
    sink = parse_target("LTT").open(SinkOptions(directory=tmp_path))
    sink.create_event(SOURCE)
    sink.log_events(batch([1]))
    sink.close()
    assert times_in(tmp_path / "ctf") == [1]
