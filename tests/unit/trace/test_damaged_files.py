"""Damage in trace files, which is skipped if that is wanted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from dprobes.cli.verbs import format as format_verb
from dprobes.cli.verbs import log as log_verb
from dprobes.errors import FormatError
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.trace.trace_content import Damage, LostRecords, PlaceEntry
from dprobes.trace.trace_frames import FRAME_HEAD, FrameKind, FrameSplitter
from dprobes.trace.trace_reader import TraceReader
from dprobes.trace.trace_writer import TraceFileWriter

if TYPE_CHECKING:
    from pathlib import Path


def records(first: int, count: int, data: bytes = b"") -> list[tuple[int, bytes]]:
    numbers = range(first, first + count)
    return [(0, encode_record(LogRecord(major=1, minor=n, time=n, data=data))) for n in numbers]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace file of ten frames with ten records each."""
    path = tmp_path / "trace.dpt"
    writer = TraceFileWriter(path)
    number = writer.add_program("app", 1, {"module": "app"})
    writer.add_places(number, [PlaceEntry("main")])
    for first in range(0, 100, 10):
        writer.write(number, records(first, 10))
    writer.close()
    return path


def frames_of(path: Path) -> list[tuple[int, int, int]]:
    """Return the kind of each frame, and where it begins and ends."""
    splitter = FrameSplitter()
    splitter.push(path.read_bytes())
    found = []
    while (frame := splitter.pull()) is not None:
        found.append((frame.kind, frame.position, splitter.position))
    return found


def flip(path: Path, at: int, mask: int = 0x40) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def read(path: Path) -> tuple[list[tuple[str, str, int]], list[Damage]]:
    damages: list[Damage] = []
    with TraceReader(path, damages.append) as reader:
        found = []
        for each in reader.read():
            assert not isinstance(each, LostRecords)
            number = int.from_bytes(each.record[8:12], "little")
            found.append((each.program.name, each.program.place(each.probe).where, number))
    return found, damages


@pytest.mark.parametrize("offset", [0, 3, 4, 5, 8, FRAME_HEAD.size, -1])
def test_a_damaged_frame_hides_nothing_but_itself(trace: Path, offset: int) -> None:
    for kind, begin, end in frames_of(trace)[:-1]:  # a last one that says that it is longer is a torn end
        sound = trace.read_bytes()
        flip(trace, begin + offset if offset >= 0 else end - 1)
        with TraceReader(trace) as reader, pytest.raises(FormatError):
            list(reader.read())
        found, damages = read(trace)
        name = "program 1" if kind == FrameKind.PROGRAM else "app"
        where = "probepoint 0" if kind in (FrameKind.PLACES, FrameKind.PROGRAM) else "main"
        if kind == FrameKind.PROGRAM:
            where = "main"
        numbers = set(range(100))
        if kind == FrameKind.RECORDS:
            numbers -= set(range(first := (frame_number(sound, begin)) * 10, first + 10))
        assert found == [(name, where, n) for n in sorted(numbers)]
        assert [(each.offset, each.size) for each in damages] == [(begin, end - begin)]
        trace.write_bytes(sound)


def frame_number(data: bytes, begin: int) -> int:
    """Return which one of the RECORDS frames one is."""
    splitter = FrameSplitter()
    splitter.push(data[:begin])
    count = 0
    while (frame := splitter.pull()) is not None:
        count += frame.kind == FrameKind.RECORDS
    return count


@pytest.mark.parametrize("size", [1, 7, 100, 1 << 20])
def test_it_is_the_same_however_the_bytes_are_cut(trace: Path, size: int) -> None:
    frames = frames_of(trace)
    flip(trace, frames[4][1] + 2)
    data = trace.read_bytes()
    damages: list[Damage] = []
    pieces = (data[at : at + size] for at in range(0, len(data), size))
    count = len(list(format_verb._trace(next(pieces), pieces, "it", damages.append)))
    assert count == 90
    assert [(each.offset, each.size) for each in damages] == [(frames[4][1], frames[4][2] - frames[4][1])]


def test_frames_in_records_are_not_taken_for_those_of_the_file(trace: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer.dpt"
    writer = TraceFileWriter(outer)
    number = writer.add_program("outer", 1, {})
    writer.write(number, records(500, 1, trace.read_bytes()))
    writer.write(number, records(600, 1))
    writer.close()
    at = next(begin for kind, begin, _ in frames_of(outer) if kind == FrameKind.RECORDS)
    flip(outer, at + 8)
    assert read(outer)[0] == [("outer", "probepoint 0", 600)]


def test_an_end_that_is_damaged_is_said_once_and_what_comes_is_read(trace: Path) -> None:
    *_, (_, begin, end) = frames_of(trace)
    sound = trace.read_bytes()
    flip(trace, end - 1)
    damages: list[Damage] = []
    with TraceReader(trace, damages.append) as reader:
        assert len(list(reader.read())) == 90
        assert list(reader.read()) == []
        assert [(each.offset, each.size) for each in damages] == [(begin, end - begin)]
        assert damages[0].problem == f"'{trace}' is damaged up to its end"
        with trace.open("ab") as file:
            file.write(sound[begin:end])
        assert len(list(reader.read())) == 10


def test_compressed_frames_that_hold_nonsense_are_passed_over(tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="zstandard is not installed")
    path = tmp_path / "trace.dptz"
    writer = TraceFileWriter(path, compress="zstd")
    number = writer.add_program("app", 1, {})
    for first in range(0, 100, 10):
        writer.write(number, records(first, 10, b"x" * 100))
        writer.flush()
    writer.close()
    begin = [begin for kind, begin, _ in frames_of(path) if kind == FrameKind.COMPRESSED][3]
    flip(path, begin + 30)
    assert len(read(path)[0]) == 90


def test_a_file_of_another_version_is_not_passed_over(trace: Path) -> None:
    from dprobes.trace.trace_frames import VERSION, json_frame

    trace.write_bytes(json_frame(FrameKind.HEADER, {"version": VERSION + 1, "wall_offset": 0}))
    with pytest.raises(FormatError, match="has version 5 of the trace format"):
        read(trace)


def test_verbs_go_on_behind_damage_and_say_so(trace: Path) -> None:
    _, begin, end = frames_of(trace)[5]
    flip(trace, end - 1)
    said = f"'{trace}' is damaged: {end - begin} bytes from byte {begin} on are skipped"
    for command, arguments in ((log_verb.log_command, [str(trace)]), (format_verb.format_command, [str(trace)])):
        result = CliRunner().invoke(command, [*arguments, "--format", "json", "--skip-damaged"])
        assert len([line for line in result.stdout.splitlines() if json.loads(line)]) == 90
        assert said in " ".join(result.stderr.split())
    result = CliRunner().invoke(log_verb.log_command, [str(trace), "--total", "--skip-damaged"])
    assert result.stdout == "90\n"
    result = CliRunner().invoke(log_verb.log_command, [str(trace), "--total"])
    assert isinstance(result.exception, FormatError)


def test_tables_are_made_of_what_is_sound(trace: Path) -> None:
    for library in ("duckdb", "pyarrow"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    from dprobes.tables.sql_database import Database

    flip(trace, frames_of(trace)[5][2] - 1)
    damages: list[Damage] = []
    with Database([trace], damages.append) as database:
        assert database.connection.execute("select count(*) from records").fetchall() == [(90,)]
    assert len(damages) == 1
