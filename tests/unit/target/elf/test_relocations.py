"""Relocated sections are what GNU ld writes, if it puts each section where we say that it is."""

from __future__ import annotations

import shutil
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.relocations import has_relocations, relocated

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SOURCE = """
struct inner { short a; long b; };
struct node { struct node *next; const char *name; struct inner inner; int numbers[3]; };
int counted = 3;
static long hidden[4] = { 1, 2, 3, 4 };
struct node nodes[20];
_Thread_local int own = 5;
extern int elsewhere(struct node *node, int count);

__attribute__((noinline)) static int helper(struct node *node) { return node->numbers[1] + (int)hidden[node->inner.a]; }

__attribute__((section(".init.text"))) int work(struct node *node, int count) {
    int sum = 0;
    for (int i = 0; i < count; i++) sum += helper(node + i) + elsewhere(node, i);
    return sum + counted + own;
}

__attribute__((cold)) int rarely(int n) { nodes[n].name = "rarely"; return n > 3 ? work(nodes, n) : n; }
"""

SCRIPT = """
SECTIONS {{
{sections}
  /DISCARD/ : {{ *(.note*) *(.comment) *(.eh_frame) }}
}}
"""

CODE = {
    "x86_64": ("gcc", "elf_x86_64", ""),
    "i386": ("gcc", "elf_i386", "-m32"),
}


def made(directory: Path, machine: str, flags: str) -> Path:
    """Return an object file."""
    compiler, _, own = CODE[machine]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    (directory / "object.c").write_text(SOURCE)
    command = [compiler, "-c", "-g", "-fno-asynchronous-unwind-tables", *own.split()]
    subprocess.run([*command, *flags.split(), "object.c", "-o", "object.o"], cwd=directory, check=True)
    return directory / "object.o"


def linked(path: Path, elf: ElfFile) -> ElfFile:
    """Return an object file linked by ld, each section at the address that ``elf`` gives it."""
    rows = [
        f"  {each.name} {each.address if each.flags & 2 else 0:#x} : {{ *({each.name}) }}"
        for each in sorted(elf.sections, key=lambda each: each.address)
        if each.size and each.type in (1, 8) and each.name[:8] not in (".comment", ".note.GN")
    ]
    plain, script, output = (path.with_suffix(suffix) for suffix in (".plain", ".ld", ".linked"))
    script.write_text(SCRIPT.format(sections="\n".join(rows)))
    # Linkers sort strings that may be merged.
    kept = [f"--set-section-flags={name}=contents,readonly,debug" for name in (".debug_str", ".debug_line_str")]
    # They align the contents of sections that are given an address.
    kept += [f"--set-section-alignment={each.name}=1" for each in elf.sections if each.flags & 2]
    subprocess.run(["objcopy", *kept, path, plain], check=True)
    options = ["-e", "0", "--noinhibit-exec", "--unresolved-symbols=ignore-all", "--no-warnings"]
    command: list[str | Path] = ["ld", "-m", CODE[elf.machine][1], *options, "-T", script, "-o", output, plain]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert output.exists(), done.stderr
    return ElfFile.open(output)


def number_of(elf: ElfFile, name: str) -> int:
    return next(number for number, section in enumerate(elf.sections) if section.name == name)


def contents(elf: ElfFile, number: int) -> bytes:
    section = elf.sections[number]
    return elf.bytes_at(section.offset, section.size, section.name)


def ours(elf: ElfFile, number: int) -> bytes:
    return relocated(elf, number, contents(elf, number), lambda n: elf.sections[n].address)


@pytest.mark.parametrize("machine", sorted(CODE))
@pytest.mark.parametrize(
    "flags", ["-O0 -gdwarf-5", "-O2 -gdwarf-4", "-O2 -gdwarf-5 -ffunction-sections", "-O1 -gdwarf64"]
)
def test_sections_are_relocated_as_by_the_linker(tmp_path: Path, machine: str, flags: str) -> None:
    elf = ElfFile.open(made(tmp_path, machine, flags))
    other = linked(elf.path, elf)
    numbers = {section.name: number for number, section in enumerate(other.sections)}
    compared = set()
    for number, section in enumerate(elf.sections):
        if section.name.startswith(".debug") and has_relocations(elf, number):
            assert ours(elf, number) == contents(other, numbers[section.name]), section.name
            compared.add(section.name)
    assert compared >= {".debug_info", ".debug_line", ".debug_aranges", ".debug_frame"}
    information = number_of(elf, ".debug_info")
    assert ours(elf, information) != contents(elf, information)


@pytest.fixture
def object_file(tmp_path: Path) -> Path:
    return made(tmp_path, "x86_64", "-O2")


def message_of(path: Path, change: Callable[[bytearray, ElfFile], None], name: str = ".debug_info") -> str:
    """Return what is said of an object file with some bytes changed."""
    elf = ElfFile.open(path)
    data = bytearray(path.read_bytes())
    change(data, elf)
    damaged = ElfFile.of_bytes(path, bytes(data))
    with pytest.raises(TargetError) as caught:
        ours(damaged, number_of(damaged, name))
    return caught.value.message.removeprefix(f"'{path}' is a malformed ELF file: ")


def first_row(elf: ElfFile) -> int:
    """Return the place of the first relocation of ``.debug_info``."""
    return elf.sections[number_of(elf, ".rela.debug_info")].offset


def header_of(elf: ElfFile, data: bytes | bytearray, name: str) -> int:
    """Return the place of a section's header."""
    return int.from_bytes(data[40:48], "little") + 64 * number_of(elf, name)


def test_a_kind_that_is_not_known_is_an_error(object_file: Path) -> None:
    def change(data: bytearray, elf: ElfFile) -> None:
        struct.pack_into("<I", data, first_row(elf) + 8, 99)

    assert message_of(object_file, change) == "section '.debug_info' has a relocation of kind 99, which is not known"


def test_a_place_outside_of_the_section_is_an_error(object_file: Path) -> None:
    for place in (
        1 << 63,
        ElfFile.open(object_file).sections[number_of(ElfFile.open(object_file), ".debug_info")].size,
    ):

        def change(data: bytearray, elf: ElfFile, place: int = place) -> None:
            struct.pack_into("<Q", data, first_row(elf), place)

        assert message_of(object_file, change) == "a relocation of section '.debug_info' lies outside of it"


def test_a_symbol_that_is_not_there_is_an_error(object_file: Path) -> None:
    def change(data: bytearray, elf: ElfFile) -> None:
        struct.pack_into("<I", data, first_row(elf) + 12, 70000)

    expected = "section '.debug_info' has a relocation with symbol 70000, which is not there"
    assert message_of(object_file, change) == expected


def test_a_table_without_symbols_is_an_error(object_file: Path) -> None:
    def change(data: bytearray, elf: ElfFile) -> None:
        struct.pack_into("<I", data, header_of(elf, data, ".rela.debug_info") + 40, 60000)

    assert message_of(object_file, change) == "the relocations of section '.debug_info' have no symbols"


def test_a_symbol_of_no_section_is_an_error(object_file: Path) -> None:
    def change(data: bytearray, elf: ElfFile) -> None:
        (info,) = struct.unpack_from("<Q", data, first_row(elf) + 8)
        symbols = elf.sections[number_of(elf, ".symtab")]
        struct.pack_into("<H", data, symbols.offset + 24 * (info >> 32) + 6, 5000)

    number = struct.unpack_from("<I", object_file.read_bytes(), first_row(ElfFile.open(object_file)) + 12)[0]
    assert message_of(object_file, change) == f"symbol {number} is in section 5000, which is not there"


def test_more_relocations_than_bytes_are_an_error(object_file: Path) -> None:
    def change(data: bytearray, elf: ElfFile) -> None:
        struct.pack_into("<I", data, header_of(elf, data, ".rela.debug_info") + 44, number_of(elf, ".tdata"))

    assert message_of(object_file, change, ".tdata") == "section '.tdata' has more relocations than bytes"


def test_relocations_of_a_processor_that_is_not_known_are_an_error(object_file: Path) -> None:
    def change(data: bytearray, elf: ElfFile) -> None:
        struct.pack_into("<H", data, 18, 0xBEEF)

    expected = "section '.debug_info' has relocations for em_48879, which are not known"
    assert message_of(object_file, change) == expected


def test_what_is_in_another_file_counts_from_0(object_file: Path) -> None:
    elf = ElfFile.open(object_file)
    data = bytearray(object_file.read_bytes())
    (place, info, addend) = struct.unpack_from("<QQq", data, first_row(elf))
    symbols = elf.sections[number_of(elf, ".symtab")]
    struct.pack_into("<HQ", data, symbols.offset + 24 * (info >> 32) + 6, 0, 12345)
    found = ours(ElfFile.of_bytes(object_file, bytes(data)), number_of(elf, ".debug_info"))
    assert found[place : place + 4] == addend.to_bytes(4, "little")


def test_a_symbol_without_section_has_its_value(object_file: Path) -> None:
    elf = ElfFile.open(object_file)
    data = bytearray(object_file.read_bytes())
    (place, info, addend) = struct.unpack_from("<QQq", data, first_row(elf))
    symbols = elf.sections[number_of(elf, ".symtab")]
    struct.pack_into("<HQ", data, symbols.offset + 24 * (info >> 32) + 6, 0xFFF1, 12345)
    found = ours(ElfFile.of_bytes(object_file, bytes(data)), number_of(elf, ".debug_info"))
    assert found[place : place + 4] == (12345 + addend).to_bytes(4, "little")
