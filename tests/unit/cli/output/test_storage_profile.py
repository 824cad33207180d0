"""Layouts with their holes, the fields that an access touches, and the map."""

from __future__ import annotations

from dprobes.cli.output.storage_profile import Field, StorageProfile, UnseenCode, layout_of, map_lines, text_rows
from dprobes.dpc.types.c_types import Array, Integer, Member, Record

CHAR = Integer("char", 1, is_signed=True, rank=1)
INT = Integer("int", 4, is_signed=True, rank=3)
LONG = Integer("long", 8, is_signed=True, rank=4)


def record(size: int, *members: Member) -> Record:
    made = Record("made")
    made.define(members, size, 8)
    return made


INNER = record(8, Member("low", CHAR, 0), Member("high", INT, 4))
OUTER = record(
    24,
    Member("flag", CHAR, 0),
    Member("part", INNER, 4),
    Member("bits", INT, 12, bits=3, shift=9),
    Member("end", CHAR, 16),
)


def test_inner_structures_are_their_fields_and_bytes_of_none_are_holes() -> None:
    assert layout_of(OUTER, "x").fields == (
        Field(0, 1, "flag"),
        Field(1, 3, "(hole)"),
        Field(4, 1, "part.low"),
        Field(5, 3, "(hole)"),
        Field(8, 4, "part.high"),
        Field(12, 1, "(hole)"),
        Field(13, 1, "bits"),
        Field(14, 2, "(hole)"),
        Field(16, 1, "end"),
        Field(17, 7, "(hole)"),
    )


def test_an_access_touches_each_field_that_it_overlaps_once() -> None:
    layout = layout_of(Array(OUTER, 3), "x")
    assert (layout.size, layout.whole) == (24, 72)

    def names(offset: int, size: int) -> list[str]:
        return [field.name for field in layout.fields_at(offset, size)]

    assert names(24, 1) == ["flag"]
    assert names(32, 4) == ["part.high"]
    assert names(-3, 4) == ["flag"]
    assert names(64, 16) == ["end", "(hole)"]
    assert names(46, 4) == ["(hole)", "flag", "(hole)"]
    assert names(72, 4) == []


def test_a_number_is_a_layout_of_one_field() -> None:
    assert layout_of(LONG, "x").fields == (Field(0, 8, "x"),)
    assert layout_of(Array(INT, 5), "x")[1:] == (4, 20, (Field(0, 4, "x"),))


def test_the_map_marks_fields_that_reach_into_the_next_line() -> None:
    layout = layout_of(record(72, Member("pad", Array(CHAR, 60), 0), Member("wide", Array(LONG, 1), 60)), "x")
    wide = layout.fields[1]
    profile = StorageProfile(layout, "m", {(wide, "f"): (1, 0), (wide, "g"): (0, 2)}, 1, ())
    assert list(map_lines(profile)) == [
        "cache line 0: bytes 0 to 63",
        "     0    60  pad[60]",
        "    60     8+ wide[1]  rrrrrrrrrrWWWWWWWWWWWWWWWWWWWW 1 read, 2 writes",
        "cache line 1: bytes 64 to 71",
        "    68     4  (hole)",
        "72 bytes, 2 cache lines (2 accessed), 1 hole of 4 bytes",
    ]
    assert list(text_rows(profile)) == [
        ("0", "60", "pad[60]", "", "0", "0"),
        ("60", "8", "wide[1]", "", "1", "2"),
        ("", "", "", "g", "0", "2"),
        ("", "", "", "f", "1", "0"),
        ("68", "4", "(hole)", "", "0", "0"),
    ]


def test_one_unseen_instruction_is_in_the_singular() -> None:
    assert [UnseenCode(number, "instructions that access elements by a mask").text for number in (1, 2)] == [
        "1 instruction that accesses elements by a mask",
        "2 instructions that access elements by a mask",
    ]
