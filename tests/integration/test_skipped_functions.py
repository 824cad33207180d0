"""Functions that a handler skips: they are not executed, and return what the handler says."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.support import DPROBES

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

EITHER = pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])

COUNT = 10
SUM = COUNT * (COUNT - 1) // 2

SKIP_3 = """
    push r, arg0
    dup 1
    push 3
    sub
    jnz goes_on
    ros 1
    push 1
    add
    skip
goes_on:
    ros 1
    log 1
"""
"""Let tick(3) return 4 without its work; ``tick`` is called for the numbers from 0 on."""


@EITHER
def test_a_skipped_function_does_nothing_and_returns_the_value(build: Builder, run: Runner, i386: bool) -> None:
    program = build("hotloop.c", i386=i386)
    source = f"name = hotloop\noffset = tick\nminor = 1\n{SKIP_3}exit\n"
    result = run(source, ["--exit-status", "--", str(program), str(COUNT)], ["--allow-write"])
    # Any other value would let the program abort; it misses what the skipped call would have added.
    assert (result.stdout.strip(), result.status) == (str(SUM - 3), 1)
    assert result.words(size=4 if i386 else 8) == [[0], [1], [2], [], *([n] for n in range(4, COUNT))]
    assert (result.counts[1].hits, result.counts[1].records) == (COUNT, COUNT)


def test_the_return_of_a_skipped_function_is_no_hit(build: Builder, run: Runner) -> None:
    program = build("hotloop.c")
    source = f"name = hotloop\noffset = tick\nminor = 1\n{SKIP_3}exit\n"
    source += "offset = tick\nreturn = yes\nminor = 2\nexit\n"
    result = run(source, ["--", str(program), str(COUNT)], ["--allow-write"])
    assert result.stdout.strip() == str(SUM - 3)
    assert (result.counts[1].hits, result.counts[2].hits) == (COUNT, COUNT - 1)


def test_a_watched_return_address_does_not_stop_a_skip(build: Builder, run: Runner) -> None:
    # What a handler does is no access of the program: the watchpoint sees the additions only.
    program = build("hotloop.c")
    source = f"name = hotloop\noffset = tick\nminor = 1\n{SKIP_3}exit\n"
    source += "address = sum\nwatchpoint = w\nminor = 2\nexit\n"
    result = run(source, ["--", str(program), str(COUNT)], ["--allow-write"])
    assert result.stdout.strip() == str(SUM - 3)
    assert (result.counts[1].hits, result.counts[2].hits) == (COUNT, COUNT - 1)


@pytest.mark.parametrize("value", [0, 1, 7])
def test_a_library_function_of_a_real_program_is_skipped(run: Runner, value: int) -> None:
    source = f'name = "libc.so.6"\noffset = getppid\nminor = 1\npush {value}\nskip\n'
    script = "import os; print(os.getppid(), os.getpid() > 1)"
    result = run(source, ["--", "/usr/bin/python3", "-c", script], ["--allow-write"])
    assert result.stdout == f"{value} True\n"
    assert (result.counts[1].hits, result.counts[1].records) == (1, 1)


def messages(tmp_path: Path, program: str, *arguments: str) -> str:
    path = tmp_path / "skip.rpn"
    path.write_text(program)
    command = [*DPROBES, "check", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_only_where_a_function_begins_can_it_be_skipped(build: Builder, tmp_path: Path) -> None:
    program = build("hotloop.c")
    source = f'name = "{program}"\noffset = tick + 7\npush 1\nskip\n'
    said = messages(tmp_path, source, "--allow-write")
    assert "'skip' returns from the function that begins at the probepoint, but none begins at tick+0x7\n" in said
    hint = "only there the return address is on top of the stack: write 'offset =' with the function's name"
    assert f"hint: {hint}\n" in said


def test_skip_writes_to_the_target(build: Builder, tmp_path: Path) -> None:
    source = f'name = "{build("hotloop.c")}"\noffset = tick\npush 1\nskip\n'
    said = messages(tmp_path, source)
    assert "error: 'skip' writes to the target" in said


def test_the_ebpf_engine_names_the_engine_that_can_skip(build: Builder, run: Runner) -> None:
    program = build("hotloop.c")
    source = "name = hotloop\noffset = tick\npush 1\nskip\n"
    result = run(source, ["--", str(program)], ["--allow-write", "--engine", "ebpf"])
    assert "'skip' needs returning at once from functions of programs, which the ebpf engine lacks\n" in result.stderr
    assert "hint: use --engine ptrace with -c COMMAND or -p PID\n" in result.stderr


def test_where_there_is_no_return_address_the_function_is_executed_and_that_is_said(
    build: Builder, run: Runner
) -> None:
    program = build("badstack.c", "-no-pie")
    result = run(
        "name = badstack\noffset = target\nminor = 1\nlogonfault = yes\npush 1\nskip\n",
        ["--", str(program)],
        ["--allow-write"],
    )
    assert result.stdout == "fault\n"
    said = r"warning: 'skip' was not carried out in process \d+: its return address cannot be used\n"
    assert re.search(said, result.stderr), result.stderr
