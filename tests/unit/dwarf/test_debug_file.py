# ruff: noqa: SIM300 - expected == actual
"""Debug information in a file for each unit."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING

import pytest

from dprobes.dwarf.dwarf_numbers import At, Tag
from dprobes.dwarf.entry_search import function_at
from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import ElfFile
from unit.dwarf.conftest import compiled, read
from unit.dwarf.test_corrupt_files import damaged, look
from unit.dwarf.test_entry_search import address_of

if TYPE_CHECKING:
    from pathlib import Path

MUTANTS = 60


@pytest.fixture
def moved(programs: Path, tmp_path: Path) -> Path:
    """A program whose debug information is beside it, and no longer where it was compiled."""
    path = compiled(programs, "d5-split")
    shutil.copy(path, tmp_path / "d5-split")
    shutil.copy(path.with_suffix(".dwo"), tmp_path / "d5-split.dwo")
    return tmp_path / "d5-split"


def test_entries_are_in_the_file_of_the_unit(programs: Path) -> None:
    path = compiled(programs, "d5-split")
    found = function_at(read(path), address_of(path, "work"))
    assert found is not None
    assert path.with_suffix(".dwo") == found.unit.file.elf.path
    assert ["node", "count", "text", "weight", "small"] == [
        child.name for child in found.children() if child.tag == Tag.FORMAL_PARAMETER
    ]
    assert address_of(path, "work") == found.address(At.LOW_PC)


def test_a_file_of_another_build_is_an_error(moved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(moved.with_suffix(".dwo").read_bytes())
    section = next(s for s in ElfFile.open(moved.with_suffix(".dwo")).sections if s.name == ".debug_info.dwo")
    data[section.offset + 12] ^= 1  # the number that both parts have
    moved.with_suffix(".dwo").write_bytes(data)
    # Only the file beside the program is left.
    monkeypatch.setattr("dprobes.dwarf.debug_entries.Entry.text", _without_directory)
    with pytest.raises(TargetError) as caught:
        function_at(read(moved), address_of(moved, "work"))
    message = f"'{moved}' has debug information in 'd5-split.dwo', which is not there, or of another build"
    assert message == caught.value.message
    assert (
        "put the .dwo files or their .dwp package where the program is, or compile it without -gsplit-dwarf"
        == caught.value.hint
    )


def _without_directory(_entry: object, attribute: int) -> str | None:
    return "d5-split.dwo" if attribute == At.DWO_NAME else "/nowhere"


def test_damaged_files_of_units_end_in_errors(moved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = moved.with_suffix(".dwo")
    data = beside.read_bytes()
    sections = [s for s in ElfFile.open(beside).sections if s.name.startswith(".debug") and s.size]
    address = address_of(moved, "work")
    monkeypatch.setattr("dprobes.dwarf.debug_file.Path", _Elsewhere(beside))
    chance = random.Random("split")
    errors = 0
    for number in range(MUTANTS):
        section = sections[number % len(sections)]
        beside.write_bytes(damaged(data, range(section.offset, section.offset + section.size), chance))
        try:
            found = function_at(read(moved), address)
            if found is not None:
                look(found)
        except TargetError:
            errors += 1
    assert 0 < errors < MUTANTS


class _Elsewhere:
    """Stands for a path: every file is the one beside the program."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, _name: str) -> Path:
        return self.path.parent
