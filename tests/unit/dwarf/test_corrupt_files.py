"""Damaged debug information ends in an error, soon, and never in another exception."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

import pytest

from dprobes.dwarf.address_lists import ranges_of
from dprobes.dwarf.debug_file import DebugFile
from dprobes.dwarf.dwarf_numbers import At, Tag
from dprobes.dwarf.entry_search import entries_named, function_at
from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import ElfFile
from unit.dwarf.conftest import compiled
from unit.dwarf.test_entry_search import address_of

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.dwarf.debug_entries import Entry

MUTANTS = 60  # of each program
ENTRIES_MAX = 5000


def look(entry: Entry, depth: int = 0) -> int:
    """Ask an entry and those in it for everything; return how many there are."""
    count = 1
    for question in (
        lambda: entry.name,
        lambda: entry.linker_name,
        lambda: entry.origin,
        lambda: [entry.text(number) for number in entry.attributes],
        lambda: ranges_of(entry),
        lambda: [entry.address(number) for number in entry.attributes],
        lambda: entry.type,
        lambda: entry.reference(At.SIBLING),
    ):
        try:
            question()
        except TargetError:
            continue
    for child in entry.children():
        count += look(child, depth + 1) if depth < 50 else 0
        if count > ENTRIES_MAX:
            break
    return count


def explore(data: bytes, path: Path, address: int) -> int:
    """Read a whole file; return how many errors there were."""
    errors = 0
    try:
        elf = ElfFile.of_bytes(path, data)
    except TargetError:
        return 1
    for question in (
        lambda: [look(unit.root) for unit in DebugFile(elf).units()],
        lambda: function_at(DebugFile(elf), address),
        lambda: list(entries_named(DebugFile(elf), "node", (Tag.STRUCTURE_TYPE,))),
        lambda: list(entries_named(DebugFile(elf), "work", (Tag.SUBPROGRAM,))),
    ):
        try:
            question()
        except TargetError:
            errors += 1
    return errors


def damaged(data: bytes, places: range, chance: random.Random) -> bytes:
    """Return a file some of whose bytes at ``places`` are others."""
    mutant = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        place = chance.choice(places)
        match chance.randrange(4):
            case 0:
                mutant[place] = chance.randrange(256)
            case 1:
                mutant[place] ^= 1 << chance.randrange(8)
            case 2:
                mutant[place : place + 4] = struct.pack("<I", chance.choice((0, 1, 0xFFFFFFFF, 0x7FFFFFFF, place)))
            case 3:
                mutant[place : place + 8] = b"\xff" * 8
    return bytes(mutant[: len(data)])


@pytest.mark.parametrize("name", ["d5-O2", "d4-O2", "d5-O0", "d4-types", "d5-lto", "d5-zlib"])
def test_damaged_files_end_in_errors(programs: Path, name: str) -> None:
    path = compiled(programs, name)
    data = path.read_bytes()
    address = address_of(path, "work")
    sections = [s for s in ElfFile.open(path).sections if s.name.startswith(".debug") and s.size]
    chance = random.Random(name)
    errors = 0
    for number in range(MUTANTS):
        section = sections[number % len(sections)]
        mutant = damaged(data, range(section.offset, section.offset + section.size), chance)
        errors += explore(mutant, path, address)
    assert errors > MUTANTS // 4


def test_truncated_files_end_in_errors(program: Path) -> None:
    data = program.read_bytes()
    elf = ElfFile.open(program)
    table = int.from_bytes(data[40:48], "little")  # e_shoff: the section headers stay
    sections = [s for s in elf.sections if s.name == ".debug_info"]
    start, end = sections[0].offset, sections[0].offset + sections[0].size
    address = address_of(program, "work")
    for stop in range(start, end, 97):
        mutant = data[:stop] + bytes(end - stop) + data[end:]
        assert len(mutant) > table
        explore(mutant, program, address)


def test_what_refers_to_itself_is_an_error(program: Path) -> None:
    """An abstract origin that is the entry itself: nobody follows it for ever."""
    from unit.dwarf.conftest import read

    file = read(program)
    found = next(
        child
        for unit in file.units()
        for entry in unit.root.children()
        for child in entry.children()
        if child.has(At.ABSTRACT_ORIGIN)
    )
    form, _ = found.attributes[At.ABSTRACT_ORIGIN]
    found._attributes = {At.ABSTRACT_ORIGIN: (form, found.offset - found.unit.offset)}
    reference = found.reference(At.ABSTRACT_ORIGIN)
    assert reference == found

    # The same in the bytes.
    data = bytearray(program.read_bytes())
    section = next(s for s in ElfFile.open(program).sections if s.name == ".debug_info")
    fresh = next(
        child
        for unit in read(program).units()
        for entry in unit.root.children()
        for child in entry.children()
        if child.has(At.ABSTRACT_ORIGIN)
    )
    _, value = fresh.attributes[At.ABSTRACT_ORIGIN]
    assert isinstance(value, int)
    entry_place = section.offset + fresh.offset
    place = data.find(struct.pack("<I", value), entry_place, entry_place + 16)
    assert place > 0
    data[place : place + 4] = struct.pack("<I", fresh.offset - fresh.unit.offset)
    looped = DebugFile(ElfFile.of_bytes(program, bytes(data))).entry_at(fresh.offset)
    with pytest.raises(TargetError) as caught:
        _ = looped.name
    expected = f"the origins of the entry at {fresh.offset:#x} do not end"
    assert caught.value.message == f"'{program}' has malformed debug information: {expected}"
