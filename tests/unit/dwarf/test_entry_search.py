# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from dprobes.dwarf.address_lists import ranges_of
from dprobes.dwarf.debug_file import debug_file_of
from dprobes.dwarf.dwarf_numbers import At, Tag
from dprobes.dwarf.entry_search import entries_named, function_at
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.symbol_table import elf_symbols
from unit.dwarf.conftest import compiled, read

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.dwarf.debug_entries import Entry


def address_of(path: Path, name: str) -> int:
    (symbol,) = (s for table in elf_symbols(ElfFile.open(path)) if table.complete for s in table.find(name))
    return symbol.address


def test_a_function_is_found_by_its_addresses(variant: Path) -> None:
    name = "_ZNK5outer11inner_space7derived5valueEv" if variant.name == "cxx" else "work"
    address = address_of(variant, name)
    for each in (address, address + 5):
        found = function_at(read(variant), each)
        assert found is not None
        assert (Tag.SUBPROGRAM, "value" if variant.name == "cxx" else "work") == (found.tag, found.name)


def test_a_part_of_a_function_that_is_apart_belongs_to_it(program: Path) -> None:
    found = function_at(read(program), address_of(program, "cold.cold"))
    assert found is not None
    assert "cold" == found.name
    assert 2 == len(ranges_of(found))


def test_code_without_debug_information_has_no_function(program: Path) -> None:
    assert function_at(read(program), address_of(program, "_start")) is None
    assert function_at(read(program), 1 << 60) is None


def test_a_function_is_found_where_no_table_says_which_unit_covers_it(programs: Path, tmp_path: Path) -> None:
    from unit.target.conftest import Toolbox

    whole = compiled(programs, "d5-O2")
    Toolbox(tmp_path).run("objcopy", "--remove-section=.debug_aranges", whole, "bare")
    found = function_at(read(tmp_path / "bare"), address_of(whole, "work"))
    assert found is not None
    assert "work" == found.name


def named(path: Path, name: str, *tags: int) -> list[Entry]:
    return [entry for file in read(path).all_files() for entry in entries_named(file, name, tags)]


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("node", Tag.STRUCTURE_TYPE),
        ("node_t", Tag.TYPEDEF),
        ("color", Tag.ENUMERATION_TYPE),
        ("both", Tag.UNION_TYPE),
        ("int", Tag.BASE_TYPE),
        ("hidden", Tag.VARIABLE),
        ("first", Tag.VARIABLE),
        ("folded", Tag.SUBPROGRAM),
    ],
)
def test_entries_are_found_by_their_names(variant: Path, name: str, tag: int) -> None:
    if variant.name == "cxx":
        variant = compiled(variant.parent, "d5-O0")
    found = named(variant, name, tag)
    assert {(tag, name)} == {(each.tag, each.name) for each in found}


def test_entries_in_namespaces_and_classes_are_found_by_their_names(programs: Path) -> None:
    path = compiled(programs, "cxx")
    assert [Tag.STRUCTURE_TYPE] == [each.tag for each in named(path, "derived", Tag.STRUCTURE_TYPE)]
    assert [True] == [each.flag(At.EXTERNAL) for each in named(path, "shared", Tag.MEMBER, Tag.VARIABLE)]


@pytest.mark.parametrize("name", ["", "no_such_name", "a\0b", "wor", "ork"])
def test_a_name_that_is_not_there_is_not_found(program: Path, name: str) -> None:
    assert [] == named(program, name, Tag.SUBPROGRAM, Tag.VARIABLE)


def test_debug_information_is_in_a_separate_file_as_well(program: Path, tmp_path: Path) -> None:
    from unit.target.conftest import Toolbox

    tools = Toolbox(tmp_path)
    shutil.copy(program, tmp_path / "whole")
    tools.run("objcopy", "--only-keep-debug", "whole", "apart.debug")
    tools.run("objcopy", "--strip-all", "--add-gnu-debuglink=apart.debug", "whole", "small")
    file = debug_file_of(ElfFile.open(tmp_path / "small"))
    assert file is not None
    assert tmp_path / "apart.debug" == file.elf.path
    found = function_at(file, address_of(program, "work"))
    assert found is not None
    assert "work" == found.name


def test_a_file_without_debug_information_has_none(program: Path, tmp_path: Path) -> None:
    from unit.target.conftest import Toolbox

    Toolbox(tmp_path).run("strip", "--strip-all", "--remove-section=.note.gnu.build-id", "-o", "bare", program)
    assert debug_file_of(ElfFile.open(tmp_path / "bare")) is None
