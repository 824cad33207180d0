"""Walks through maple trees that are written down here, as the kernel writes them."""

from __future__ import annotations

import struct

import pytest

from dprobes.engines.gdb.machine.guest_processes import MapleLayout, MapleTree
from dprobes.errors import TargetError

LAYOUT = MapleLayout(root=8, pivots=8, slots=128, gap_pivots=8, gap_slots=80)
TREE, TOP, LEFT, RIGHT = 0x9000, 0x1000, 0x1100, 0x1200
LEAF, RANGE, GAPS = 1, 2, 3
LAST = (1 << 64) - 1


def pointer(node: int, kind: int, *, is_root: bool = False) -> int:
    return node | kind << 3 | 4 | 2 * is_root


def node(pivots: list[int], slots: list[int], *, knows_gaps: bool = False) -> bytes:
    count = 9 if knows_gaps else 15
    words = [0, *pivots, *[0] * (count - len(pivots)), *slots]
    return struct.pack(f"<{len(words)}Q", *words).ljust(256, b"\0")


def tree(root: int, nodes: dict[int, bytes]) -> MapleTree:
    memory = {TREE: struct.pack("<QQ", 0, root), **nodes}

    def read(address: int, size: int) -> bytes:
        start = address & ~0xFF
        return memory.get(start, b"")[address - start : address - start + size]

    return MapleTree(read, LAYOUT, TREE)


NODES = {
    TOP: node([0x4FFF, 0x9FFF], [pointer(LEFT, LEAF), pointer(RIGHT, LEAF)], knows_gaps=True),
    LEFT: node([0xFFF, 0x2FFF, 0x3FFF, 0x4FFF], [0, 0xAA00, 0, 0xBB00]),
    RIGHT: node([0x5FFF, 0x6FFF], [0xCC00, 0, 0xDD00]),
}
WHOLE = tree(
    pointer(TOP, GAPS, is_root=True),
    {**NODES, TOP: node([0x4FFF], [pointer(LEFT, LEAF), pointer(RIGHT, LEAF)], knows_gaps=True)},
)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (0, 0),
        (0xFFF, 0),
        (0x1000, 0xAA00),
        (0x2FFF, 0xAA00),
        (0x3000, 0),
        (0x4FFF, 0xBB00),
        (0x5000, 0xCC00),
        (0x6800, 0),
        (0x7000, 0xDD00),
        (LAST, 0xDD00),
    ],
)
def test_an_entry_is_that_of_its_range(index: int, expected: int) -> None:
    assert WHOLE.entry_at(index) == expected


def test_entries_come_in_order() -> None:
    assert list(WHOLE.entries()) == [0xAA00, 0xBB00, 0xCC00, 0xDD00]


def test_a_full_leaf_has_a_slot_more_than_pivots() -> None:
    pivots = [0x1000 * n - 1 for n in range(1, 16)]
    full = tree(pointer(LEFT, LEAF, is_root=True), {LEFT: node(pivots, [0x100 * n for n in range(1, 17)])})
    assert full.entry_at(0xE800) == 0xF00
    assert full.entry_at(0xF000) == 0x1000
    assert len(list(full.entries())) == 16


def test_what_lies_behind_the_last_pivot_of_a_parent_is_not_looked_at() -> None:
    """The last slot of a node that is not full has other data: how many there are."""
    leaf = node([0xFFF, 0x1FFF], [0xAA00, 0xBB00, *[0] * 12, 0x1234])
    upper = node([0x1FFF], [pointer(LEFT, LEAF), pointer(RIGHT, LEAF)])
    found = tree(pointer(TOP, RANGE, is_root=True), {TOP: upper, LEFT: leaf, RIGHT: node([], [0xCC00])})
    assert list(found.entries()) == [0xAA00, 0xBB00, 0xCC00]


def test_a_tree_without_nodes() -> None:
    assert list(tree(0, {}).entries()) == []
    assert tree(0, {}).entry_at(5) == 0
    assert list(tree(0xAB00, {}).entries()) == [0xAB00]
    assert (tree(0xAB00, {}).entry_at(0), tree(0xAB00, {}).entry_at(1)) == (0xAB00, 0)


def test_what_is_no_tree_is_an_error() -> None:
    with pytest.raises(TargetError, match="256 bytes at 0x1000 cannot be read"):
        tree(pointer(TOP, GAPS, is_root=True), {}).entry_at(1)
    with pytest.raises(TargetError, match="a maple tree has a node of type 7"):
        list(tree(pointer(TOP, 7, is_root=True), NODES).entries())
    looped = {TOP: node([LAST], [pointer(TOP, RANGE)])}
    with pytest.raises(TargetError, match="a maple tree of more than 32 levels"):
        tree(pointer(TOP, RANGE, is_root=True), looped).entry_at(1)
    with pytest.raises(TargetError, match="a maple tree that does not end"):
        list(tree(pointer(TOP, RANGE, is_root=True), looped).entries())
