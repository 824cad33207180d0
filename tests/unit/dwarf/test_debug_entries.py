# ruff: noqa: SIM300 - expected == actual
"""What entries say, compared with what pyelftools reads from the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from elftools.elf.elffile import ELFFile

from dprobes.dwarf.dwarf_numbers import At, Form, Tag
from dprobes.dwarf.entry_search import entries_named
from dprobes.errors import TargetError
from unit.dwarf.conftest import read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dprobes.dwarf.debug_entries import Entry

Rows = list[tuple[int, int, dict[int, tuple[int, Any]]]]

TEXTS = {"DW_FORM_strp", "DW_FORM_line_strp", "DW_FORM_string"}


def numbers_of(table: dict[Any, Any]) -> dict[Any, int]:
    return {name: number for name, number in table.items() if isinstance(number, int)}


def by_pyelftools(path: Path) -> Rows:
    """Return offset, tag, and the attributes of all entries in order."""
    from elftools.dwarf.enums import ENUM_DW_AT, ENUM_DW_FORM, ENUM_DW_TAG

    tags, attributes, forms = numbers_of(ENUM_DW_TAG), numbers_of(ENUM_DW_AT), numbers_of(ENUM_DW_FORM)
    rows: Rows = []
    with path.open("rb") as stream:
        information = ELFFile(stream).get_dwarf_info(follow_links=False)
        for unit in information.iter_CUs():
            for entry in unit.iter_DIEs():
                if entry.is_null():
                    continue
                found = {}
                attribute: Any
                for attribute in entry.attributes.values():
                    name = attribute.name
                    value = attribute.value if attribute.form in TEXTS else attribute.raw_value
                    value = bytes(value) if isinstance(value, list) else value
                    number = name if isinstance(name, int) else attributes[name]
                    found[number] = (forms[attribute.form], value)
                tag = entry.tag if isinstance(entry.tag, int) else tags[entry.tag]
                rows.append((entry.offset, tag, found))
    return rows


def below(entry: Entry) -> Iterator[Entry]:
    """Give an entry and all entries in it."""
    yield entry
    for child in entry.children():
        yield from below(child)


def by_us(path: Path) -> Rows:
    rows: Rows = []
    for unit in read(path).units():
        for entry in below(unit.root):
            found: dict[int, tuple[int, Any]] = {}
            for number, (form, value) in entry.attributes.items():
                if form in (Form.STRP, Form.LINE_STRP, Form.STRING):
                    found[number] = (form, (entry.text(number) or "").encode("utf-8", "surrogateescape"))
                else:
                    found[number] = (form, value)
            rows.append((entry.offset, entry.tag, found))
    return rows


def normal(rows: Rows) -> Rows:
    """Write what both readers write differently in one way."""
    normal_rows = []
    for offset, tag, attributes in rows:
        found = {}
        for number, (form, value) in attributes.items():
            found[number] = (form, 1 if form == Form.FLAG_PRESENT else value)
        normal_rows.append((offset, tag, found))
    return normal_rows


def without_addresses(rows: Rows) -> Rows:
    """Leave out what has addresses: pyelftools has all sections of an object file at 0."""
    placed = (Form.ADDR, Form.EXPRLOC)
    return [
        (offset, tag, {number: value for number, value in attributes.items() if value[0] not in placed})
        for offset, tag, attributes in rows
    ]


def test_entries_are_those_that_pyelftools_reads(variant: Path) -> None:
    expected, found = normal(by_pyelftools(variant)), normal(by_us(variant))
    assert len(expected) > (0 if "split" in variant.name else 100)  # the rest is in another file
    if variant.name.startswith("object"):
        expected, found = without_addresses(expected), without_addresses(found)
    assert expected == found


def test_an_entry_is_found_by_its_offset(program: Path) -> None:
    file = read(program)
    entries = [entry for unit in file.units() for entry in below(unit.root)]
    again = read(program)
    for entry in entries[::7]:
        found = again.entry_at(entry.offset)
        assert (entry.tag, entry.attributes) == (found.tag, found.attributes)


def test_what_follows_an_entry_is_the_same_with_and_without_references_to_siblings(program: Path) -> None:
    for unit in read(program).units():
        for entry in unit.root.children():
            last = list(below(entry))[-1]
            end = last.following()
            data = unit.section.data[unit.section.start + end : unit.section.start + entry.following()]
            assert not any(data)  # ends of children


def test_names_and_types_come_from_origins(program: Path) -> None:
    (work,) = (e for e in entries_named(read(program), "work", (Tag.SUBPROGRAM,)) if e.has(At.LOW_PC))
    parameters = [child for child in work.children() if child.tag == Tag.FORMAL_PARAMETER]
    assert ["node", "count", "text", "weight", "small"] == [each.name for each in parameters]
    pointer = parameters[0].type
    assert pointer is not None
    assert Tag.POINTER_TYPE == pointer.tag
    assert pointer.type is not None
    assert (Tag.TYPEDEF, "node_t") == (pointer.type.tag, pointer.type.name)


def test_attributes_of_another_class_are_none(program: Path) -> None:
    (work,) = (e for e in entries_named(read(program), "work", (Tag.SUBPROGRAM,)) if e.has(At.LOW_PC))
    assert work.number(At.NAME) is None
    assert work.text(At.DECL_LINE) is None
    assert work.reference(At.NAME) is None
    assert work.address(At.DECL_LINE) is None
    assert work.block(At.NAME) is None
    assert not work.flag(At.DECLARATION)
    assert work.flag(At.EXTERNAL)
    assert work.text(At.LINKAGE_NAME) is None
    assert "work" == work.text(At.NAME)


def test_an_offset_outside_of_all_units_is_an_error(program: Path) -> None:
    file = read(program)
    with pytest.raises(TargetError) as caught:
        file.entry_at(1 << 40)
    assert f"'{program}' has malformed debug information: there is no entry at 0x10000000000" == caught.value.message
    assert "declare what the program needs: then nothing is read of it" == caught.value.hint
