"""Pipes as output: what was recorded is written as a whole, after a Ctrl-C while the pipe takes nothing as well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import DPROBES, TIMEOUT, await_line, await_true, read_counts, running, status_field

if TYPE_CHECKING:
    from integration.support import Builder

STEPPED = "name = torture\noffset = stepped\nminor = 1\nmaxhits = 40000\nlogonfault = yes\npush r, pc\nlog 1\nexit\n"
_POLL = "7"  # its number


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def is_blocked(pid: int) -> bool:
    """Return whether a process waits until standard output takes something."""
    number, *arguments = Path(f"/proc/{pid}/syscall").read_text().split()
    return number == _POLL and int(arguments[1], 16) == 2 and int(arguments[2], 16) & 0xFFFFFFFF == 0xFFFFFFFF


def is_pending(pid: int, number: int) -> bool:
    """Return whether a process has a signal still to take."""
    return any(int(status_field(pid, name), 16) & 1 << number - 1 for name in ("ShdPnd", "SigPnd"))


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("format_name", ["text", "json"])
def test_nothing_is_lost(build: Builder, tmp_path: Path, format_name: str, unbuffered: str) -> None:
    program = tmp_path / "stepped.rpn"
    program.write_text(STEPPED)
    reader, writer = os.pipe()
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with running(build("torture.c"), 600, 2) as target, os.fdopen(reader, "rb") as file:
        await_line(target)
        arguments = [
            "run",
            "--explain",
            str(program),
            "--engine",
            "ebpf",
            "-p",
            str(target.pid),
            "--no-follow",
            "--format",
        ]
        process = subprocess.Popen(
            [*DPROBES, *arguments, format_name], stdout=writer, stderr=subprocess.PIPE, text=True, env=environment
        )
        os.close(writer)
        await_true(lambda: is_blocked(process.pid), "a write that waits", TIMEOUT)
        process.send_signal(signal.SIGINT)
        await_true(lambda: not is_pending(process.pid, signal.SIGINT), "the end of the wait")
        data = file.read()
        _, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, said
    counts = read_counts(said)[1]
    lines = data.decode().splitlines()
    assert counts.lost == 0
    assert len(lines) == counts.records
    if format_name == "json":
        assert {json.loads(line)["minor"] for line in lines} == {1}


@pytest.mark.parametrize("name", ["pipe.dpt", "pipe.dptz"])
def test_a_trace_file_may_be_a_pipe(build: Builder, tmp_path: Path, name: str) -> None:
    program, pipe, got = tmp_path / "stepped.rpn", tmp_path / name, tmp_path / f"got-{name}"
    program.write_text(STEPPED)
    os.mkfifo(pipe)
    arguments = ["--engine", "ebpf", "-o", str(pipe), "--", str(build("torture.c")), "1", "1"]
    with running("cp", pipe, got) as reader:
        done = subprocess.run(
            [*DPROBES, "run", "--explain", str(program), *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert reader.wait(TIMEOUT) == 0
    counts = read_counts(done.stderr)[1]
    shown = subprocess.run([*DPROBES, "log", str(got), "--format", "json"], capture_output=True, text=True, check=True)
    records = [json.loads(line) for line in shown.stdout.splitlines()]
    assert counts.lost == 0
    assert len(records) == counts.records > 0
    assert {record["minor"] for record in records} == {1}
    assert pipe.is_fifo()
