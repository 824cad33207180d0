"""A Ctrl-C while the output takes nothing: what was recorded is written as a whole when it is read again."""

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
ATOMIC = 4096
"""Bytes of a write to a pipe that are written together or not at all (pipe(7), PIPE_BUF)."""
_WRITE = "1"  # its number


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def blocked_in(pid: int) -> int:
    """Return how many bytes a process is about to write to standard output, where it has to wait; 0 if it does not."""
    number, *arguments = Path(f"/proc/{pid}/syscall").read_text().split()
    return int(arguments[2], 16) if number == _WRITE and int(arguments[0], 16) == 1 else 0


def await_blocked(pid: int, reader: int) -> bytes:
    """Wait until a process waits in the middle of a write, of which it has done a part; return what was read before."""
    read = b""

    def look() -> bool:
        nonlocal read
        if 0 < (size := blocked_in(pid)) <= ATOMIC:
            read += os.read(reader, 1 << 16)
        return size > ATOMIC

    await_true(look, "a long write that waits", TIMEOUT)
    return read


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
        arguments = ["run", str(program), "--engine", "ebpf", "-p", str(target.pid), "--no-follow", "--format"]
        process = subprocess.Popen(
            [*DPROBES, *arguments, format_name], stdout=writer, stderr=subprocess.PIPE, text=True, env=environment
        )
        os.close(writer)
        data = await_blocked(process.pid, reader)
        process.send_signal(signal.SIGINT)
        await_true(lambda: not is_pending(process.pid, signal.SIGINT), "the end of the wait")
        data += file.read()
        _, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, said
    counts = read_counts(said)[1]
    lines = data.decode().splitlines()
    assert counts.lost == 0
    assert len(lines) == counts.records
    if format_name == "json":
        assert {json.loads(line)["minor"] for line in lines} == {1}


@pytest.mark.parametrize("name", ["pipe.dpt", "pipe.dptz"])
def test_a_trace_file_is_no_pipe(build: Builder, tmp_path: Path, name: str) -> None:
    program, pipe = tmp_path / "stepped.rpn", tmp_path / name
    program.write_text(STEPPED)
    os.mkfifo(pipe)
    done = subprocess.run(
        [*DPROBES, "run", str(program), "--engine", "ebpf", "-o", str(pipe), "--", str(build("torture.c")), "1", "1"],
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"dprobes: error: '{pipe}'" in done.stderr
