"""Debug information that compilers put aside, or that other compilers write: values are those of gdb."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.debug_comparison import FLAGS, asked, compare
from integration.support import PROGRAMS, Builder

if TYPE_CHECKING:
    from pathlib import Path

LEVELS = ["-O0", "-O1", "-O2", "-O3"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("version", [4, 5])
def test_values_are_those_of_gdb_where_debug_information_is_apart(
    build: Builder, tmp_path: Path, level: str, version: int
) -> None:
    """In an object of its own, and in a package."""
    made = build("variables.c", level, *FLAGS, "-gsplit-dwarf", f"-gdwarf-{version}", name=f"apart{level}")
    program = tmp_path / f"apart{level}"
    shutil.copy(made, program)
    # gdb 13 ends with a segmentation fault in packages of DWARF 5.
    is_plain = level == "-O0"
    answers = asked(program, tmp_path, seed=30 + LEVELS.index(level), is_plain=is_plain)
    compare(program, answers, tmp_path, is_plain=is_plain)
    tool = "dwp" if version == 4 else "llvm-dwp"  # that of GNU does not know DWARF 5
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    (unit,) = made.parent.glob("*.dwo")
    subprocess.run([tool, "-e", program, "-o", f"{program}.dwp"], check=True, cwd=made.parent)
    hidden = unit.rename(unit.with_suffix(".hidden"))
    try:
        compare(program, answers, tmp_path, is_plain=is_plain)
    finally:
        hidden.rename(unit)


@pytest.mark.parametrize("level", LEVELS)
def test_values_are_those_of_gdb_in_programs_of_clang(tmp_path: Path, level: str) -> None:
    if shutil.which("clang") is None:
        pytest.skip("clang is not installed")
    programs = {form: tmp_path / f"clang{form}{level}" for form in ("-gdwarf-4", "-gdwarf-5", "-gsplit-dwarf")}
    for form, program in programs.items():
        words = ["clang", level, "-fno-inline", *FLAGS, form, str(PROGRAMS / "variables.c"), "-o", str(program)]
        subprocess.run(words, check=True, cwd=tmp_path)
    # gdb 13 does not find the lists of locations that clang puts aside; the code is the same.
    is_plain = level == "-O0"
    answers = asked(programs["-gdwarf-5"], tmp_path, seed=60 + LEVELS.index(level), is_plain=is_plain)
    for program in programs.values():
        compare(program, answers, tmp_path, least=150, is_plain=is_plain)
