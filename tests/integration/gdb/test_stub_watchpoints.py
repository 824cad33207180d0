"""Watchpoints behind gdbserver, which has the processor's; QEMU's emulation of processes has none, and says so."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from integration.gdb.test_user_stubs import StubbedProgram
from integration.support import TIMEOUT, await_true

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Builder, Runner

pytestmark = pytest.mark.usefixtures("debug_registers")


def watch(access: str, minor: int = 1, place: str = "cell:cell+7", keywords: str = "") -> str:
    return (
        f"address = {place}\nwatchpoint = {access}\nminor = {minor}\n{keywords}push cell; push mem, u64; log 1\nexit\n"
    )


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[list[StubbedProgram]]:
    started: list[StubbedProgram] = []
    yield started
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


def served(programs: list[StubbedProgram], directory: Path, *command: object) -> StubbedProgram:
    programs.append(StubbedProgram("gdbserver", directory, [str(word) for word in command]))
    return programs[-1]


def test_writes_and_accesses(build: Builder, run: Runner, tmp_path: Path, programs: list[StubbedProgram]) -> None:
    """The handler sees the value after the access; an execute watchpoint is hit before the instruction."""
    path = build("watched.c")
    for access, minor, hits in (("w", 1, 40), ("rw", 2, 80), ("x", 3, 40)):
        place = "put" if access == "x" else "cell:cell+7"
        program = served(programs, tmp_path, path, "threads", 20, 2)
        result = run(f'name = "{path}"\n{watch(access, minor, place)}', [], program.options)
        assert result.status == 0, result.stderr
        assert result.counts[minor].hits == result.counts[minor].records == hits
        assert "40 40\n" in program.output()
    program = served(programs, tmp_path, path, "threads", 20, 1)
    result = run(f'name = "{path}"\n{watch("w")}', [], program.options)
    assert result.words(1) == [[n] for n in range(20)]


def test_instructions_under_a_breakpoint_hit_as_well(
    build: Builder, run: Runner, tmp_path: Path, programs: list[StubbedProgram]
) -> None:
    path = build("watched.c")
    program = served(programs, tmp_path, path, "threads", 15, 1)
    text = f'name = "{path}"\noffset = put\nminor = 2\nexit\n{watch("w")}'
    result = run(text, [], program.options)
    assert result.status == 0, result.stderr
    assert {minor: count.hits for minor, count in result.counts.items()} == {1: 15, 2: 15}
    assert "15 15\n" in program.output()


def test_maxhits_takes_a_watchpoint_out(
    build: Builder, run: Runner, tmp_path: Path, programs: list[StubbedProgram]
) -> None:
    path = build("watched.c")
    program = served(programs, tmp_path, path, "threads", 30, 1)
    result = run(f'name = "{path}"\n{watch("w", keywords="maxhits = 4" + chr(10))}', [], program.options)
    assert result.words(1) == [[0], [1], [2], [3]]
    assert "30 30\n" in program.output()


def test_a_stub_without_watchpoints(
    build: Builder, run: Runner, tmp_path: Path, programs: list[StubbedProgram]
) -> None:
    path = build("watched.c")
    programs.append(StubbedProgram("qemu-x86_64", tmp_path, [str(path), "threads", "5", "1"]))
    result = run(f'name = "{path}"\n{watch("rw")}', [], programs[-1].options)
    assert result.status == 1
    assert result.stderr.splitlines()[-2:] == [
        f"dprobes: error: the stub {programs[-1].endpoint} has no watchpoints for reads and writes",
        "hint: QEMU's emulation of a process has none; gdbserver and emulated machines have",
    ]
    assert "5 5\n" in programs[-1].output()


def test_a_program_goes_on_without_watchpoints_when_dprobes_is_killed(
    build: Builder, run: Runner, tmp_path: Path, programs: list[StubbedProgram]
) -> None:
    path = build("watched.c")
    program = served(programs, tmp_path, path, "threads", 3000, 1)
    client, output = run.start(f'name = "{path}"\n{watch("w")}', [], program.options)
    await_true(lambda: output.exists() and output.stat().st_size > 0, "a record")
    time.sleep(0.05)
    client.send_signal(signal.SIGKILL)
    client.communicate(timeout=TIMEOUT)
    await_true(lambda: "3000 3000\n" in program.log, "the end of the program")
