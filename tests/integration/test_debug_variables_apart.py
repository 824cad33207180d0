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
@pytest.mark.parametrize("is_packed", [False, True])
def test_values_are_those_of_gdb_where_debug_information_is_apart(
    build: Builder, tmp_path: Path, level: str, version: int, *, is_packed: bool
) -> None:
    made = build("variables.c", level, *FLAGS, "-gsplit-dwarf", f"-gdwarf-{version}", name=f"apart{level}")
    program = tmp_path / f"apart{level}"
    shutil.copy(made, program)
    # gdb 13 ends with a segmentation fault in packages of DWARF 5.
    is_plain = level == "-O0"
    answers = asked(program, tmp_path, seed=30 + LEVELS.index(level), is_plain=is_plain)
    if not is_packed:
        compare(program, answers, tmp_path, is_plain=is_plain)
        return
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
@pytest.mark.parametrize("form", ["-gdwarf-4", "-gdwarf-5", "-gsplit-dwarf"])
def test_values_are_those_of_gdb_in_programs_of_clang(tmp_path: Path, level: str, form: str) -> None:
    if shutil.which("clang") is None:
        pytest.skip("clang is not installed")
    program, other = tmp_path / f"clang{level}", tmp_path / f"asked{level}"
    for output, flag in ((program, form), (other, "-gdwarf-5")):
        words = ["clang", level, "-fno-inline", *FLAGS, flag, str(PROGRAMS / "variables.c"), "-o", str(output)]
        subprocess.run(words, check=True, cwd=tmp_path)
    # gdb 13 does not find the lists of locations that clang puts aside; the code is the same.
    is_plain = level == "-O0"
    answers = asked(other, tmp_path, seed=60 + LEVELS.index(level), is_plain=is_plain)
    compare(program, answers, tmp_path, least=150, is_plain=is_plain)
