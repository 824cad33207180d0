# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import re
import struct
import zlib
from typing import TYPE_CHECKING

import pytest

from dprobes.dwarf import debug_file
from dprobes.dwarf.address_lists import listed_expressions
from dprobes.dwarf.dwarf_numbers import At, Form, Tag
from dprobes.dwarf.entry_search import function_at
from dprobes.errors import TargetError
from dprobes.target.elf import debug_sections
from dprobes.target.elf.debug_sections import NO_SECTION, has_debug_information, section_bytes, section_source
from dprobes.target.elf.elf_file import ElfFile
from unit.dwarf.conftest import compiled, read
from unit.dwarf.test_debug_entries import below
from unit.dwarf.test_entry_search import address_of
from unit.target.conftest import Toolbox

if TYPE_CHECKING:
    from pathlib import Path


def contents(path: Path, name: str) -> bytes:
    found = section_bytes(ElfFile.open(path), name)
    return bytes(found.data[found.start : found.end])


@pytest.mark.parametrize("name", ["d5-zlib", "d5-zlib-gnu"])
def test_a_compressed_section_is_what_objcopy_makes_of_it(programs: Path, tmp_path: Path, name: str) -> None:
    path = compiled(programs, name)
    assert has_debug_information(ElfFile.open(path))
    Toolbox(tmp_path).run("objcopy", "--decompress-debug-sections", path, "plain")
    for section in (".debug_info", ".debug_str", ".debug_abbrev"):
        assert contents(tmp_path / "plain", section) == contents(path, section)
        assert section_bytes(ElfFile.open(path), section).size > 100


def test_a_section_is_decompressed_as_far_as_somebody_asks(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_sections, "_STEP", 64)
    path = compiled(programs, "d5-zlib")
    whole = contents(path, ".debug_info")
    source = section_source(ElfFile.open(path), ".debug_info")
    assert len(whole) == source.size
    for asked, known in ((0, 0), (10, 64), (64, 64), (65, 128), (1000, 1000), (1 << 40, len(whole))):
        found = source.until(asked)
        assert (known, known == len(whole)) == (found.size, found.is_whole)
        assert whole[:known] == bytes(found.data[found.start : found.end])


def test_what_is_read_of_parts_is_what_is_read_of_the_whole(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug_sections, "_STEP", 8)
    monkeypatch.setattr(debug_file, "_READ_FIRST", 8)
    path = compiled(programs, "d5-zlib")
    Toolbox(tmp_path).run("objcopy", "--decompress-debug-sections", path, "plain")
    seen: list[list[object]] = []
    for each in (path, tmp_path / "plain"):
        entries = (entry for unit in read(each).units() for entry in below(unit.root))
        seen.append([(e.offset, e.tag, e.attributes, listed_expressions(e, At.LOCATION)) for e in entries])
    assert seen[0] == seen[1]
    assert len(seen[0]) > 100
    assert any(row[3] for row in seen[0])  # type: ignore[index]


def test_a_section_that_is_not_there_is_empty(program: Path) -> None:
    assert NO_SECTION == section_bytes(ElfFile.open(program), ".debug_nothing")


def with_size(program: Path, size: int, kind: int = 1) -> ElfFile:
    """Return the file with another header before the compressed bytes of ``.debug_info``."""
    data = bytearray(program.read_bytes())
    section = next(s for s in ElfFile.open(program).sections if s.name == ".debug_info")
    struct.pack_into("<I4xQ", data, section.offset, kind, size)
    return ElfFile.of_bytes(program, bytes(data))


def test_a_section_that_would_become_huge_is_an_error(programs: Path) -> None:
    path = compiled(programs, "d5-zlib")
    size = next(s for s in ElfFile.open(path).sections if s.name == ".debug_info").size
    with pytest.raises(TargetError) as caught:
        section_bytes(with_size(path, 3 << 30), ".debug_info")
    message = f"'{path}' is a malformed ELF file: section '.debug_info' says that its {size} bytes become {3 << 30}"
    assert message == caught.value.message


def test_a_section_with_another_size_than_its_header_says_is_an_error(programs: Path) -> None:
    path = compiled(programs, "d5-zlib")
    with pytest.raises(TargetError) as caught:
        section_bytes(with_size(path, 1 << 12), ".debug_info")
    assert f"'{path}' is a malformed ELF file: section '.debug_info' cannot be decompressed" == caught.value.message


def test_an_unknown_compression_is_an_error(programs: Path) -> None:
    path = compiled(programs, "d5-zlib")
    with pytest.raises(TargetError) as caught:
        section_bytes(with_size(path, 1 << 12, kind=9), ".debug_info")
    assert f"section '.debug_info' of '{path}' is compressed in a way that is not known (9)" == caught.value.message


def test_zstd_is_decompressed_where_its_package_is(programs: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = compiled(programs, "d5-zlib")
    elf = ElfFile.open(path)
    plain = contents(path, ".debug_info")
    section = next(s for s in elf.sections if s.name == ".debug_info")
    packed = zstandard.ZstdCompressor(level=19).compress(plain)
    room = section.size - 24
    data = bytearray(path.read_bytes())
    if len(packed) > room:  # it may need more room than zlib: then it stands for a part of the section
        plain = plain[: len(plain) // 4]
        packed = zstandard.ZstdCompressor(level=19).compress(plain)
    assert len(packed) <= room
    struct.pack_into("<I4xQQ", data, section.offset, 2, len(plain), 1)
    data[section.offset + 24 : section.offset + 24 + room] = packed + bytes(room - len(packed))
    found = section_bytes(ElfFile.of_bytes(path, bytes(data)), ".debug_info")
    assert plain == bytes(found.data[found.start : found.end])
    assert zlib.crc32(plain) == zlib.crc32(found.data)


SMALL = """
struct inner { short a; long b; };
struct node { struct node *next; const char *name; struct inner inner; int numbers[3]; };
struct node nodes[20];
int work(struct node *node, int count) { int sum = count; return node->numbers[1] + sum; }
"""


@pytest.mark.parametrize("target", ["aarch64", "powerpc", "powerpc64le", "s390x"])
@pytest.mark.parametrize("version", [4, 5])
def test_objects_for_other_processors_are_relocated(tmp_path: Path, target: str, version: int) -> None:
    tools = Toolbox(tmp_path)
    (tmp_path / "small.c").write_text(SMALL)
    tools.run("clang", f"--target={target}-linux-gnu", "-c", "-g", f"-gdwarf-{version}", "small.c", "-o", "small.o")
    listed = tools.run("llvm-dwarfdump", "--debug-info", "small.o")
    expected = re.findall(r'DW_AT_name\t\("(.*)"\)', listed)
    names = [entry.text(At.NAME) for unit in read(tmp_path / "small.o").units() for entry in below(unit.root)]
    assert expected == [name for name in names if name]
    assert {"work", "numbers", "node"} <= set(expected)
    found = function_at(read(tmp_path / "small.o"), address_of(tmp_path / "small.o", "work"))
    assert found is not None
    assert "work" == found.name


def test_compressed_sections_of_objects_are_relocated(tmp_path: Path) -> None:
    tools = Toolbox(tmp_path)
    (tmp_path / "small.c").write_text(SMALL)
    seen = []
    for kind in ("none", "zlib", "zlib-gnu"):
        tools.run("gcc", "-c", "-g", f"-gz={kind}", "small.c", "-o", "small.o")
        entries = [entry for unit in read(tmp_path / "small.o").units() for entry in below(unit.root)]
        seen.append([(entry.offset, entry.tag, entry.text(At.NAME)) for entry in entries])
    assert "numbers" in {name for _, _, name in seen[0]}
    assert seen[0] == seen[1] == seen[2]


def test_sections_of_one_name_in_an_object_file_stand_behind_each_other(programs: Path) -> None:
    path = compiled(programs, "object-types")
    file = read(path)
    types = {unit.signature for unit in file.type_units()}
    assert len(types) > 3
    used = {value for unit in file.units() for entry in below(unit.root)
            for form, value in entry.attributes.values() if form == Form.REF_SIG8}  # fmt: skip
    assert used
    assert used <= types
    for each in file.type_units():
        assert each.entry(each.offset + each.type_offset).tag in (
            Tag.STRUCTURE_TYPE,
            Tag.UNION_TYPE,
            Tag.ENUMERATION_TYPE,
        )
