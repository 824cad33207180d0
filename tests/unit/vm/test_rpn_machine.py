"""The heap of a hit: what becomes of the rest of a block."""

from __future__ import annotations

import pytest

from dprobes.vm.rpn_machine import Heap, HeapExhaustedError


@pytest.mark.parametrize("word", [4, 8])
def test_a_rest_without_room_for_a_word_stays_with_its_block(word: int) -> None:
    heap = Heap(4 * word, word)
    handle = heap.allocate(2 * word)
    assert heap.block_size(handle) == 3 * word
    with pytest.raises(HeapExhaustedError):
        heap.allocate(word)


@pytest.mark.parametrize("word", [4, 8])
def test_a_rest_with_room_for_a_word_becomes_a_block(word: int) -> None:
    heap = Heap(4 * word, word)
    handle = heap.allocate(word)
    assert heap.block_size(handle) == word
    assert heap.allocate(word) == handle + 2 * word
