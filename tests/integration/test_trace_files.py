"""Trace files that a run writes, and ``dprobes log`` on them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dprobes.trace.trace_frames import FrameKind, FrameSplitter
from integration.support import DPROBES, TIMEOUT, await_true, environment

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

TICK = "name = hotloop\nmajor = 5\noffset = tick\nminor = 1\npush r, arg0\nlog 1\nexit\n"


def dprobes(*arguments: object) -> str:
    command = [sys.executable, "-m", "dprobes", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tick.rpn"
    path.write_text(TICK)
    return path


def count_of(path: Path, *options: object) -> int:
    return int(dprobes("log", path, "--total", *options))


@pytest.mark.parametrize("name", ["trace.dpt", "trace.dptz"])
def test_a_run_appends_its_records_which_are_shown_elsewhere(
    build: Builder, tmp_path: Path, source: Path, name: str
) -> None:
    program, trace = build("hotloop.c"), tmp_path / name
    run = ("run", source, "--engine", "ptrace", "--log", "pid,tsc,procname", "-o", trace, "--")
    dprobes(*run, program, 30)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(trace, elsewhere / "copy")
    records = [json.loads(line) for line in dprobes("log", elsewhere / "copy", "--format", "json").splitlines()]
    assert len(records) == 30
    words = [int.from_bytes(bytes.fromhex(record["data"]), "little") for record in records]
    assert len(set(words)) == 30
    assert {(record["major"], record["minor"], record["name"], record["symbol"]) for record in records} == {
        (5, 1, "hotloop", "tick")
    }
    dprobes(*run, program, 12)
    assert count_of(trace) == 42
    assert count_of(trace, "--filter", f"major == 5 and pid == {records[0]['pid']}") == 30
    assert count_of(trace, "--filter", 'module =~ "*hotloop" and name == "hotloop" and function == "tick"') == 42
    times = [record["time"] for record in records]
    assert count_of(trace, "--filter", f"time > {times[9]}") == 32
    assert count_of(trace, "--since", "1h") == 42
    assert count_of(trace, "--until", "1h") == 0
    last = dprobes("log", trace, "--tail", 1, "--format", "json")
    assert last == dprobes("log", trace, "--format", "json").splitlines(keepends=True)[-1]


def test_records_that_come_fast_are_written_together(build: Builder, tmp_path: Path, source: Path) -> None:
    program, trace = build("hotloop.c"), tmp_path / "trace.dpt"
    dprobes("run", source, "--engine", "ptrace", "-o", trace, "--", program, 10_000)
    assert count_of(trace, "--filter", "major == 5") == 10_000
    frames = FrameSplitter()
    frames.push(trace.read_bytes())
    found = sum(frame.kind == FrameKind.RECORDS for frame in iter(frames.pull, None))
    assert found < 2_000


def test_a_run_that_is_killed_leaves_a_file_that_is_read_and_continued(
    build: Builder, tmp_path: Path, source: Path
) -> None:
    program, trace = build("hotloop.c"), tmp_path / "trace.dpt"
    command = ["run", source, "--engine", "ptrace", "-o", trace, "--", program]
    with subprocess.Popen(
        [sys.executable, "-m", "dprobes", *map(str, command), "100000000"], env=environment(), stderr=subprocess.DEVNULL
    ) as process:
        await_true(lambda: trace.exists() and trace.stat().st_size > 50_000, "records")
        process.send_signal(signal.SIGKILL)
    before = count_of(trace)
    assert before > 100
    with trace.open("r+b") as file:  # as if it had been killed in the middle of one more frame
        torn = file.read(30)
        file.seek(0, os.SEEK_END)
        file.write(torn)
    assert count_of(trace) == before
    dprobes(*command, 12)
    assert count_of(trace) == before + 12


def test_two_runs_do_not_write_to_one_file(build: Builder, tmp_path: Path, source: Path) -> None:
    program, trace = build("hotloop.c"), tmp_path / "trace.dpt"
    command = [sys.executable, "-m", "dprobes", "run", str(source), "--engine", "ptrace", "-o", str(trace), "--"]
    command.append(str(program))
    with subprocess.Popen([*command, "100000000"], env=environment(), stderr=subprocess.DEVNULL) as process:
        await_true(lambda: trace.exists() and trace.stat().st_size > 1000, "records")
        second = subprocess.run([*command, "5"], check=False, capture_output=True, text=True, env=environment())
        process.send_signal(signal.SIGTERM)
    assert second.returncode == 1
    assert (
        f"dprobes: error: '{trace}' is being written by another process\nhint: write to another file\n" in second.stderr
    )
    assert re.fullmatch(r"\d+\n", dprobes("log", trace, "--total"))


def test_a_file_of_something_else_is_not_touched(build: Builder, tmp_path: Path, source: Path) -> None:
    precious = tmp_path / "notes.dpt"
    precious.write_text("my notes\n")
    command = ["run", source, "--engine", "ptrace", "-o", precious, "--", "true"]
    line = [sys.executable, "-m", "dprobes", *map(str, command)]
    done = subprocess.run(line, check=False, capture_output=True, text=True, env=environment())
    assert done.returncode == 1
    assert f"'{precious}' is not a trace file: records cannot be appended to it" in done.stderr
    assert precious.read_text() == "my notes\n"


REQUESTS = """
module "{program}", major 6;
accepted(long n) {{ printf("accepted %d", n); }}
parsed(long n, char *text) {{ printf("parsed %d %s", n, str(text)); }}
answered(long n, long status, long size) {{ printf("answered %d: %d, %d bytes", n, status, size); }}
"""
TEXTS = ("GET /", "POST /long/path", "", "HEAD /index.html", "GET /x")


@pytest.mark.parametrize(
    "engine", ["ptrace", pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root"))]
)
def test_records_of_several_shapes_stay_in_order_and_are_packed(build: Builder, tmp_path: Path, engine: str) -> None:
    program, trace, source = build("requests.c"), tmp_path / "trace.dpt", tmp_path / "requests.dpc"
    source.write_text(REQUESTS.format(program=program))
    dprobes("run", source, "--engine", engine, "-o", trace, "--", program, 3_000)
    expected = []
    for n in range(3_000):
        expected += [f"accepted {n}"] if n % 3 == 0 else []
        expected.append(f"parsed {n} {TEXTS[n % 5]}")
        expected += [f"answered {n}: {200 + n % 2}, {n * n} bytes"] if n % 7 else []
    lines = dprobes("log", trace).splitlines()
    assert [re.sub(r"^\S+ +\S+ +", "", line).strip() for line in lines] == [line.strip() for line in expected]
    assert len(dprobes("log", trace, "--tail", 100).splitlines()) == 100
    assert count_of(trace) == len(expected)
    assert count_of(trace, "--filter", 'text startswith "GET"') == 1_200
    assert dprobes("log", trace, "--count", "status", "--filter", "status == 201").splitlines()[1].split()[:2] == [
        "201",
        str(sum(n % 2 and n % 7 > 0 for n in range(3_000))),
    ]
    if engine == "ebpf":
        frames = FrameSplitter()
        frames.push(trace.read_bytes())
        assert any(frame.kind == FrameKind.MIXED for frame in iter(frames.pull, None))


def test_a_trace_file_may_be_a_pipe(tmp_path: Path) -> None:
    pipe, got = tmp_path / "records.dpt", tmp_path / "got.dpt"
    os.mkfifo(pipe)
    with got.open("wb") as output, subprocess.Popen(["cat", pipe], stdout=output) as reader:
        command = [*DPROBES, "run", "malloc", "--engine", "ptrace", "-o", str(pipe), "--", "ls", "/"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
        assert (done.returncode, "error" in done.stderr) == (0, False), done.stderr
        assert reader.wait(TIMEOUT) == 0
    shown = subprocess.run([*DPROBES, "log", got], capture_output=True, text=True, check=True).stdout
    assert len(re.findall(r"  malloc  arg0=\d+$", shown, re.MULTILINE)) == 5
    assert pipe.is_fifo()
    to_stdout = tmp_path / "stdout.dpt"
    to_stdout.symlink_to("/dev/stdout")
    command = [
        *DPROBES,
        "run",
        "malloc",
        "--engine",
        "ptrace",
        "-o",
        str(to_stdout),
        "--",
        "sh",
        "-c",
        "ls / > /dev/null",
    ]
    piped = subprocess.run(command, capture_output=True, check=True, timeout=TIMEOUT).stdout
    again = subprocess.run([*DPROBES, "log", "/dev/stdin"], input=piped, capture_output=True, check=True).stdout
    assert again.count(b"  malloc  arg0=") == 5
