"""Libraries of other users that a traced process maps are read by another process, and probed as others are."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from support.foreign_files import SYMTAB, claim

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Runner

USER = 54321
NAME = "libforeign.so.1"
LIBRARY = "__attribute__((noinline)) int tick(int x) { return x ? tick(x - 1) + 1 : 0; }"
PROGRAM = "int tick(int);\nint main(void) { return tick(2) != 2; }"
SOURCE = f'name = "{NAME}"\noffset = tick\nminor = 1\nexit\noffset = tick\nreturn = yes\nminor = 2\nexit\n'


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return a program with a library that belongs to another user."""
    if os.geteuid() != 0:
        pytest.skip("needs root: a file is given to another user")
    compile_ = ["gcc", "-O1", "-fno-optimize-sibling-calls", "-x", "c", "-"]
    library, program = tmp_path / NAME, tmp_path / "program"
    shared = ["-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", str(library)]
    subprocess.run([*compile_, *shared], input=LIBRARY, text=True, check=True)
    linked = ["-o", str(program), "-x", "none", str(library), f"-Wl,-rpath,{tmp_path}"]
    subprocess.run([*compile_, *linked], input=PROGRAM, text=True, check=True)
    os.chown(library, USER, USER)
    return program


def test_a_library_of_another_user_is_probed(program: Path, run: Runner) -> None:
    result = run(SOURCE, [str(program)], ["--engine", "ptrace"])
    assert result.stderr.count("MISMATCH") == 0
    assert [record["minor"] for record in result.records] == [1, 1, 1, 2, 2, 2]


def test_a_library_that_cannot_be_read_is_not_probed_and_the_program_goes_on(program: Path, run: Runner) -> None:
    library = program.parent / NAME
    hole = program.parent / "hole"
    claim(library, hole, SYMTAB, 20 << 30)
    os.chown(hole, USER, USER)
    hole.rename(library)
    result = run(SOURCE, [str(program)], ["--engine", "ptrace", "--exit-status"])
    assert f"'{library}' is a hole for the most part" in result.stderr
    assert result.records == []
