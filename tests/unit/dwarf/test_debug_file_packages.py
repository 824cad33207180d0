"""Packages of debug information that was put aside: the same entries, and errors for whatever is damaged."""

from __future__ import annotations

import random
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.dwarf.dwarf_numbers import At, Tag
from dprobes.dwarf.entry_search import entries_named, function_at
from dprobes.errors import TargetError
from dprobes.target.elf.debug_sections import Package, find_package
from dprobes.target.elf.elf_file import ElfFile
from unit.dwarf.conftest import compiled, read
from unit.dwarf.test_corrupt_files import damaged, look
from unit.dwarf.test_entry_search import address_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dprobes.dwarf.debug_entries import Entry
    from dprobes.dwarf.debug_file import DebugFile

MUTANTS = 120
TOOLS = {"d4-split": "dwp", "d4-split-types": "dwp", "d5-split": "llvm-dwp"}
"""What packs each program: the tool of GNU does not know DWARF 5, that of LLVM never ends with gcc's types in it."""


@pytest.fixture(params=sorted(TOOLS))
def packed(request: pytest.FixtureRequest, programs: Path, tmp_path: Path) -> Path:
    """A program with a package beside it."""
    path, tool = compiled(programs, request.param), TOOLS[request.param]
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    copy = tmp_path / path.name
    shutil.copy(path, copy)
    subprocess.run([tool, "-e", path, "-o", f"{copy}.dwp"], check=True, cwd=programs, timeout=60)
    return copy


def described(entry: Entry, depth: int = 0) -> list[tuple[int, int, str | None, str]]:
    """Return what is in an entry, types that have units of their own included."""
    found = [(depth, entry.tag, entry.name, _type_of(entry))]
    for child in entry.children():
        found += described(child, depth + 1)
    return found


def _type_of(entry: Entry) -> str:
    parts: list[str] = []
    type_: Entry | None = entry
    while type_ is not None and len(parts) < 20 and (type_ := type_.type) is not None:
        parts.append(f"{type_.tag:#x} {type_.name} {type_.number(At.BYTE_SIZE)}")
    return ", ".join(parts)


def whole(file: DebugFile) -> Iterator[Entry]:
    for unit in file.units():
        yield file.whole_unit(unit).root


def test_entries_are_those_of_the_single_files(packed: Path, programs: Path) -> None:
    (single,) = whole(read(programs / packed.name))
    (found,) = whole(read(packed))
    assert found.unit.file.elf.path.name == f"{packed.name}.dwp"
    assert described(found) == described(single)
    assert len(described(found)) > 100
    address = address_of(packed, "work")
    function = function_at(read(packed), address)
    assert function is not None
    assert function.name == "work"
    assert function.address(At.LOW_PC) == address


def test_types_and_their_members_are_found_by_name(packed: Path, programs: Path) -> None:
    for name, tag in (("node", Tag.STRUCTURE_TYPE), ("color", Tag.ENUMERATION_TYPE), ("both", Tag.UNION_TYPE)):
        ours, single = (
            [described(each) for file in read(path).all_files() for each in entries_named(file, name, (tag,))]
            for path in (packed, programs / packed.name)
        )
        assert ours == single
        assert ours or "types" in packed.name


def test_damaged_packages_end_in_errors(packed: Path) -> None:
    package = packed.with_name(f"{packed.name}.dwp")
    data = package.read_bytes()
    sections = [s for s in ElfFile.open(package).sections if s.name.startswith(".debug") and s.size]
    address, chance, errors = address_of(packed, "work"), random.Random(packed.name), 0
    for number in range(MUTANTS):
        section = sections[number % len(sections)]
        package.write_bytes(damaged(data, range(section.offset, section.offset + section.size), chance))
        try:
            found = function_at(read(packed), address)
            if found is not None:
                look(found)
        except TargetError:
            errors += 1
    assert errors < MUTANTS


@pytest.mark.parametrize("place", [0, 4, 8, 12, 16, 40])
def test_an_index_that_lies_is_an_error(packed: Path, place: int) -> None:
    path = packed.with_name(f"{packed.name}.dwp")
    data = bytearray(path.read_bytes())
    section = next(s for s in ElfFile.open(path).sections if s.name == ".debug_cu_index")
    data[section.offset + place : section.offset + place + 4] = b"\xff\xff\xff\x7f"
    path.write_bytes(data)
    package = Package(ElfFile.open(path))
    if place >= 16:  # a signature, which nobody asks for
        assert 0 not in package.units
        return
    with pytest.raises(TargetError, match=r"its index '.debug_cu_index' cannot be understood"):
        _ = package.units


def test_a_program_without_a_package_has_none(program: Path) -> None:
    assert find_package(ElfFile.open(program)) is None
