"""Trace files: what is written is read, whatever happens to the file."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dprobes.errors import FormatError, SinkError
from dprobes.record import record_origin
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import RecordSource
from dprobes.trace.trace_content import LostRecords, PlaceEntry, RecordBlock, TraceOrigin, TraceRecord
from dprobes.trace.trace_frames import FrameKind, frame, json_frame
from dprobes.trace.trace_reader import TraceReader
from dprobes.trace.trace_writer import TraceFileWriter, older_part
from support.trace_files import header, program, records

if TYPE_CHECKING:
    from collections.abc import Iterator

PLACES = [
    PlaceEntry("malloc", is_paired=True),
    PlaceEntry("free+0x4", "free", 0x1234, at_return=True),
    PlaceEntry("99hz", is_code=False),
]


def read(path: Path) -> list[TraceRecord | LostRecords]:
    reader = TraceReader(path)
    try:
        return list(reader.read())
    finally:
        reader.close()


def records_of(found: list[TraceRecord | LostRecords]) -> list[tuple[str, int, bytes]]:
    return [(each.program.name, each.probe, each.record) for each in found if isinstance(each, TraceRecord)]


@contextlib.contextmanager
def writing(path: Path, **options: Any) -> Iterator[TraceFileWriter]:
    writer = TraceFileWriter(path, **options)
    try:
        yield writer
    finally:
        with contextlib.suppress(OSError):
            writer.close()


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
    assert first_record.program.place(0) == PLACES[0]
    assert second_record.program.place(1) == PLACES[1]
    assert third_record.program.place(7) == PlaceEntry("probepoint 7", is_code=False)
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
    assert caught.value.message == f"'{path}' is not a trace file, or is damaged (at byte 0)"
    path.write_bytes(frame(FrameKind.RECORDS, bytes(4)))
    with pytest.raises(FormatError) as caught:
        read(path)
    assert caught.value.message == f"'{path}' does not begin as a trace file (at byte 0)"


def test_a_later_version_is_refused(path: Path) -> None:
    path.write_bytes(json_frame(FrameKind.HEADER, {"version": 5, "wall_offset": 0}))
    with pytest.raises(FormatError) as caught:
        read(path)
    assert caught.value.message == f"'{path}' has version 5 of the trace format, expected 4"
    assert caught.value.hint == "read it with the dprobes that wrote it, or a later one"


def test_frames_of_a_later_kind_are_passed_over(path: Path) -> None:
    writer = TraceFileWriter(path)
    number = writer.add_program("app", 1, {})
    writer.close()
    with path.open("ab") as file:
        file.write(frame(200, b"a"))
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


def test_what_programs_are_and_where_they_were_is_in_the_file(path: Path) -> None:
    source = RecordSource(1, "svc", "/usr/lib/libc.so.6", 7, ("ab", "cd"), {"templates.lst": b"7 a\xff.fmt\n"})
    with writing(path) as writer:
        writer.write(writer.add_program(source.name, source.major, source.details()), [(0, b"x")])
    (record,) = read(path)
    assert record.program.source == source
    assert record.program.origin == TraceOrigin(
        str(path), os.uname().nodename, os.uname().release, Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    )


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_records_carry_when_they_were_written_and_the_wall_clock(path: Path, compress: Literal["zstd"] | None) -> None:
    begin = time.monotonic_ns()
    with writing(path, compress=compress) as writer:
        number = writer.add_program("app", 1, {})
        writer.write(number, [(0, encode_record(LogRecord(time=5))), (0, encode_record(LogRecord(pid=5)))])
    first, second = (each for each in read(path) if isinstance(each, TraceRecord))
    assert begin < first.written == second.written < time.monotonic_ns()
    assert first.wall_time == 5 + first.wall_offset
    assert second.wall_time == second.written + second.wall_offset
    assert abs(second.wall_time - time.time_ns()) < 60 * 10**9


def test_more_can_be_said_of_a_program_and_only_once(path: Path) -> None:
    with writing(path) as writer, TraceReader(path) as reader:
        number = writer.add_program("app", 1, {"build_ids": []})
        writer.write(number, [(0, b"a")])
        (record,) = list(reader.read())
        size = path.stat().st_size
        writer.update_program(number, {"build_ids": []})
        assert path.stat().st_size == size
        writer.update_program(number, {"build_ids": ["ab"]})
        writer.write(number, [(0, b"b")])
        (again,) = list(reader.read())
        assert record.program is again.program
        assert again.program.source.build_ids == ("ab",)


def test_records_that_could_not_be_appended_are_their_owners(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with writing(path) as writer:
        number = writer.add_program("app", 1, {})
        disk.space = 20
        assert not writer.append(number, [(0, b"a")] * 5)
        assert writer.problem == f"'{path}': no space left on device"
        writer.lose(number, 2)
        assert not writer.append(number, [(0, b"a")] * 5)
        disk.space = 1 << 40
        assert writer.append(number, [(0, b"a")] * 5)
    found = read(path)
    assert [each.count for each in found if isinstance(each, LostRecords)] == [2]
    assert records_of(found) == [("app", 0, b"a")] * 5


def test_a_step_of_the_wall_clock_holds_for_what_is_written_behind_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(path) as writer:
        number = writer.add_program("app", 1, {})
        writer.write(number, [(0, b"1")])
        for step in (3_600, -7_200, 0.001):
            now = record_origin.wall_offset()
            monkeypatch.setattr(record_origin, "wall_offset", lambda now=now, step=step: now + int(step * 10**9))
            writer.write(number, [(0, b"2")])
    offsets = [each.wall_offset for each in read(path) if isinstance(each, TraceRecord)]
    first = offsets[0]
    seconds = [round((offset - first) / 10**9, 1) for offset in offsets]
    assert seconds == [0, 3_600, -3_600, -3_600]  # a millisecond is no step


# Compression


def test_compressed_records_are_kept_back_until_there_are_enough_of_them_or_a_second_is_over(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    monkeypatch.setattr(record_origin, "wall_offset", lambda: 0)  # or the file would be told of a step
    with writing(path, compress="zstd") as writer, TraceReader(path) as reader:
        number = writer.add_program("app", 1, {})
        writer.add_places(number, PLACES)
        writer.write(number, [(0, b"one")])
        assert list(reader.read()) == []
        now += 1_000_000_001
        writer.write(number, [(0, b"two")])
        assert records_of(list(reader.read())) == [("app", 0, b"one"), ("app", 0, b"two")]
        writer.write(number, [(1, b"three")])
        writer.flush()
        assert records_of(list(reader.read())) == [("app", 1, b"three")]
        for _ in range(300):
            writer.write(number, [(1, bytes(1000))])
        assert len(records_of(list(reader.read()))) == 255  # 256 KiB
        writer.write(number, [(1, b"last")])
        writer.close()
        assert len(records_of(list(reader.read()))) == 46
        assert path.stat().st_size < 3_000


def test_large_batches_are_split_into_frames_that_can_be_read(path: Path) -> None:
    records = [(n % 5, bytes([n % 251]) * 1000) for n in range(20_000)]
    many = [PlaceEntry(f"place {n}", "", n) for n in range(25_000)]
    with writing(path, compress="zstd") as writer:
        number = writer.add_program("app", 1, {})
        writer.add_places(number, many)
        writer.write(number, records)
    found = read(path)
    assert records_of(found) == [("app", probe, record) for probe, record in records]
    assert found[0].program.places == many


def test_many_records_without_a_byte_take_several_frames(path: Path) -> None:
    with writing(path) as writer:
        writer.write(writer.add_program("app", 1, {}), [(0, b"")] * 300_000)
    with TraceReader(path) as reader:
        sizes = [len(block.body) for block in reader.blocks() if isinstance(block, RecordBlock)]
    assert len(sizes) == 3
    assert max(sizes) <= (1 << 20) + 20


def test_any_torn_tail_of_a_compressed_file_loses_only_the_tail(path: Path) -> None:
    with writing(path, compress="zstd") as writer:
        number = writer.add_program("app", 1, {})
        writer.write(number, [(0, b"kept")])
        writer.flush()
        whole = path.stat().st_size
        writer.write(number, [(0, b"torn" * 10)])
    data = path.read_bytes()
    for length in range(whole, len(data)):
        path.write_bytes(data[:length])
        assert records_of(read(path)) == [("app", 0, b"kept")]
        with writing(path) as writer:
            writer.write(writer.add_program("later", 2, {}), [(0, b"new")])
        assert records_of(read(path)) == [("app", 0, b"kept"), ("later", 0, b"new")]


def test_without_the_package_the_error_says_what_to_install(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(SinkError) as caught:
        TraceFileWriter(path, compress="zstd")
    assert caught.value.message == "compressed trace files need the Python package zstandard"
    assert caught.value.hint == "pip install 'dprobes[zstd]'"
    assert not path.exists()


# Files that are there already


def test_only_one_writes_to_a_file(path: Path) -> None:
    with writing(path) as writer:
        with pytest.raises(SinkError) as caught:
            TraceFileWriter(path)
        assert caught.value.message == f"'{path}' is being written by another process"
        assert caught.value.hint == "write to another file"
        writer.write(writer.add_program("app", 1, {}), [(0, b"x")])
    with writing(path):
        pass
    assert records_of(read(path)) == [("app", 0, b"x")]


@pytest.mark.parametrize("content", [b"x", b"my notes\n" * 100, b"\0" * 100, program(), b"\x7fELF", b"#" * 12])
def test_a_file_of_something_else_is_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(SinkError) as caught:
        TraceFileWriter(path)
    assert caught.value.message == f"'{path}' is not a trace file: records cannot be appended to it"
    assert caught.value.hint == "move it away, or write to another file"
    assert path.read_bytes() == content


def test_a_damaged_file_and_one_of_another_version_are_left_as_they_are(path: Path) -> None:
    whole = header() + program() + records(1, (0, b"a")) + records(1, (0, b"b"))
    at = len(header() + program())
    damaged = bytearray(whole)
    damaged[at + 20] ^= 1
    for content, message in (
        (bytes(damaged), f"'{path}' is damaged at byte {at}: records cannot be appended to it"),
        (
            header(version=9),
            f"'{path}' has version 9 of the trace format, expected 4: records cannot be appended to it",
        ),
    ):
        path.write_bytes(content)
        with pytest.raises(SinkError) as caught:
            TraceFileWriter(path)
        assert caught.value.message == message
        assert path.read_bytes() == content
        # A limited writer has to go on: it is the older part then.
        with writing(path, limit=10_000) as writer:
            writer.write(writer.add_program("app", 1, {}), [(0, b"new")])
        assert older_part(path).read_bytes() == content
        assert records_of(read(path)) == [("app", 0, b"new")]


@pytest.mark.parametrize("tail", [b"\0" * 5000, b"\0", records(1, (0, b"b" * 100))[:-1] + b"\0"])
def test_what_a_power_failure_leaves_is_cut_off(path: Path, tail: bytes) -> None:
    path.write_bytes(header() + program() + records(1, (0, b"a")) + tail)
    with writing(path) as writer:
        writer.write(writer.add_program("later", 2, {}), [(0, b"new")])
    assert records_of(read(path)) == [("app", 0, b"a"), ("later", 0, b"new")]


def test_a_beginning_that_is_torn_is_written_anew(path: Path) -> None:
    whole = header()
    for length in range(12, len(whole)):
        path.write_bytes(whole[:length])
        with writing(path) as writer:
            writer.write(writer.add_program("app", 1, {}), [(0, b"x")])
        assert records_of(read(path)) == [("app", 0, b"x")]


def test_details_beyond_all_measure_are_refused(path: Path) -> None:
    with writing(path) as writer:
        with pytest.raises(SinkError) as caught:
            writer.add_program("app", 1, {"templates": {"a": "x" * (16 << 20)}})
        assert (
            caught.value.message
            == "what is to be recorded of 'app' takes 16777292 bytes, at most 16777216 are possible"
        )
        writer.write(writer.add_program("app", 1, {}), [(0, b"x")])
    assert records_of(read(path)) == [("app", 0, b"x")]


# Failing disks


class Disk:
    """Stand between a writer and its file: let so many more bytes through, then have no space left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.space = 1 << 40
        self.truncates = True
        self._write, self._truncate = os.write, os.ftruncate
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "ftruncate", self.truncate)

    def write(self, file: int, data: bytes) -> int:
        if not self.space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(file, data[: self.space])
        self.space -= written
        return written

    def truncate(self, file: int, size: int) -> None:
        if not self.truncates:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._truncate(file, size)


@pytest.mark.parametrize("compress", [None, "zstd"])
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_disk_takes_the_file_can_be_read_and_all_records_are_there_or_noted(
    path: Path, compress: Literal["zstd"] | None, data: st.DataObject
) -> None:
    path.unlink(missing_ok=True)
    older_part(path).unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        limit = data.draw(st.sampled_from([None, None, 20_000]))
        disk.space = data.draw(st.integers(0, 600))
        writer = TraceFileWriter(path, limit, compress=compress)
        programs: list[int] = []
        written: dict[str, int] = {}
        for _ in range(data.draw(st.integers(1, 25))):
            match data.draw(st.sampled_from(["add", "places", "write", "write", "lose", "flush", "end", "space"])):
                case "add":
                    programs.append(writer.add_program(f"p{len(programs)}", 1, {}))
                case "space":
                    disk.space = data.draw(st.sampled_from([0, 1, 50, 300, 1 << 40]))
                    disk.truncates = data.draw(st.booleans())
                case "flush":
                    writer.flush()
                case action if programs:
                    which = data.draw(st.integers(0, len(programs) - 1))
                    number, name = programs[which], f"p{which}"
                    if number not in writer._programs or number in writer._ended:
                        continue
                    count = data.draw(st.integers(0, 20))
                    if action == "places":
                        writer.add_places(number, PLACES[:count])
                    elif action == "end":
                        writer.end_program(number)
                    else:
                        written[name] = written.get(name, 0) + count
                        if action == "lose":
                            writer.lose(number, count)
                        else:
                            writer.write(number, [(0, bytes(range(20)))] * count)
        disk.space, disk.truncates = 1 << 40, True
        writer.close()
        assert writer.problem is None
    found = (read(older_part(path)) if older_part(path).exists() else []) + read(path)
    counts: dict[str, int] = {}
    for each in found:
        counts[each.program.name] = counts.get(each.program.name, 0) + (
            each.count if isinstance(each, LostRecords) else 1
        )
    if limit is None:
        assert counts == {name: count for name, count in written.items() if count}
