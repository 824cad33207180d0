"""
The byte heap of one hit.

Blocks lie one behind the other from the start of the heap; each is a header of one word and its data::

    | header | data, a multiple of the word | header | data ...
             ^ handle: the offset of the data from the start of the heap

A block is allocated first-fit, and what is left of a larger one is split off if a header and a word fit into it. Free
neighbours are joined at once. Fresh data is zero.
"""

from __future__ import annotations

from dprobes.lazydataclass import dataclass

__all__ = ["Heap", "HeapExhaustedError"]


class HeapExhaustedError(Exception):
    """Report that no free block is large enough."""


@dataclass(slots=True)
class _Block:
    handle: int
    size: int
    used: bool


class Heap:
    """Allocate blocks in ``size`` bytes for a word of ``word_size`` bytes."""

    def __init__(self, size: int, word_size: int) -> None:
        self._word = word_size
        self.memory = bytearray(size)
        usable = (size - word_size) // word_size * word_size
        self._blocks = [_Block(word_size, usable, used=False)] if usable > 0 else []

    def allocate(self, size: int) -> int:
        """Return the handle of a new block of at least ``size`` bytes; raise ``HeapExhaustedError`` if none fits."""
        size = max(-(-size // self._word), 1) * self._word
        for position, block in enumerate(self._blocks):
            if block.used or block.size < size:
                continue
            rest = block.size - size
            if rest >= 2 * self._word:
                following = _Block(block.handle + size + self._word, rest - self._word, used=False)
                self._blocks.insert(position + 1, following)
                block.size = size
            block.used = True
            self.memory[block.handle : block.handle + block.size] = bytes(block.size)
            return block.handle
        raise HeapExhaustedError

    def release(self, handle: int) -> bool:
        """Free a block; return False if ``handle`` is not an allocated one."""
        for position, block in enumerate(self._blocks):
            if block.handle == handle and block.used:
                block.used = False
                self._join(position)
                self._join(position - 1)
                return True
        return False

    def block_size(self, handle: int) -> int | None:
        """Return the size in bytes of an allocated block, rounded up to words; None if ``handle`` is not one."""
        for block in self._blocks:
            if block.handle == handle and block.used:
                return block.size
        return None

    def _join(self, position: int) -> None:
        if position < 0 or position + 1 >= len(self._blocks):
            return
        block, following = self._blocks[position], self._blocks[position + 1]
        if not block.used and not following.used:
            block.size += self._word + following.size
            del self._blocks[position + 1]
