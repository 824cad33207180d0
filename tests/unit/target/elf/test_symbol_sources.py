# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.symbol_sources import (
    find_debug_file,
    foreign_debug_file,
    load_symbols,
    parse_linker_map,
    parse_nm,
)
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from unit.target.conftest import Toolbox

    ErrorOf = Callable[[Callable[[], object]], tuple[str, str | None]]


@pytest.fixture
def linked(tools: Toolbox, tmp_path: Path, pie: Path, debug_file: Path) -> Path:
    """A stripped program with a debug link to a file beside it, and no build-id."""
    shutil.copy(debug_file, tmp_path / "linked.debug")
    path = tmp_path / "linked"
    tools.run("objcopy", "-g", "--strip-all", "--remove-section=.note.gnu.build-id", pie, path)
    tools.run("objcopy", f"--add-gnu-debuglink={tmp_path / 'linked.debug'}", path)
    return path


def test_debug_file_is_found_by_build_id(tmp_path: Path, stripped: Path, debug_file: Path) -> None:
    elf = ElfFile.open(stripped)
    assert elf.build_id is not None
    place = tmp_path / ".build-id" / elf.build_id[:2] / f"{elf.build_id[2:]}.debug"
    assert find_debug_file(elf, tmp_path) is None
    place.parent.mkdir(parents=True)
    shutil.copy(debug_file, place)
    found = find_debug_file(elf, tmp_path)
    assert found is not None
    assert (place, True) == (found.path, found.is_debug_only)


def test_debug_file_is_found_by_link_beside_the_module_or_below(linked: Path) -> None:
    beside = linked.with_name("linked.debug")
    found = find_debug_file(ElfFile.open(linked))
    assert found is not None
    assert beside == found.path
    below = linked.parent / ".debug" / "linked.debug"
    below.parent.mkdir()
    beside.rename(below)
    found = find_debug_file(ElfFile.open(linked))
    assert found is not None
    assert below == found.path


def test_debug_file_with_another_checksum_is_passed_over(linked: Path) -> None:
    with linked.with_name("linked.debug").open("ab") as file:
        file.write(b"\0")
    assert find_debug_file(ElfFile.open(linked)) is None


def test_a_debug_file_of_another_checksum_is_named(linked: Path) -> None:
    beside = linked.with_name("linked.debug")
    module = ElfFile.open(linked)
    assert foreign_debug_file(module, linked.parent) is None
    with beside.open("ab") as file:
        file.write(b"changed")
    said = foreign_debug_file(module, linked.parent)
    assert said is not None
    assert re.fullmatch(
        rf"'{beside}' is the debug file of another build: its CRC is 0x[0-9a-f]{{8}}, "
        r"and .gnu_debuglink of the module says 0x[0-9a-f]{8}",
        said,
    )


def test_a_debug_file_of_another_build_id_is_named(tools: Toolbox, tmp_path: Path, stripped: Path, libc: Path) -> None:
    module = ElfFile.open(stripped)
    assert module.build_id is not None
    assert foreign_debug_file(module, tmp_path) is None
    place = tmp_path / ".build-id" / module.build_id[:2] / f"{module.build_id[2:]}.debug"
    place.parent.mkdir(parents=True)
    place.write_bytes(libc.read_bytes())
    assert foreign_debug_file(module, tmp_path) == (
        f"'{place}' is the debug file of another build: its build-id is {ElfFile.open(libc).build_id}, "
        f"the module's {module.build_id}"
    )


def test_module_takes_symbols_from_its_debug_file(linked: Path, pie: Path) -> None:
    stripped, full = Module.load(linked), Module.load(pie)
    for name in ("helper", "main", "global_value"):
        assert full.address_of(name) == stripped.address_of(name)


def test_c_library_has_its_debug_file(libc: Path) -> None:
    elf = ElfFile.open(libc)
    debug = find_debug_file(elf)
    if debug is None:
        pytest.skip("the debug file of the C library is not installed (libc6-dbg)")
    assert elf.build_id == debug.build_id


@pytest.mark.parametrize("kind", ["unstripped", "debug", "nm", "sized nm", "map"])
def test_every_kind_of_symbol_file_gives_the_same_places(
    tools: Toolbox, tmp_path: Path, fixed: Path, kind: str
) -> None:
    bare = tmp_path / "bare"
    tools.run("strip", "-o", bare, fixed)
    path = tmp_path / "symbols"
    match kind:
        case "unstripped":
            path = fixed
        case "debug":
            tools.run("objcopy", "--only-keep-debug", fixed, path)
        case "nm":
            path.write_text(tools.run("nm", fixed))
        case "sized nm":
            path.write_text(tools.run("nm", "-S", "-n", fixed))
        case "map":
            path = tools.directory / "fixed.map"
    expected, given = Module.load(fixed), Module.load(bare, path)
    for name in ("helper", "work", "main", "_start", "global_value", "zeroed"):
        if (kind, name) != ("map", "zeroed"):
            assert expected.address_of(name) == given.address_of(name)
    work = expected.file_offset(expected.address_of("work"))
    assert ("work", 3) == given.symbol_at(work + 3)
    assert expected.function_start(work + 3) == given.function_start(work + 3)


def test_symbols_of_another_build_are_refused(tools: Toolbox, tmp_path: Path, pie: Path, error_of: ErrorOf) -> None:
    other = tools.build("other_build", {"other_build.c": "int main(void){return 7;}"}, "-Wl,--build-id")
    module = ElfFile.open(pie)
    ids = ElfFile.open(other).build_id, module.build_id
    message = f"'{other}' does not belong to '{pie}': its build-id is {ids[0]}, the module's {ids[1]}"
    hint = "give the symbols of exactly this build of the module"
    assert (message, hint) == error_of(lambda: load_symbols(other, module))


def test_symbols_of_another_processor_are_refused(pie: Path, i386: Path, error_of: ErrorOf) -> None:
    message = f"'{i386}' is for i386, but '{pie}' for x86_64"
    assert (message, None) == error_of(lambda: load_symbols(i386, ElfFile.open(pie)))


def test_files_without_symbols_are_refused(tmp_path: Path, pie: Path, error_of: ErrorOf) -> None:
    module = ElfFile.open(pie)
    text = tmp_path / "text"
    text.write_text("hello\nworld\n")
    hint = "give an unstripped ELF or .debug file, a System.map or the output of nm, or a GNU ld map file"
    assert (f"'{text}' holds no symbols in a known format", hint) == error_of(lambda: load_symbols(text, module))
    absent = tmp_path / "absent"
    assert (f"'{absent}' does not exist", None) == error_of(lambda: load_symbols(absent, module))
    empty = tmp_path / "empty.map"
    empty.write_text("\nLinker script and memory map\n\n")
    hint = "give the file as it was before strip, or its debug file"
    assert (f"'{empty}' holds no symbols", hint) == error_of(lambda: load_symbols(empty, module))
    cut = tmp_path / "cut.elf"
    cut.write_bytes(pie.read_bytes()[:3000])
    with pytest.raises(TargetError, match="is truncated"):
        load_symbols(cut, module)


def test_system_map_is_read() -> None:
    table = parse_nm(
        "ffffffff81000000 T _stext\nffffffff81000040 t helper\nffffffff82000000 D jiffies\n0000000000000000 A zero\n"
    )
    assert table is not None
    found = [
        (s.name, s.address, s.kind, s.binding) for name in ("_stext", "helper", "jiffies") for s in table.find(name)
    ]
    assert [
        ("_stext", 0xFFFFFFFF81000000, "func", "global"),
        ("helper", 0xFFFFFFFF81000040, "func", "local"),
        ("jiffies", 0xFFFFFFFF82000000, "object", "global"),
    ] == found


def test_nm_output_keeps_versions_undefined_names_and_demangled_ones() -> None:
    table = parse_nm(
        "                 U puts@GLIBC_2.2.5\n00000010 00000008 T ns::f(int, char)\n00000020 T g@V1\n00000030 T g@@V2\n"
    )
    assert table is not None
    assert table.imports("puts")
    assert [0x10] == [s.address for s in table.find("ns::f(int, char)")]
    assert [(0x20, False), (0x30, True)] == [(s.address, s.default_version) for s in table.find("g")]


def test_linker_map_gives_global_symbols_as_nm_does(tools: Toolbox, fixed: Path) -> None:
    table = parse_linker_map((tools.directory / "fixed.map").read_text())
    assert table is not None
    listed = {n: int(a, 16) for a, n in re.findall(r"^(\w+) \w (\w+)$", tools.run("nm", fixed), re.MULTILINE)}
    for name in table.names():
        if name != "per_thread":  # nm gives its place in the thread's block, the map that in the file
            assert [listed.get(name)] == [s.address for s in table.find(name)], name
    assert ["tls"] == [s.kind for s in table.find("per_thread")]
    assert not table.find("printf")


def test_linker_map_lines_of_long_section_names_are_joined() -> None:
    table = parse_linker_map(
        "Linker script and memory map\n\n.text           0x0000000000001000      0x143\n"
        " .text.a_function_with_a_long_name\n                0x0000000000001000        0x8 a.o\n"
        " .text.b        0x0000000000001010        0x8 a.o\n                0x0000000000001010                b(int)\n"
        "                0x0000000000002000                _edata = .\n"
        "                0x0000000000002000                PROVIDE (edata = .)\n"
        "                [!provide]                        PROVIDE (end = .)\n"
        "                0x0000000000002000                . = ALIGN (0x8)\n"
    )
    assert table is not None
    assert {
        "a_function_with_a_long_name": 0x1000,
        "b(int)": 0x1010,
        "_edata": 0x2000,
        "edata": 0x2000,
        "b": None,
    } | {} == {
        name: next((s.address for s in table.find(name)), None)
        for name in ("a_function_with_a_long_name", "b(int)", "_edata", "edata", "b")
    }
    assert 4 == len(table)


@pytest.mark.parametrize("name", ["hello.ko", "hello.ko.debug"])
def test_the_debug_file_of_a_kernel_module_is_found_by_its_name(tools: Toolbox, tmp_path: Path, name: str) -> None:
    (tmp_path / "hello.c").write_text("int zeros[4], started = 3;\nint begin(int n) { return zeros[n] + started; }\n")
    installed = tmp_path / "usr" / "lib" / "modules"
    installed.mkdir(parents=True)
    tools.run("gcc", "-r", "-g", "-O1", "-Wl,--build-id", tmp_path / "hello.c", "-o", tmp_path / "hello.o")
    tools.run("objcopy", "--strip-debug", tmp_path / "hello.o", installed / "hello.ko")
    own = ElfFile.open(installed / "hello.ko")
    assert find_debug_file(own, tmp_path / "debug") is None
    place = tmp_path / "debug" / str(installed).lstrip("/")
    place.mkdir(parents=True)
    tools.run("objcopy", "--only-keep-debug", tmp_path / "hello.o", place / name)
    found = find_debug_file(own, tmp_path / "debug")
    assert found is not None
    assert place / name == found.path
    for section in (".text", ".data", ".bss"):
        here, there = ([s.address for s in elf.sections if s.name == section] for elf in (own, found))
        assert here == there
        assert all(here)
    tools.run("objcopy", "--remove-section=.note.gnu.build-id", place / name)
    assert find_debug_file(own, tmp_path / "debug") is None
