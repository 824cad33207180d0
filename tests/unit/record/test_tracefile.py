"""Trace files: what is written is read, whatever happens to the file."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import FormatError, SinkError
from dprobes.record.tracefile import LostRecords, TraceFileWriter, TraceReader, TraceRecord, older_part
from dprobes.record.traceframes import FrameKind, frame, json_frame

if TYPE_CHECKING:
    from pathlib import Path

PLACES = [("malloc", "", None), ("free+0x4", "free", 0x1234)]


def read(path: Path) -> list[TraceRecord | LostRecords]:
    reader = TraceReader(path)
    try:
        return list(reader.read())
    finally:
        reader.close()


def records_of(found: list[TraceRecord | LostRecords]) -> list[tuple[str, int, bytes]]:
    return [(each.program.name, each.probe, each.record) for each in found if isinstance(each, TraceRecord)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.dpt"


def test_what_is_written_is_read(path: Path) -> None:
    writer = TraceFileWriter(path)
    first = writer.add_program("libc.so.6", 1, {"engine": "ebpf"})
    writer.add_places(first, PLACES)
    second = writer.add_program("app", 2, {})
    writer.write(first, [(0, b"one"), (1, b"")])
    writer.write(second, [(7, b"two" * 1000)])
    writer.close()
    found = read(path)
    assert records_of(found) == [("libc.so.6", 0, b"one"), ("libc.so.6", 1, b""), ("app", 7, b"two" * 1000)]
    first_record, second_record, third_record = (each for each in found if isinstance(each, TraceRecord))
    assert first_record.program.place(0) == ("malloc", "", None)
    assert second_record.program.place(1) == ("free+0x4", "free", 0x1234)
    assert third_record.program.place(7) == ("probepoint 7", "", None)
    assert first_record.program.details == {"engine": "ebpf"}
    assert abs(first_record.wall_offset) > 1_000_000_000
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_reader_goes_on_where_it_was(path: Path) -> None:
    writer = TraceFileWriter(path)
    number = writer.add_program("app", 1, {})
    reader = TraceReader(path)
    for turn in range(5):
        writer.write(number, [(0, bytes([turn]))])
        assert records_of(list(reader.read())) == [("app", 0, bytes([turn]))]
        assert list(reader.read()) == []
    reader.close()
    writer.close()


def test_any_torn_tail_is_left_out_and_a_new_writer_goes_on_behind_the_whole_frames(path: Path) -> None:
    writer = TraceFileWriter(path)
    number = writer.add_program("app", 1, {})
    writer.write(number, [(0, b"kept")])
    whole = path.stat().st_size
    writer.write(number, [(0, b"torn")])
    writer.close()
    data = path.read_bytes()
    for length in range(whole, len(data)):
        path.write_bytes(data[:length])
        assert records_of(read(path)) == [("app", 0, b"kept")]
        again = TraceFileWriter(path)
        again.write(again.add_program("later", 2, {}), [(0, b"new")])
        again.close()
        assert records_of(read(path)) == [("app", 0, b"kept"), ("later", 0, b"new")]


def test_damage_is_an_error_and_nothing_else(path: Path) -> None:
    writer = TraceFileWriter(path)
    number = writer.add_program("app", 1, {})
    writer.add_places(number, PLACES)
    writer.write(number, [(0, b"record"), (1, b"another")])
    writer.close()
    data = path.read_bytes()
    random = Random(1)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << random.randrange(8)
        path.write_bytes(damaged)
        try:
            found = records_of(read(path))
        except FormatError:
            continue
        assert found == []  # the size of a frame has become greater than what is there


def test_a_file_of_something_else_is_refused(path: Path) -> None:
    path.write_bytes(b"\x7fELF" + bytes(100))
    with pytest.raises(FormatError) as caught:
        read(path)
    assert caught.value.message == f"'{path}' is no trace file, or damaged (at byte 0)"
    path.write_bytes(frame(FrameKind.RECORDS, bytes(4)))
    with pytest.raises(FormatError) as caught:
        read(path)
    assert caught.value.message == f"'{path}' does not begin as a trace file (at byte 0)"


def test_a_later_version_is_refused(path: Path) -> None:
    path.write_bytes(json_frame(FrameKind.HEADER, {"version": 2, "wall_offset": 0}))
    with pytest.raises(FormatError) as caught:
        read(path)
    assert caught.value.message == f"'{path}' has version 2 of the trace format, expected 1"
    assert caught.value.hint == "read it with the dprobes that wrote it, or a later one"


def test_frames_of_a_later_kind_are_passed_over(path: Path) -> None:
    writer = TraceFileWriter(path)
    number = writer.add_program("app", 1, {})
    writer.close()
    with path.open("ab") as file:
        file.write(frame(200, b"a"))  # type: ignore[arg-type]
    again = TraceFileWriter(path)
    again.write(again.add_program("app", 1, {}), [(0, b"x")])
    again.close()
    assert number == 1
    assert records_of(read(path)) == [("app", 0, b"x")]


def test_the_older_part_is_kept_and_the_new_one_describes_itself(path: Path) -> None:
    writer = TraceFileWriter(path, limit=8000)
    number = writer.add_program("app", 1, {"engine": "ptrace"})
    writer.add_places(number, PLACES)
    reader = TraceReader(path)
    for turn in range(100):
        writer.write(number, [(1, turn.to_bytes(2, "little") * 100)])
    writer.close()
    assert reader.was_replaced
    reader.close()
    older, newer = read(older_part(path)), read(path)
    assert path.stat().st_size + older_part(path).stat().st_size < 8000 + 500
    assert newer[0].program.places == older[0].program.places == PLACES
    last = [record[:2] for _, _, record in (*records_of(older), *records_of(newer))]
    assert last == [turn.to_bytes(2, "little") for turn in range(100 - len(last), 100)]


def test_records_that_find_no_room_are_noted_where_they_are_missing(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: a small file system is mounted")
    import subprocess

    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", place], check=True)
    try:
        path = place / "trace.dpt"
        writer = TraceFileWriter(path)
        number = writer.add_program("app", 1, {})
        writer.write(number, [(0, b"first")])
        filler = place / "filler"
        filler.write_bytes(bytes((60 << 10) - 4096))
        with pytest.raises(OSError, match="No space"), filler.open("ab") as file:
            file.write(bytes(1 << 16))
        lost = 0
        while writer.problem is None:
            writer.write(number, [(0, bytes(1000))] * 2)
            lost = 2
        writer.write(number, [(0, bytes(5000))])
        assert writer.problem == f"'{path}': no space left on device"
        filler.unlink()
        writer.write(number, [(0, b"last")])
        assert writer.problem is None
        writer.close()
        found = read(path)
        assert records_of(found)[0] == ("app", 0, b"first")
        assert records_of(found)[-1] == ("app", 0, b"last")
        assert sum(each.count for each in found if isinstance(each, LostRecords)) == lost + 1
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SinkError) as caught:
        TraceFileWriter(tmp_path / "missing" / "trace.dpt")
    assert caught.value.message == f"'{tmp_path}/missing/trace.dpt' cannot be written: no such file or directory"
