"""What ``list`` shows of modules, processes and the kernel, compared with nm and /proc."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dprobes.cli.main import run

LIBC = Path("/lib/x86_64-linux-gnu/libc.so.6")


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of a table, which at least two blanks separate, without its header."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()[1:]]


def test_functions_are_those_of_nm_with_their_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", f"{LIBC}:str*"]) == 0
    rows = rows_of(capsys.readouterr().out)
    lines = subprocess.run(["nm", "-DS", "--defined-only", LIBC], capture_output=True, text=True, check=True).stdout
    known = {}
    for address, size, _, name in (line.split() for line in lines.splitlines() if len(line.split()) == 4):
        known[name.partition("@")[0]] = (int(address, 16), int(size, 16))
    named = [row for row in rows if row[0] in known]
    assert len(named) > 20
    for name, size, offset, cost in named:
        assert (int(offset, 16), int(size)) == known[name]  # its code lies in the file as in memory
        assert cost.startswith(("cheap", "slow", "none: "))


def test_modules_of_a_process_have_the_names_that_programs_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "-p", str(os.getpid())]) == 0
    rows = rows_of(capsys.readouterr().out)
    mapped = {
        line.split(maxsplit=5)[5].removesuffix(" (deleted)")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.split()[1][2] == "x" and line.split(maxsplit=5)[5:] and "/" in line
    }
    assert {path for *_, path in rows} == mapped
    assert any(row[0] == "libc.so.6" and row[-1] == str(LIBC.resolve()) for row in rows)


def test_a_program_started_by_a_link_has_the_name_of_the_link(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program, link = tmp_path / "check-rdb", tmp_path / "server"
    shutil.copy("/bin/cat", program)
    link.symlink_to(program.name)
    with subprocess.Popen([link], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x"
        assert run(["list", "-p", str(process.pid)]) == 0
        process.stdin.close()
    assert ["server", "-", str(program)] in rows_of(capsys.readouterr().out)


def test_system_calls_match_by_how_they_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "syscall:openat"]) == 0
    assert capsys.readouterr().out == "syscall openat\nsyscall openat2\n"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["list"], 2, "Error: name a module, or a process with -p PID"),
        (["list", "libx.so.77"], 1, "dprobes: error: there is no module 'libx.so.77' on this machine"),
        (["list", f"{LIBC}:nothing*"], 1, f"dprobes: error: 'nothing*' matches no function of '{LIBC.resolve()}'"),
        (["list", "syscall:nothing"], 1, "dprobes: error: no system call matches 'nothing*'"),
    ],
)
def test_what_cannot_be_listed_is_said(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str
) -> None:
    assert run(arguments) == status
    assert said in capsys.readouterr().err
