"""Places of names that cannot be those of wanted entries are left out, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dwarf.dwarf_numbers import At, Form, Tag
from dprobes.dwarf.entry_search import _unsigned, plausible_places
from unit.dwarf.conftest import read
from unit.dwarf.test_debug_entries import below

if TYPE_CHECKING:
    from pathlib import Path

TAGS = (Tag.STRUCTURE_TYPE, Tag.VARIABLE, Tag.ENUMERATOR, Tag.SUBPROGRAM, Tag.TYPEDEF, Tag.MEMBER, Tag.BASE_TYPE)


def place_of_name(unit_bytes: bytes, offset: int, end: int, needle: bytes) -> int:
    return unit_bytes.index(needle, offset, end)


def test_the_places_of_all_entries_of_a_kind_stay(variant: Path) -> None:
    file, left_out = read(variant), 0
    for unit in file.units():
        section = unit.section
        data = bytes(section.data[section.start : section.start + unit.end])
        places: dict[int, int] = {}
        for entry in below(unit.root):
            form, value = entry.attributes.get(At.NAME, (0, 0))
            if form == Form.STRP and isinstance(value, int):
                needle = value.to_bytes(unit.sizes.offset, unit.order)
                places[place_of_name(data, entry.offset, entry.following(), needle)] = entry.tag
            elif form == Form.STRING:
                needle = (entry.text(At.NAME) or "").encode("utf-8", "surrogateescape") + b"\0"
                places[place_of_name(data, entry.offset, entry.following(), needle)] = entry.tag
        for tag in TAGS:
            kept = plausible_places(unit, sorted(places), (tag,), declarations=True)
            assert {place for place, each in places.items() if each == tag} <= set(kept)
            left_out += len(places) - len(kept)
    assert left_out > 100 or "split" in variant.name


def test_declarations_are_left_out(program: Path) -> None:
    (unit, *_) = read(program).units()
    (entry,) = (each for each in unit.root.children() if each.text(At.NAME) == "opaque")
    assert entry.flag(At.DECLARATION)
    _, value = entry.attributes[At.NAME]
    assert isinstance(value, int)
    section = unit.section
    place = section.data.find(value.to_bytes(4, "little"), section.start + entry.offset) - section.start
    assert plausible_places(unit, [place], (Tag.STRUCTURE_TYPE,), declarations=True) == [place]
    assert plausible_places(unit, [place], (Tag.STRUCTURE_TYPE,), declarations=False) == []


def test_codes_are_written_as_leb128() -> None:
    assert [_unsigned(number) for number in (1, 127, 128, 300)] == [b"\x01", b"\x7f", b"\x80\x01", b"\xac\x02"]
