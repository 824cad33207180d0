"""``doctor`` tries real stubs, and lets their programs go on."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.gdb.test_user_stubs import StubbedProgram
from integration.support import DPROBES, TIMEOUT, environment

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder


def doctor(engine: str) -> tuple[int, list[str], str]:
    command = [*DPROBES, "doctor", "--engine", engine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("name", ["gdbserver", "qemu-x86_64"])
def test_what_a_stub_lacks(build: Builder, tmp_path: Path, name: str) -> None:
    program = StubbedProgram(name, tmp_path, [str(build("hotloop.c")), "10"])
    status, lines, error = doctor(f"gdb={program.endpoint}")
    assert status == 0, error
    has_watchpoints = name == "gdbserver"
    answer = "yes" if has_watchpoints else "no "
    assert lines[:2] == [
        f"yes  reach the stub at {program.endpoint}",
        "yes  a process of Linux or a machine: a process",
    ]
    assert "yes  single steps" in lines
    assert "yes  breakpoints" in lines
    assert f"{answer}  watchpoints for writes" in lines
    assert ("     remedy: programs with 'watchpoint = w' are refused" in lines) != has_watchpoints
    assert "45\n" in program.output()


def test_what_cannot_be_tried(tmp_path: Path) -> None:
    status, _, error = doctor("ptrace")
    assert status == 2
    assert error.splitlines()[-1] == "Error: 'ptrace' cannot be tested: expected gdb=ENDPOINT"
    status, lines, _ = doctor(f"gdb={tmp_path}")
    assert status == 1
    assert lines[0].startswith(f"no   reach the stub at {tmp_path}: there is no stub at {tmp_path}: ")
