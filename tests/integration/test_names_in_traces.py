"""A trace file shows the names of addresses where neither the processes nor the files are: as on another machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dprobes.trace.trace_frames import FRAME_HEAD, FrameKind, FrameSplitter, json_frame, split_json
from integration.support import TIMEOUT, await_true, environment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from integration.support import Builder

STACKS = "name = callstacks\nlogmax = 2048\nmajor = 1\noffset = here\nminor = 1\nlog ustack\nexit\n"
ENGINES = ["ptrace", pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="not root"))]
FLAGS = ("-O1", "-pthread", "-fno-optimize-sibling-calls")


def dprobes(*arguments: object) -> str:
    command = [sys.executable, "-m", "dprobes", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def carried_away(trace: Path, to: Path, *, with_names: bool = True) -> Path:
    """Copy a trace file as if another machine had written it; what is not whole at its end stays as it is."""
    splitter = FrameSplitter()
    data = trace.read_bytes()
    splitter.push(data)
    copy = b""
    while (frame := splitter.pull()) is not None:
        end = frame.position + FRAME_HEAD.size + len(frame.body)
        if frame.kind == FrameKind.HEADER:
            copy += json_frame(FrameKind.HEADER, split_json(frame, "") | {"host": "elsewhere", "boot_id": "another"})
        elif with_names or frame.kind != FrameKind.NAMES:
            copy += data[frame.position : end]
    to.write_bytes(copy + data[splitter.position :])
    return to


def whole_frames(data: bytes) -> list[bytes]:
    """Return the bytes of each frame of a trace file."""
    splitter, frames = FrameSplitter(), []
    splitter.push(data)
    while (frame := splitter.pull()) is not None:
        frames.append(data[frame.position : frame.position + FRAME_HEAD.size + len(frame.body)])
    return frames


def waiting_run(
    tmp_path: Path, source: str, program: Path, engine: str, *options: object
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a run on a program that waits at its end for us."""
    text, trace = tmp_path / "stacks.rpn", tmp_path / "stacks.dpt"
    text.write_text(source)
    command = [sys.executable, "-m", "dprobes", "run", text, "--engine", engine, "-o", trace, *options]
    client = subprocess.Popen(
        [*map(str, command), "--", str(program), "wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    return client, trace


def ended(client: subprocess.Popen[bytes]) -> None:
    assert client.stdin is not None
    client.stdin.close()
    assert client.wait(TIMEOUT) == 0


def functions_of(text: str) -> list[list[str]]:
    """Return the functions of each stack that was printed, the innermost first."""
    stacks: list[list[str]] = []
    for line in text.splitlines():
        if not line.startswith("    "):
            stacks.append([])
        else:
            match = re.fullmatch(r" +(\w+)(\+0x[0-9a-f]+)? \[[^]]+\]", line)
            stacks[-1].append(line.strip() if match is None else match[1])
    return stacks


def has_stacks(trace: Path, least: int) -> bool:
    return trace.exists() and int(dprobes("log", trace, "--total")) >= least


@pytest.mark.parametrize("engine", ENGINES)
def test_another_machine_shows_the_names_of_stacks(build: Builder, tmp_path: Path, engine: str) -> None:
    program = tmp_path / "callstacks"
    shutil.copy(build("callstacks.c", *FLAGS), program)
    client, trace = waiting_run(tmp_path, STACKS, program, engine)
    await_true(lambda: has_stacks(trace, 66), "all records")
    ended(client)
    below = ["main", "__libc_start_call_main", "__libc_start_main", "_start"]
    program.rename(tmp_path / "gone")
    away = carried_away(trace, tmp_path / "away.dpt")
    text = dprobes("log", away)
    stacks = functions_of(text)
    for depth in range(60):
        assert stacks[depth] == ["here", *["down"] * (depth + 1), *below]
    assert stacks[-1][:11] == ["here", *["down"] * 10]
    # Without the frame, as in files of before, there are numbers; the file can be read all the same.
    bare = functions_of(dprobes("log", carried_away(trace, tmp_path / "bare.dpt", with_names=False)))
    assert len(bare) == len(stacks)
    assert {stack[0] for stack in bare} == {"here"}
    assert all(re.fullmatch(r"0x[0-9a-f]+|<the stack cannot be read here>", each) for one in bare for each in one[1:])
    (tmp_path / "gone").rename(program)
    assert functions_of(dprobes("log", trace)) == stacks


@pytest.mark.parametrize("engine", ENGINES)
def test_a_torn_file_keeps_the_names_that_were_written(build: Builder, tmp_path: Path, engine: str) -> None:
    program = build("callstacks.c", *FLAGS)
    client, trace = waiting_run(tmp_path, STACKS, program, engine)
    await_true(lambda: has_stacks(trace, 66), "all records")
    before = trace.read_bytes()
    client.send_signal(signal.SIGKILL)
    client.wait()
    assert client.stdin is not None
    client.stdin.close()
    torn = tmp_path / "torn.dpt"
    # All records may be in one frame: the frame that the power cut is one more of them.
    torn.write_bytes(before + whole_frames(before)[-1][:-7])
    stacks = functions_of(dprobes("log", carried_away(torn, tmp_path / "away.dpt")))
    assert len(stacks) >= 66
    assert {stack[-1] for stack in stacks} <= {"_start", "clone3", "__clone3", "<the stack cannot be read here>"}
    assert not any(each.startswith("0x") for stack in stacks for each in stack)


def test_fields_and_samples_have_names_in_every_format(build: Builder, tmp_path: Path) -> None:
    source = "name = callstacks\nmajor = 1\noffset = here\nminor = 1\npush r, rip\nlog 1\nexit\n"
    (tmp_path / "templates.lst").write_text("1 a.fmt\n")
    (tmp_path / "a.fmt").write_text('major = 1\nminor = 1\nfmt = "at=%a"\n')
    client, trace = waiting_run(tmp_path, source, build("callstacks.c", *FLAGS), "ptrace", "--templates", tmp_path)
    await_true(lambda: has_stacks(trace, 66), "all records")
    ended(client)
    away = carried_away(trace, tmp_path / "away.dpt")
    for name in ("text", "dprobes", "csv"):
        assert dprobes("log", away, "--format", name).count("at=here [callstacks]") >= 66
    counted = dprobes("log", away, "--count", "at").splitlines()
    assert [line.split() for line in counted] == [["at", "count", "share"], ["here", "[callstacks]", "69", "100.0%"]]


@pytest.mark.parametrize("engine", ENGINES)
def test_addresses_are_counted_by_their_names(build: Builder, tmp_path: Path, engine: str) -> None:
    program, text = build("callstacks.c", *FLAGS), tmp_path / "count.rpn"
    text.write_text(STACKS.replace("callstacks", f'"{program}"').replace("log ustack", "push r, rip\nlog 1"))
    run = ("run", text, "--engine", engine)
    expected = ["here", "[callstacks]", "69", "100.0%"]
    assert expected in [line.split() for line in dprobes(*run, "--count", "rip", "--", program).splitlines()]
    trace = tmp_path / "count.dpt"
    dprobes(*run, "-o", trace, "--", program)
    away = carried_away(trace, tmp_path / "away.dpt")
    assert expected in [line.split() for line in dprobes("log", away, "--count", "rip").splitlines()]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shell", ["{0}", "{0}; {0} | cat; exec {0}", "({0}; exec {0})"], ids=["one", "pipe", "forks"])
def test_processes_that_have_ended_have_names(build: Builder, tmp_path: Path, engine: str, shell: str) -> None:
    program, text = build("callstacks.c", *FLAGS), tmp_path / "stacks.rpn"
    text.write_text(STACKS.replace("callstacks", f'"{program}"'))
    trace = tmp_path / "stacks.dpt"
    command = shell.format(program)
    dprobes("run", text, "--engine", engine, "-o", trace, "--", "/bin/sh", "-c", command)
    runs = shell.count("{0}")
    stacks = functions_of(dprobes("log", carried_away(trace, tmp_path / "away.dpt")))
    assert len(stacks) == 69 * runs
    below = ["main", "__libc_start_call_main", "__libc_start_main", "_start"]
    for depth in range(60):
        assert stacks.count(["here", *["down"] * (depth + 1), *below]) == runs
    assert not [each for stack in stacks for each in stack if each.startswith("0x")]


def frames_of(trace: Path) -> Sequence[int]:
    splitter = FrameSplitter()
    splitter.push(trace.read_bytes())
    return [frame.kind for frame in iter(splitter.pull, None)]


def test_what_shows_no_addresses_has_no_names(build: Builder, tmp_path: Path) -> None:
    source = STACKS.replace("log ustack", "push 1\nlog 1")
    client, trace = waiting_run(tmp_path, source, build("callstacks.c", *FLAGS), "ptrace")
    await_true(lambda: has_stacks(trace, 66), "all records")
    ended(client)
    assert FrameKind.NAMES not in frames_of(trace)


TABLES = """
table = stacks, count, ustack[3]
table = callers, count, address
offset = here
    tally stacks
    push r, rip
    tally callers
    abort
"""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option", ["-o", "--log-target"])
def test_another_machine_shows_the_names_of_keys_of_tables(
    build: Builder, tmp_path: Path, engine: str, option: str
) -> None:
    program, text, trace = tmp_path / "callstacks", tmp_path / "tables.rpn", tmp_path / "tables.dpt"
    shutil.copy(build("callstacks.c", *FLAGS), program)
    text.write_text(f'name = "{program}"\n{TABLES}')
    printed = dprobes("run", text, "--engine", engine, option, trace, "--", program)
    program.unlink()
    away = dprobes("log", carried_away(trace, tmp_path / "away.dpt"), "--tables")
    assert "@callers[here [callstacks]]: 69\n" in away
    assert re.search(r"@stacks\[\n +here \[callstacks\]\n +down\+0x[0-9a-f]+ \[callstacks\]\n", away)
    assert "0x" not in re.sub(r"\+0x[0-9a-f]+ \[", "[", away)
    assert all(line in printed for line in away.splitlines())
    bare = dprobes("log", carried_away(trace, tmp_path / "bare.dpt", with_names=False), "--tables")
    assert re.search(r"@callers\[0x[0-9a-f]+\]: 69\n", bare)
