"""The verb ``log``: what of which files is printed, and in which order."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dprobes.cli.main import run
from dprobes.cli.verbs.log import TIME_FORMS, parse_time
from dprobes.formatters import FORMATS
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.trace.trace_filter import FILTER_NAMES
from dprobes.trace.trace_writer import TraceFileWriter, older_part
from support import record_strategies
from support.trace_files import clock, header, lost, places, program, records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECOND = 10**9
NOON = 1_763_812_800 * SECOND
"""2025-11-22 12:00:00 in UTC."""


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def record(minor: int, seconds: float | None = None, **items: int | str | bytes) -> bytes:
    nanoseconds = None if seconds is None else int(seconds * SECOND)
    return encode_record(LogRecord(major=1, minor=minor, time=nanoseconds, **items))  # type: ignore[arg-type] # items


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Five records of two programs, one a second from noon on, and three lost ones."""
    path = tmp_path / "trace.dpt"
    path.write_bytes(
        header(wall_offset=NOON)
        + program(1, "service", module="/usr/bin/service")
        + places(1, ("main", "", None), ("wr*", "write_file", 0x1234))
        + records(1, (0, record(1, 0, pid=42)), (1, record(2, 1, pid=43)), written=SECOND)
        + lost(1, 3, time=2 * SECOND)
        + program(2, "libc", module="/lib/libc.so.6")
        + records(2, (0, record(3, 2, pid=42, process_name="bash")), written=3 * SECOND)
        + records(1, (0, record(4, 3, pid=42)), (0, record(5, pid=44)), written=4 * SECOND)
    )
    return path


class Said:
    """What a command line has printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.error = ""

    def __call__(self, *arguments: object, status: int = 0) -> str:
        assert run(["log", *map(str, arguments)]) == status
        output, self.error = self._capsys.readouterr()
        return output

    def minors(self, *arguments: object) -> list[int]:
        return [json.loads(line)["minor"] for line in self(*arguments, "--format", "json").splitlines()]


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(capsys)


LOST = "dprobes: warning: 3 records of 'service' were lost here\n"


def test_fields_that_are_counted_may_be_those_of_a_directory_of_templates(tmp_path: Path, log: Said) -> None:
    path = tmp_path / "sizes.dpt"
    found = [(0, record(1, 0, data=size.to_bytes(8, "little"))) for size in (3, 2, 3)]
    path.write_bytes(
        header(wall_offset=NOON) + program(1, "service") + places(1, ("main", "", None)) + records(1, *found)
    )
    assert log(path, "--count", "size", status=1) == ""
    assert log.error.startswith("dprobes: error: records have no field 'size'\nhint: ")
    (tmp_path / "templates.lst").write_text("1 own.fmt\n")
    (tmp_path / "own.fmt").write_text('major = 1\nminor = 1\nfmt = "size=%d"\n')
    assert log(path, "--count", "size", "--templates", tmp_path) == (
        "size  count  share\n   3      2  66.7%\n   2      1  33.3%\n"
    )


def test_all_is_printed_in_the_order_of_the_file(trace: Path, log: Said) -> None:
    assert log(trace) == (
        "12:00:00.000000  [42]  main\n"
        "12:00:01.000000  [43]  write_file\n"
        "12:00:02.000000  bash[42]  probepoint 0\n"
        "12:00:03.000000  [42]  main\n"
        "[44]  main\n"
    )
    assert log.error == LOST


def test_records_are_described_by_the_file(trace: Path, log: Said) -> None:
    first, second, *_ = (json.loads(line) for line in log(trace, "--format", "json").splitlines())
    assert (first["module"], first["symbol"], first["function"]) == ("/usr/bin/service", "main", "main")
    assert (second["symbol"], second["function"], second["placed"]) == ("wr*", "write_file", 0x1234)
    assert second["time"] == SECOND
    assert log(trace, "--format", "csv").splitlines()[0].startswith("major,minor,")
    assert log(trace, "--format", "csv").count("major") == 1


@pytest.mark.parametrize(
    ("options", "minors"),
    [
        (["--filter", "major==1 and pid==42"], [1, 3, 4]),
        (["--filter", "pid == 42", "--filter", "minor > 1"], [3, 4]),
        (["--filter", 'name == "bash" or function == "write_file"'], [2, 3]),
        (["--name", "libc"], [3]),
        (["--filter", 'module =~ "*/service"', "--name", "service"], [1, 2, 4, 5]),
        (["--name", "nothing"], []),
        (["--since", "12:00:01"], [2, 3, 4, 5]),
        (["--until", "12:00:01"], [1]),
        (["--since", "2025-11-22 12:00:01.5", "--until", "2025-11-22T12:00:03Z"], [3]),
        (["--since", "@1763812803"], [4, 5]),
        (["--since", "start+1s"], [3, 4, 5]),
        (["--since", "end-1s"], [4, 5]),
        (["--until", "end"], [1, 2, 3, 4]),
        (["--head", "2"], [1, 2]),
        (["--head", "0"], []),
        (["--tail", "2"], [4, 5]),
        (["--tail", "0"], []),
        (["--tail", "9"], [1, 2, 3, 4, 5]),
        (["--filter", "pid == 42", "--head", "2"], [1, 3]),
        (["--filter", "pid == 42", "--tail", "2"], [3, 4]),
    ],
)
def test_options_choose_records(
    trace: Path, log: Said, options: list[str], minors: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: NOON + 3600 * SECOND)
    assert log.minors(trace, *options) == minors
    if not {"--head", "--tail"} & set(options):
        assert log(trace, "--total", *options) == f"{len(minors)}\n"
        assert log.error == "dprobes: warning: 3 records of 'service' were lost\n"


def test_several_files_are_merged_in_the_order_of_time(trace: Path, log: Said, tmp_path: Path) -> None:
    other = tmp_path / "other.dpt"
    other.write_bytes(
        header(host="beta", wall_offset=NOON - 7 * SECOND)  # another host, started at another time
        + program(1, "service")
        + records(1, *((0, record(10 + n, 7 + n + 0.5)) for n in range(3)), written=10 * SECOND)
    )
    merged = [1, 10, 2, 11, 3, 12, 4, 5]
    assert log.minors(trace, other) == log.minors(other, trace) == log.minors(other, trace, other) == merged
    assert log.minors(trace, other, "--tail", "3") == [12, 4, 5]
    assert log.minors(trace, other, "--head", "3") == [1, 10, 2]
    assert log.minors(trace, other, "--filter", 'host == "beta"') == [10, 11, 12]
    assert log(trace, other, "--total") == "8\n"


def test_the_older_part_is_read_once(trace: Path, log: Said) -> None:
    trace.rename(older_part(trace))
    trace.write_bytes(header(wall_offset=NOON, part=1) + program() + records(1, (0, record(6, 9)), written=9 * SECOND))
    assert log.minors(trace) == [1, 2, 3, 4, 5, 6]
    assert log.minors(trace, older_part(trace)) == [1, 2, 3, 4, 5, 6]
    assert log.minors(older_part(trace)) == [1, 2, 3, 4, 5]


def test_a_damaged_file_is_printed_up_to_the_damage(trace: Path, log: Said) -> None:
    size = trace.stat().st_size
    trace.write_bytes(trace.read_bytes() + bytes(100))
    assert len(log(trace, status=1).splitlines()) == 5
    assert log.error == f"{LOST}dprobes: error: '{trace}' is damaged (at byte {size})\n"
    assert log(trace, "--total", status=1) == ""


def test_a_damaged_record_is_named_with_its_file(trace: Path, log: Said) -> None:
    trace.write_bytes(header() + program() + records(1, (0, b"\0\x04\0\0bash")))
    assert log(trace, status=1) == ""
    assert log.error == (
        f"dprobes: error: '{trace}' holds a damaged record: the process name of a record has no end (at byte 4)\n"
    )


def test_names_of_any_bytes_can_be_printed(trace: Path, log: Said) -> None:
    name = b"\xff\x1b[31m".decode("utf-8", "surrogateescape")
    trace.write_bytes(header() + program(1, "\udcff") + records(1, (0, record(1, process_name=name))))
    for format_name in FORMATS:
        assert "\x1b" not in log(trace, "--format", format_name)
    assert json.loads(log(trace, "--format", "json"))["name"] == "\\xff\x1b[31m"  # JSON has escapes of its own
    assert r"\xff\x1b[31m" in log(trace, "--format", "csv")
    assert log(trace) == "\\xff\\x1b[31m  probepoint 0\n"
    assert r"name=\xff\x1b[31m" in log(trace, "--format", "dprobes")
    assert r"\xff\x1b[31m" in log(trace, "--count", "name")
    assert log(trace, "--total", "--filter", r"name == '\\xff\\x1b[31m'") == "1\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--head", "1", "--tail", "1"], "--head and --tail exclude each other"),
        (["--total", "-f"], "--total needs all records: leave out --follow, --head and --tail"),
        (
            ["--since", "yesterday-ish"],
            f"--since: 'yesterday-ish' is not a time; write {TIME_FORMS}",
        ),
        (["--since", "12:00", "--until", "11:00"], "--since 12:00 is not before --until 11:00"),
    ],
)
def test_options_that_make_no_sense_are_refused(trace: Path, log: Said, options: list[str], message: str) -> None:
    assert log(trace, *options, status=2) == ""
    assert log.error.splitlines()[-1] == f"Error: {message}"


def test_a_wrong_filter_is_shown_with_its_place(trace: Path, log: Said) -> None:
    assert log(trace, "--filter", "pidd == 1", status=2) == ""
    assert log.error == (
        "dprobes: warning: 3 records of 'service' were lost here\n"
        "--filter:1:1: error: records have no field 'pidd'\n    pidd == 1\n    ^~~~\nhint: did you mean 'pid'?\n"
    )


def test_the_help_names_all_items_of_conditions(log: Said) -> None:
    words = set(re.findall(r"\w+", log("--help")))
    assert set(FILTER_NAMES) <= words


def test_a_missing_file_is_refused(tmp_path: Path, log: Said) -> None:
    assert log(tmp_path / "none.dpt", status=1) == ""
    assert log.error == f"dprobes: error: '{tmp_path}/none.dpt': no such file or directory\n"


# Times


NOW = NOON + 30 * 60 * SECOND


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10m", NOW - 600 * SECOND),
        ("1.5h", NOW - 5400 * SECOND),
        ("1h30m", NOW - 5400 * SECOND),
        ("2d1ms", NOW - 172_800 * SECOND - 10**6),
        ("now", NOW),
        ("now-5s", NOW - 5 * SECOND),
        ("start", 100),
        ("start+0.5s", 100 + SECOND // 2),
        ("end-1s", 200 - SECOND),
        ("@1763812800", NOON),
        ("@1763812800.000000001", NOON + 1),
        ("12:00", NOON),
        ("9:30:00.25", NOON - 9000 * SECOND + SECOND // 4),
        ("2025-11-22", NOON - 43_200 * SECOND),
        ("2025-11-22 12:00:00.000001", NOON + 1000),
        ("2025-11-22T14:00:00+02:00", NOON),
    ],
)
def test_times_are_relative_or_absolute(text: str, expected: int) -> None:
    assert parse_time(text, now=NOW, bounds=(100, 200)) == expected


def test_a_time_without_a_zone_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    assert parse_time("2025-11-22 13:00", now=NOW) == parse_time("13:00", now=NOW) == NOON


@pytest.mark.parametrize(
    "text", ["", "10", "10x", "25:00", "m", "-10m", "start+", "end*2", "2025-13-01", "9" * 5000 + "s"]
)
def test_anything_else_is_no_time(text: str) -> None:
    with pytest.raises((ValueError, OverflowError)):
        parse_time(text, now=NOW)


# Following, by the real command


@contextlib.contextmanager
def following(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    line = [sys.executable, "-m", "dprobes", "log", "-f", "--format", "dprobes", *map(str, arguments)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        yield process
        process.kill()


def minors_of(process: subprocess.Popen[str], count: int) -> list[int]:
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(count)]
    return [int(re.match(r"DProbes\(1,(\d+)\)", line)[1]) for line in lines]  # type: ignore[index] # it matches


def test_following_goes_on_through_all_files(tmp_path: Path) -> None:
    path = tmp_path / "trace.dpt"
    with following(path) as process:
        writer = TraceFileWriter(path, limit=4000)  # begins after the follower
        number = writer.add_program("app", 1, {})
        for batch in range(20):
            writer.write(number, [(0, record(batch * 10 + n)) for n in range(10)])
            assert minors_of(process, 10) == [batch * 10 + n for n in range(10)]
        writer.close()
        assert older_part(path).exists()


def test_following_begins_with_the_last_ones_and_ends_with_the_first(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.dpt"
    writer = TraceFileWriter(other)
    with following(trace, "--tail", "2") as process:
        assert minors_of(process, 2) == [4, 5]
        with trace.open("ab") as file:
            file.write(records(1, (0, record(6)), (0, record(7)), written=5 * SECOND))
        assert minors_of(process, 2) == [6, 7]
    with following(trace, other, "--head", "8", "--filter", "minor > 1") as process:
        assert minors_of(process, 6) == [2, 3, 4, 5, 6, 7]
        number = writer.add_program("app", 1, {})
        writer.write(number, [(0, record(8)), (0, record(1)), (0, record(9)), (0, record(10))])
        assert minors_of(process, 2) == [8, 9]
        assert process.wait(30) == 0
    writer.close()


def test_following_ends_when_nobody_reads(trace: Path) -> None:
    with following(trace) as process:
        assert minors_of(process, 5) == [1, 2, 3, 4, 5]
        assert process.stdout is not None
        process.stdout.close()
        process.wait(30)


# Hostile files

TEXTS = st.text(max_size=8)
PROGRAMS = st.builds(
    lambda number, name, module, template: program(
        number, name, module=module, templates={"templates.lst": f"{number} a.fmt\n", "a.fmt": template}
    ),
    st.integers(0, 2), TEXTS, TEXTS, TEXTS | st.just('major = 1\nminor = 1\ndesc = "d"\n"%d %s"\n'),
)  # fmt: skip
PLACED = st.builds(
    places,
    st.integers(0, 2),
    st.tuples(TEXTS, TEXTS, st.none() | st.integers(0, 1 << 64)),
)
RECORDS = st.builds(
    lambda number, found, written: records(number, *found, written=written),
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(0, 3), record_strategies.records().map(encode_record) | st.binary(max_size=40))),
    st.integers(0, (1 << 64) - 1),
)
LOST_ONES = st.builds(lost, st.integers(0, 2), st.integers(0, 1 << 62), st.integers(0, 1 << 62))
CLOCKS = st.builds(clock, st.integers(-(1 << 63), (1 << 63) - 1))


@given(
    st.lists(PROGRAMS | PLACED | RECORDS | RECORDS | LOST_ONES | CLOCKS, max_size=8),
    st.sampled_from(FORMATS),
    st.sampled_from(
        [[], ["--tail", "3"], ["--total"], ["--filter", 'tid >= 0 or function =~ "*a*"'], ["--since", "@5"]]
    ),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_frames_hold_it_is_printed_or_refused(
    tmp_path: Path, frames: list[bytes], format_name: str, options: list[str]
) -> None:
    path = tmp_path / "trace.dpt"
    path.write_bytes(header() + program(0) + program(1) + program(2) + b"".join(frames))
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()) as errors:
        status = run(["log", str(path), *options, "--format", format_name])
        output.flush()
    assert status in (0, 1)
    assert (status == 1) == ("dprobes: error: " in errors.getvalue())
    assert "internal error" not in errors.getvalue()
