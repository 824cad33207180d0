# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

import pytest

from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.symbol_sources import ListedSymbols
from dprobes.target.elf.symbol_table import ElfSymbols, elf_symbols, gnu_hash
from dprobes.target.module_symbols import Symbol, SymbolTable

if TYPE_CHECKING:
    from pathlib import Path

    from unit.target.conftest import Toolbox


def table_of(path: Path) -> SymbolTable:
    elf = ElfFile.open(path)
    return SymbolTable(elf_symbols(elf), code_range=elf.code_range)


def readelf_symbols(tools: Toolbox, path: Path) -> list[tuple[str, int, int, str, bool]]:
    """Return name, address, size, type and default version of the symbols of both tables that are defined."""
    rows = re.findall(
        r"^ +\d+: (\w+) +(\w+) (\w+) +\w+ +\w+ +(?:\[.*?\] +)?(\w+) (\w\S*?)(?:(@@?)(\S+))?( \(\d+\))?$",
        tools.run("readelf", "-sW", path),
        re.MULTILINE,
    )
    return [
        # A number in parentheses: the copy of another module's variable, under the version that the program asked for.
        (name, int(address, 16), int(size, 0), kind.lower(), at != "@" or copied != "")
        for address, size, kind, section, name, at, _, copied in rows
        if section != "UND" and kind in ("FUNC", "OBJECT", "IFUNC", "NOTYPE", "TLS")
    ]


def test_every_symbol_of_real_files_is_found_as_readelf_lists_it(
    tools: Toolbox, system_files: list[Path], pie: Path, i386: Path, versioned: Path
) -> None:
    for path in [*system_files, pie, i386, versioned]:
        tables = elf_symbols(ElfFile.open(path))
        listed = readelf_symbols(tools, path)
        assert listed or path.name == "ls"
        for name, *expected in listed:
            found = [[s.address, s.size, s.kind, s.default_version] for table in tables for s in table.find(name)]
            assert expected in found, name


def test_hash_table_and_scan_find_the_same(libc: Path) -> None:
    elf = ElfFile.open(libc)
    (hashed,) = (t for t in elf_symbols(elf) if not t.complete)
    names = sorted(set(hashed.names()))
    assert len(names) > 1000
    for name in names[::7]:
        scanned = [s for i in hashed._indices(name.encode()) if (s := hashed._defined(i)) is not None]
        assert scanned == hashed.find(name)


def test_many_searches_find_the_same_as_the_first_ones(libc: Path, versioned: Path) -> None:
    for path in (libc, versioned):
        elf = ElfFile.open(path)
        for kept in elf_symbols(elf):
            names = [*sorted(set(kept.names()))[:200], "no_such_symbol"]
            for name in [*names, *names]:
                (fresh,) = (table for table in elf_symbols(elf) if table.complete == kept.complete)
                assert fresh._indices(name.encode()) == kept._indices(name.encode()), name


def test_gnu_hash_has_its_published_values() -> None:
    assert [0x00001505, 0x156B2BB8, 0x7C967E3F] == [gnu_hash(n) for n in (b"", b"printf", b"exit")]


def test_default_version_is_preferred_over_hidden_ones(tools: Toolbox, libc: Path, versioned: Path) -> None:
    listed = re.findall(r"^(\w+) \w (\w+)(@@?)\S+$", tools.run("nm", "-D", libc), re.MULTILINE)
    hidden = {name for _, name, at in listed if at == "@"}
    checked = 0
    table = table_of(libc)
    for address, name, at in listed:
        if at == "@@" and name in hidden:
            assert [(int(address, 16), True)] == [(s.address, s.default_version) for s in table.lookup(name)]
            checked += 1
    assert checked > 5
    (work,) = table_of(versioned).lookup("work")
    assert work.address == table_of(versioned).lookup("new_work")[0].address
    assert work.default_version


def test_only_hidden_versions_are_better_than_nothing(libc: Path, tools: Toolbox) -> None:
    listed = re.findall(r"^\w+ \w (\w+)(@@?)\S+$", tools.run("nm", "-D", libc), re.MULTILINE)
    only_hidden = sorted({n for n, at in listed if at == "@"} - {n for n, at in listed if at == "@@"})
    (elf,) = (t for t in elf_symbols(ElfFile.open(libc)) if not t.complete)
    for name in only_hidden[::10]:
        assert {False} == {s.default_version for s in elf.find(name)}


def test_versions_in_symtab_names_are_understood(versioned: Path) -> None:
    (full,) = (t for t in elf_symbols(ElfFile.open(versioned)) if t.complete)
    assert {True, False} == {s.default_version for s in full.find("work")}
    assert {"work"} == {s.name for s in full.find("work")}


def test_static_functions_of_one_name_stay_apart(tools: Toolbox, twice: Path) -> None:
    listed = sorted(int(a, 16) for a in re.findall(r"^(\w+) t helper$", tools.run("nm", twice), re.MULTILINE))
    assert 2 == len(listed)
    assert listed == [s.address for s in table_of(twice).lookup("helper")]


def test_global_symbol_hides_local_ones() -> None:
    source = ListedSymbols([Symbol("f", 1, 0, "func", "local"), Symbol("f", 2, 0, "func", "weak")])
    assert [2] == [s.address for s in SymbolTable([source], code_range=lambda _: (0, 9)).lookup("f")]


def test_ifunc_keeps_its_kind(chosen: Path) -> None:
    assert ["ifunc"] == [s.kind for s in table_of(chosen).lookup("chosen")]


def test_unknown_and_odd_names_are_not_found(pie: Path, stripped: Path) -> None:
    for path in (pie, stripped):
        table = table_of(path)
        for name in ("", "no_such", "work\0", "wor", "ork", "\udcff", "w" * 5000):
            assert [] == table.lookup(name)


def test_imports_are_told_from_unknown_names(pie: Path, stripped: Path) -> None:
    for path in (pie, stripped):
        table = table_of(path)
        assert table.imports("printf")
        assert not table.imports("no_such")
        assert not table.imports("main")


def test_every_address_is_covered_by_a_symbol_that_nm_gives(tools: Toolbox, pie: Path, i386: Path) -> None:
    for path in (pie, i386):
        table = table_of(path)
        sized = re.findall(r"^(\w+) (\w+) [tTwW] (\S+)$", tools.run("nm", "-S", path), re.MULTILINE)
        assert len(sized) >= 2
        for address, size, _ in sized:
            start, length = int(address, 16), int(size, 16)
            names = {name for a, _, name in sized if int(a, 16) == start}
            for probe in {start, start + length // 2, start + length - 1}:
                symbol = table.covering(probe)
                assert symbol is not None
                assert (start, True) == (symbol.address, symbol.name in names)


def test_the_start_of_a_function_is_found_without_an_index_as_with_one(libc: Path, pie: Path, i386: Path) -> None:
    for path in (libc, pie, i386):
        elf = ElfFile.open(path)
        sources = elf_symbols(elf)
        indexed = SymbolTable(sources, code_range=elf.code_range)
        starts = {symbol.address for symbol in indexed.functions()}
        assert len(starts) > 1
        indexed.starting(0, 1)
        found = 0
        for start in sorted(starts)[:: 1 + len(starts) // 400]:
            quick = SymbolTable(sources, code_range=elf.code_range)._function_at(start)
            assert quick is None or quick == indexed.covering(start)
            found += quick is not None
        assert found


def test_debug_files_are_not_looked_for_to_name_the_start_of_an_exported_function(libc: Path) -> None:
    elf = ElfFile.open(libc)
    calls: list[int] = []

    def later() -> list[ListedSymbols]:
        calls.append(1)
        return []

    sources = [source for source in elf_symbols(elf) if not source.complete]
    table = SymbolTable(sources, code_range=elf.code_range, later=later)
    (malloc,), (free,) = table.lookup("malloc"), table.lookup("free")
    both = [malloc, free] * 10
    assert both == [table.covering(each.address) for each in both]  # with an index after some looks
    assert [1] == calls
    table = SymbolTable(sources, code_range=elf.code_range, later=later)
    assert malloc == table.covering(malloc.address)
    assert [1] == calls
    assert malloc == table.covering(malloc.address + 1)
    assert [1, 1] == calls


def test_padding_between_sized_functions_belongs_to_none() -> None:
    source = ListedSymbols([Symbol("f", 0x10, 4, "func", "global"), Symbol("g", 0x20, 4, "func", "global")])
    table = SymbolTable([source], code_range=lambda _: (0, 0x100))
    assert ["f", None, "g", None] == [s and s.name for s in map(table.covering, (0x13, 0x14, 0x20, 0x24))]


def test_symbol_without_size_reaches_to_the_next_and_not_past_its_section() -> None:
    source = ListedSymbols([Symbol("f", 0x10, 0, "func", "global"), Symbol("g", 0x20, 0, "func", "global")])
    table = SymbolTable([source], code_range=lambda a: (0x10, 0x30) if 0x10 <= a < 0x30 else (0x30, 0x40))
    found = [s and s.name for s in map(table.covering, (0x0F, 0x1F, 0x20, 0x2F, 0x30))]
    assert [None, "f", "g", "g", None] == found


def test_function_around_a_smaller_one_covers_what_that_leaves() -> None:
    source = ListedSymbols(
        [
            Symbol("outer", 0x10, 0x20, "func", "global"),
            Symbol("inner", 0x18, 4, "func", "local"),
            Symbol("l", 0x1E, 0, "func", "local"),
        ]
    )
    table = SymbolTable([source], code_range=lambda _: (0, 0x100))
    assert ["outer", "inner", "outer", "outer"] == [s and s.name for s in map(table.covering, (0x17, 0x18, 0x1C, 0x1F))]


def test_familiar_name_of_an_address_is_chosen() -> None:
    names = [("__libc_write", "global"), ("write", "weak"), ("_w", "local")]
    source = ListedSymbols([Symbol(n, 0x10, 8, "func", b) for n, b in names])
    symbol = SymbolTable([source], code_range=lambda _: (0, 0x100)).covering(0x11)
    assert symbol is not None
    assert "write" == symbol.name


def test_functions_are_those_of_nm(tools: Toolbox, pie: Path) -> None:
    listed = set(re.findall(r"^\w+ \w+ [tTwWi] (\w+)$", tools.run("nm", "-S", pie), re.MULTILINE))
    names = {s.name for s in table_of(pie).functions()}
    assert listed <= names
    assert "global_value" not in names


def test_functions_are_found_by_their_beginnings_as_among_all(pie: Path, libc: Path, i386: Path) -> None:
    for path in (pie, libc, i386):
        table = table_of(path)
        every = [(symbol.name, symbol.address) for symbol in table.functions()]
        beginnings = {name[:length] for name, _ in every[::20] for length in (1, 4, len(name))}
        assert len(beginnings) > 1
        for beginning in beginnings:
            expected = {each for each in every if each[0].startswith(beginning)}
            assert expected == {(symbol.name, symbol.address) for symbol in table.functions_beginning(beginning)}
        assert not list(table.functions_beginning("no function begins so"))


def test_listed_functions_are_found_by_their_beginnings() -> None:
    symbols = [Symbol(name, 4, 1, kind, "global") for name, kind in (("a.b", "func"), ("a", "func"), ("a.c", "object"))]
    table = SymbolTable([ListedSymbols(symbols)], code_range=lambda _: (0, 9))
    assert symbols[:1] == list(table.functions_beginning("a."))


def test_near_names_are_suggested(pie: Path) -> None:
    table = table_of(pie)
    assert ["work"] == table.near("wrok")
    assert ["main"] == table.near("Main")
    assert ["global_value"] == table.near("globl_value")
    assert [] == table.near("zzzzzz")


def test_costly_sources_are_asked_only_when_needed() -> None:
    calls: list[int] = []

    def later() -> list[ListedSymbols]:
        calls.append(1)
        return [ListedSymbols([Symbol("hidden", 5, 0, "func", "local")])]

    partial = ListedSymbols([Symbol("shown", 1, 0, "func", "global")])
    partial.complete = False
    table = SymbolTable([partial], code_range=lambda _: (0, 9), later=later)
    assert [1] == [s.address for s in table.lookup("shown")]
    assert [] == calls
    assert [5] == [s.address for s in table.lookup("hidden")]
    assert [] == table.lookup("nothing")
    assert [1] == calls


@pytest.mark.parametrize("hash_style", ["gnu", "sysv"])
def test_dynamic_symbols_are_found_without_section_headers(tools: Toolbox, tmp_path: Path, hash_style: str) -> None:
    path = tools.build(
        f"lib{hash_style}.so", {"lib.c": "int exported(void){return 1;}"}, "-shared", f"-Wl,--hash-style={hash_style}"
    )
    data = path.read_bytes()
    bare = tmp_path / "bare.so"
    bare.write_bytes(data[:40] + bytes(8) + data[48:60] + bytes(4) + data[64:])
    assert () == ElfFile.open(bare).sections
    (expected,) = table_of(path).lookup("exported")
    assert [expected] == table_of(bare).lookup("exported")
    assert expected == table_of(bare).covering(expected.address)


def test_names_shared_by_the_end_of_longer_ones_are_found(tmp_path: Path) -> None:
    strings = b"\0my_printf\0"
    symbol = struct.pack("<IBBHQQ", 4, 0x12, 0, 1, 0x1000, 8)
    path = tmp_path / "x"
    path.write_bytes(
        b"\x7fELF\2\1\1"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, 0, 0, 64, 56, 0, 64, 0, 0)
        + strings
        + symbol
    )
    elf = ElfFile.open(path)
    table = ElfSymbols(elf, (64 + len(strings), 24), (64, len(strings)), complete=True)
    assert [Symbol("printf", 0x1000, 8, "func", "global")] == table.find("printf")
    assert [] == table.find("my_printf")


def test_big_endian_tables_are_read(tmp_path: Path) -> None:
    strings = b"\0start\0"
    symbols = bytes(16) + struct.pack(">IIIBBH", 1, 0x1000, 8, 0x12, 0, 1)
    path = tmp_path / "x"
    path.write_bytes(
        b"\x7fELF\1\2\1"
        + bytes(9)
        + struct.pack(">HHIIIIIHHHHHH", 2, 22, 1, 0, 0, 0, 0, 52, 32, 0, 40, 0, 0)
        + strings
        + symbols
    )
    table = ElfSymbols(ElfFile.open(path), (52 + len(strings), 32), (52, len(strings)), complete=True)
    assert [Symbol("start", 0x1000, 8, "func", "global")] == table.find("start")
