"""
Maple trees, in which Linux keeps the mappings of an address space since 6.1 (``include/linux/maple_tree.h``).

A node has ascending pivots and one slot more: slot N is what there is from behind pivot N-1 up to pivot N. A pivot of 0
behind the first one, or none at all, means the last number that the node is about. A pointer to a node has its type in
its lower bits::

    63              8 7    6..3   2    1    0
    │ node (256 B)   │  │ type │ 1 │ root │ 0 │

The root's pointer has bit 1; a tree without nodes has an entry for 0 in its place.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.target.btf import Btf

__all__ = ["MapleLayout", "MapleTree"]

_NODE_MASK = ~0xFF
_TYPE_SHIFT, _TYPE_MASK = 3, 0xF
_LEAF, _RANGE, _ALLOCATION_RANGE = 1, 2, 3
"""``enum maple_type``: a leaf, a node, and a node that knows of gaps."""
_INTERNAL_MASK, _INTERNAL, _RESERVED_MAX = 3, 2, 4096
"""What tells a pointer to a node from an entry at the root (``xa_is_node``)."""
_NODE_SIZE, _WORD = 256, 8
_LAST = (1 << 64) - 1
_DEPTH_MAX = 32
_ENTRIES_MAX = 1 << 18


@dataclass(frozen=True, slots=True)
class MapleLayout:
    """Say where pivots and slots begin: in nodes, leaves among them, and in those that know of gaps."""

    root: int
    pivots: int
    slots: int
    gap_pivots: int
    gap_slots: int

    @classmethod
    def of(cls, types: Btf) -> MapleLayout:
        """Return what a kernel's types say; raise ``TargetError`` if it has no such trees."""
        return cls(
            types.member_offset("maple_tree", "ma_root"),
            types.member_offset("maple_range_64", "pivot"),
            types.member_offset("maple_range_64", "slot"),
            types.member_offset("maple_arange_64", "pivot"),
            types.member_offset("maple_arange_64", "slot"),
        )


class MapleTree:
    """The tree whose ``struct maple_tree`` is at an address; ``read`` returns memory, less if it cannot all be read."""

    def __init__(self, read: Callable[[int, int], bytes], layout: MapleLayout, address: int) -> None:
        self._read, self._layout = read, layout
        self._root = self._words(address + layout.root, 1)[0]

    def _words(self, address: int, count: int) -> tuple[int, ...]:
        data = self._read(address, count * _WORD)
        if len(data) < count * _WORD:
            raise TargetError(f"{count * _WORD} bytes at {address:#x} cannot be read")
        return struct.unpack(f"<{count}Q", data)

    @property
    def _has_nodes(self) -> bool:
        return self._root & _INTERNAL_MASK == _INTERNAL and self._root > _RESERVED_MAX

    def _slots(self, pointer: int, limit: int) -> Iterator[tuple[int, int]]:
        """Iterate over the slots of a node, each with the last number that it is for."""
        kind = pointer >> _TYPE_SHIFT & _TYPE_MASK
        if kind not in (_LEAF, _RANGE, _ALLOCATION_RANGE):
            raise TargetError(f"a maple tree has a node of type {kind} at {pointer:#x}")
        layout = self._layout
        knows_gaps = kind == _ALLOCATION_RANGE
        pivots, slots = (layout.gap_pivots, layout.gap_slots) if knows_gaps else (layout.pivots, layout.slots)
        words = self._words(pointer & _NODE_MASK, _NODE_SIZE // _WORD)
        count = (slots - pivots) // _WORD
        for number in range(count + 1):
            pivot = words[pivots // _WORD + number] if number < count else limit
            last = limit if (number and not pivot) or pivot > limit else pivot
            yield words[slots // _WORD + number], last
            if last >= limit:
                return

    def entry_at(self, index: int) -> int:
        """Return the entry for a number, 0 if there is none; raise ``TargetError`` if the tree cannot be read."""
        if not self._has_nodes:
            return self._root if not index else 0
        pointer, limit = self._root, _LAST
        for _ in range(_DEPTH_MAX):
            found, limit = next(each for each in self._slots(pointer, limit) if index <= each[1])
            if pointer >> _TYPE_SHIFT & _TYPE_MASK == _LEAF or not found:
                return found
            pointer = found
        raise TargetError(f"a maple tree of more than {_DEPTH_MAX} levels")

    def entries(self) -> Iterator[int]:
        """Iterate over the entries in ascending order; raise ``TargetError`` if the tree cannot be read."""
        if not self._has_nodes:
            yield from (self._root,) if self._root else ()
            return
        yielded = 0
        waiting = [(self._root, _LAST, 0)]
        while waiting:
            pointer, limit, depth = waiting.pop()
            if depth > _DEPTH_MAX or yielded > _ENTRIES_MAX:
                raise TargetError("a maple tree that does not end")
            slots = [each for each in self._slots(pointer, limit) if each[0]]
            if pointer >> _TYPE_SHIFT & _TYPE_MASK == _LEAF:
                yielded += len(slots)
                yield from (entry for entry, _ in slots)
            else:
                waiting += [(child, last, depth + 1) for child, last in reversed(slots)]
