"""Names that share their bytes with longer ones, as GNU ld and other linkers write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.dwarf import entry_search
from dprobes.dwarf.dwarf_numbers import At, Form, Tag
from dprobes.dwarf.entry_search import entries_named, found_in, units_with
from unit.dwarf.conftest import read
from unit.target.conftest import Toolbox

if TYPE_CHECKING:
    from pathlib import Path

LONGER = 700
"""Names that end as the shorter one does: more than are looked for one by one."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with a structure and a variable whose names others end with."""
    directory = tmp_path_factory.mktemp("tails")
    lines = [f"int number_{number}_of_page_frames, use_{number}_counted_pages;" for number in range(LONGER)]
    lines += ["struct page_frames { int kept; } page_frames;", "static int counted_pages = 3;"]
    lines += ["int main(void) { return page_frames.kept + counted_pages; }"]
    (directory / "tails.c").write_text("\n".join(lines))
    Toolbox(directory).run("gcc", "-g", "-O0", "tails.c", "-o", "tails")
    return directory / "tails"


def test_a_name_that_others_end_with_has_no_text_of_its_own(shared: Path) -> None:
    section = read(shared).section(".debug_str")
    whole, tails = entry_search._text_offsets(section, b"page_frames")
    assert whole == ()
    assert len(tails) == LONGER


@pytest.mark.parametrize(
    ("name", "tag"),
    [("page_frames", Tag.STRUCTURE_TYPE), ("page_frames", Tag.VARIABLE), ("counted_pages", Tag.VARIABLE)],
)
def test_it_is_found_at_once_where_gnu_ld_shares_it(shared: Path, name: str, tag: int) -> None:
    file = read(shared)
    (found,) = entries_named(file, name, (tag,))
    form, value = found.attributes[At.NAME]
    assert form == Form.STRP
    assert value == entry_search._text_offsets(file.section(".debug_str"), name.encode())[1][0]


def test_it_is_found_where_another_linker_shares_it(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = entry_search._text_offsets
    seen: list[int] = []

    def others_first(*arguments: object) -> object:
        whole, tails = offsets(*arguments)  # type: ignore[arg-type]
        seen.extend(tails)
        return whole, [*tails[1:200], tails[0]]

    monkeypatch.setattr(entry_search, "_text_offsets", others_first)
    (found,) = entries_named(read(shared), "page_frames", (Tag.STRUCTURE_TYPE,))
    assert found.attributes[At.NAME][1] == seen[0]


def test_nothing_is_searched_behind_the_text_that_is_used(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> object:
        raise AssertionError

    monkeypatch.setattr(entry_search, "_places_of_any", never)
    assert list(entries_named(read(shared), "page_frames", (Tag.UNION_TYPE,))) == []


def test_a_text_that_is_nowhere_a_name_is_found_nowhere(shared: Path) -> None:
    assert list(entries_named(read(shared), "age_frames", (Tag.STRUCTURE_TYPE, Tag.VARIABLE))) == []


def test_a_unit_has_what_is_found_in_all(shared: Path) -> None:
    file = read(shared)
    for name in ("page_frames", "counted_pages", "main", "int", "kept", "age_frames"):
        tags = (Tag.STRUCTURE_TYPE, Tag.VARIABLE, Tag.SUBPROGRAM, Tag.BASE_TYPE)
        units = {unit.offset: unit for unit, _ in units_with(file, name.encode())}
        found = [each.entry for unit in units.values() for each in found_in(file, unit, name, tags)]
        assert sorted(each.offset for each in found) == sorted(
            {each.offset for each in entries_named(file, name, tags)}
        )
