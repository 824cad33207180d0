"""Where a module's first and last instructions are executed, against what nm says of functions of these names."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.module_outline import first_executed, last_executed

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
__attribute__((constructor)) void begin(void) { }
__attribute__((destructor)) void finish(void) { }
int value;
#ifdef PROGRAM
int main(void) { return value; }
#endif
"""


def built(tmp_path: Path, *flags: str) -> tuple[ElfFile, dict[str, int]]:
    source, output = tmp_path / "x.c", tmp_path / "x"
    source.write_text(SOURCE)
    subprocess.run(["gcc", "-o", output, source, *flags], check=True)
    names = subprocess.run(["nm", output], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in names.splitlines()]
    return ElfFile.open(output), {row[2]: int(row[0], 16) for row in rows if len(row) == 3}


@pytest.mark.parametrize("kind", ["-pie", "-no-pie", "-static", "-static-pie"])
def test_a_program_starts_at_its_entry_and_stays(tmp_path: Path, kind: str) -> None:
    elf, symbols = built(tmp_path, "-DPROGRAM", kind)
    assert first_executed(elf)[0] == symbols["_start"]
    assert last_executed(elf) == ()


def test_a_library_starts_with_its_initialisation_and_ends_with_its_finalisation(tmp_path: Path) -> None:
    elf, symbols = built(tmp_path, "-shared", "-fPIC")
    assert first_executed(elf) == (symbols["_init"], symbols["frame_dummy"])
    assert last_executed(elf) == (symbols["_fini"],)


def test_a_library_without_start_files_has_its_constructors_only(tmp_path: Path) -> None:
    elf, symbols = built(tmp_path, "-shared", "-fPIC", "-nostartfiles")
    assert first_executed(elf) == (symbols["begin"],)
    assert last_executed(elf) == (symbols["finish"],)


def test_a_library_without_any_code_of_that_kind_has_no_known_start(tmp_path: Path) -> None:
    source = tmp_path / "y.c"
    source.write_text("int value;\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-nostartfiles", "-o", tmp_path / "y", source], check=True)
    elf = ElfFile.open(tmp_path / "y")
    assert first_executed(elf) == ()
    assert last_executed(elf) == ()
