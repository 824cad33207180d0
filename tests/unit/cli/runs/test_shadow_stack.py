"""Paths of calls from tables that handlers have written."""

from __future__ import annotations

import struct

from dprobes.cli.runs.code_places import CodePlaces
from dprobes.cli.runs.shadow_stack import depth_of, paths_in
from dprobes.keyed.table_layout import TableContents, TableRow
from dprobes.rpn.keyed_tables import Key, KeyKind, Table, TableKind

WORDS = (Key(KeyKind.WORD), Key(KeyKind.WORD), Key(KeyKind.ADDRESS), Key(KeyKind.ADDRESS))


def test_a_frame_takes_no_more_variables_than_a_thread_has() -> None:
    assert (depth_of(keeps_paths=False), depth_of(keeps_paths=True)) == (239, 191)


def paths(*rows: tuple[int, int, int, int, int]) -> dict[tuple[str, ...], int]:
    """Return the times of paths from rows of the table: path, parent, caller, function, time."""
    table = Table("paths", TableKind.SUM, WORDS)
    contents = TableContents(
        table, tuple(TableRow(struct.pack("<4Q", *row[:4]), (row[4] & (1 << 64) - 1,)) for row in rows)
    )
    return paths_in([contents], CodePlaces[str](None, {}, 11))


def test_paths_are_put_together_from_their_parents() -> None:
    assert paths((1, 0, 0, 0xA, 5), (2, 1, 0xA, 0xB, 7), (3, 2, 0xB, 0xA, 9)) == {
        ("0xa",): 5,
        ("0xa", "0xb"): 7,
        ("0xa", "0xb", "0xa"): 9,
    }


def test_a_path_begins_with_the_caller_whose_call_has_not_ended() -> None:
    assert paths((2, 1, 0xA, 0xB, 7), (3, 2, 0xB, 0xC, 9)) == {("0xa", "0xb"): 7, ("0xa", "0xb", "0xc"): 9}


def test_a_path_that_is_its_own_parent_ends() -> None:
    (stack,) = paths((1, 1, 0xA, 0xA, 5))
    assert len(stack) == depth_of(keeps_paths=True) + 1


def test_times_below_zero_have_no_path() -> None:
    assert paths((1, 0, 0, 0xA, -3)) == {}
