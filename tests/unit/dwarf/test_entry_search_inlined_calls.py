"""Inlined calls are found where gdb finds them, and code is said to be theirs where addr2line says so."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.dwarf import entry_search
from dprobes.dwarf.address_lists import covers
from dprobes.dwarf.debug_file import debug_file_of
from dprobes.dwarf.dwarf_numbers import At
from dprobes.dwarf.entry_search import inlined_calls_of
from dprobes.dwarf.inlined_names import InlinedNames
from dprobes.target.code_names import function_at
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.probed_module import Module
from unit.dwarf.linesections import compiled

if TYPE_CHECKING:
    from dprobes.dwarf.debug_entries import Entry
    from dprobes.dwarf.debug_file import DebugFile

LIBC = Path("/lib/x86_64-linux-gnu/libc.so.6")

SOURCE = """\
extern int printf(const char *, ...);
int counter;
static inline __attribute__((always_inline)) int inner(int n) { counter += n; return counter * n; }
static inline __attribute__((always_inline)) int outer(int n) { return inner(n * 2) ^ inner(n + 3); }
static __attribute__((noinline)) int work(int n) { return n > 2 ? outer(n) : inner(n); }
int main(int argc, char **argv) { printf("%d %d\\n", work(argc), outer(argc)); return 0; }
"""


def debug_file(path: Path) -> DebugFile:
    found = debug_file_of(ElfFile.open(path))
    assert found is not None
    return found


def found_by_gdb(program: Path, name: str) -> set[int]:
    command = ["gdb", "-nx", "-batch", "-ex", f"break {name}", "-ex", "info breakpoints", str(program)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {int(each, 16) for each in re.findall(rf"0x0*([0-9a-f]+) in {name}(?:\(int\))? at ", output)}


def agrees_with_gdb(program: Path, name: str) -> int:
    """
    Return how many calls have code, each of which gdb finds, too.

    It takes the first instruction of the code of a call, and not the one that the debug information calls the entry.
    """
    calls = [call for call in inlined_calls_of(debug_file(program), name) if call.first_address is not None]
    theirs = found_by_gdb(program, name)
    if not theirs:
        pytest.skip("gdb: some versions find no function whose calls were all inlined when the program was linked")
    assert len(theirs) == len(calls)
    assert all(any(covers(call.entry, address) for call in calls) for address in theirs)
    return len(calls)


OPTIONS = [
    ("-O2",),
    ("-O2", "-gdwarf-4"),
    ("-O2", "-gsplit-dwarf"),
    ("-O2", "-gdwarf-4", "-gsplit-dwarf"),
    ("-O3", "-flto"),
    ("-O1", "-x", "c++"),
]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
@pytest.mark.parametrize("name", ["inner", "outer"])
def test_calls_are_where_gdb_finds_them(tmp_path: Path, options: tuple[str, ...], name: str) -> None:
    source = SOURCE.replace("extern int", 'extern "C" int') if "c++" in options else SOURCE
    program = compiled(tmp_path, *options, source=source)
    assert agrees_with_gdb(program, name) == {"inner": 5, "outer": 2}[name]


def test_units_that_only_call_a_function_are_not_searched_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled(tmp_path, "-O2", source=SOURCE)
    looked: list[str | None] = []

    def note(_file: DebugFile, _holder: DebugFile, entry: Entry) -> tuple[()]:
        looked.append(entry.text(At.NAME))
        return ()

    monkeypatch.setattr(entry_search, "_references", note)
    assert list(inlined_calls_of(debug_file(program), "printf")) == []
    assert looked == []
    assert list(inlined_calls_of(debug_file(program), "inner")) == []
    assert looked == ["inner"]


@pytest.mark.parametrize("name", ["tcache_get", "checked_request2size", "heap_for_ptr"])
def test_calls_in_a_library_are_where_gdb_finds_them(name: str) -> None:
    assert agrees_with_gdb(LIBC, name) >= 3


def test_calls_lie_in_calls(tmp_path: Path) -> None:
    calls = list(inlined_calls_of(debug_file(compiled(tmp_path, "-O2", source=SOURCE)), "inner"))
    assert sorted((call.function.name, call.depth) for call in calls) == [
        ("main", 1),
        ("main", 1),
        ("work", 0),
        ("work", 1),
        ("work", 1),
    ]


def test_a_function_that_is_nowhere_inlined_has_no_calls(tmp_path: Path) -> None:
    program = compiled(tmp_path, "-O2", source=SOURCE)
    assert not list(inlined_calls_of(debug_file(program), "work"))
    assert not list(inlined_calls_of(debug_file(program), "nothing"))


def names_by_addr2line(path: Path, addresses: list[int]) -> list[list[str]]:
    """Return the functions whose code is at addresses, the innermost first."""
    command = ["addr2line", "-afi", "-e", str(path), *map(hex, addresses)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found: list[list[str]] = []
    for line in lines:
        if re.fullmatch(r"0x[0-9a-f]{16}", line):
            found.append([])
            is_name = True
        else:
            if is_name:
                found[-1].append(line)
            is_name = not is_name
    return found


def same_as_addr2line(path: Path, count: int) -> int:
    """Compare what is at random addresses; return at how many there is inlined code."""
    module = Module.load(path)
    (text,) = (section for section in module.elf.sections if section.name == ".text")
    random = Random(14)
    addresses = [random.randrange(text.address, text.address + text.size) for _ in range(count)]
    inlining, inlined = InlinedNames(seconds=1000), 0
    for address, theirs in zip(addresses, names_by_addr2line(debug_file(path).elf.path, addresses), strict=True):
        offset = module.elf.file_offset(address)
        assert offset is not None
        function = function_at(module, offset, inlining=inlining)
        if function is None:
            assert len(theirs) == 1
            continue
        names = [each.name for each in reversed(function.inlined) if each.start <= offset < each.end]
        assert names == theirs[:-1], hex(address)
        inlined += bool(names)
    return inlined


def test_code_of_a_library_has_the_names_of_addr2line() -> None:
    assert same_as_addr2line(LIBC, 200) >= 20


def test_code_that_was_linked_as_a_whole_has_the_names_of_addr2line(tmp_path: Path) -> None:
    assert same_as_addr2line(compiled(tmp_path, "-O3", "-flto", source=SOURCE), 150) >= 10


def test_reading_ends_when_its_time_is_up() -> None:
    module = Module.load(LIBC)
    address = module.address_of("malloc")
    offset = module.elf.file_offset(address)
    assert offset is not None
    inlining = InlinedNames(seconds=0)
    first = function_at(module, offset, inlining=inlining)
    assert first is not None
    assert first.inlined
    second = function_at(module, offset, inlining=inlining)
    assert second is not None
    assert second.inlined == ()
