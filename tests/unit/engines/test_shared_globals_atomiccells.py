"""Cells that others change at the same time: no change is lost."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.shared_globals import AtomicCells, add_to_word, raise_word

if TYPE_CHECKING:
    from collections.abc import Callable

TIMES = 20_000


def cells_of(memory: mmap.mmap) -> AtomicCells:
    return AtomicCells(memoryview(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory)))


def in_processes(work: Callable[[int], None]) -> None:
    children = []
    for number in range(3):
        child = os.fork()
        if not child:
            work(number)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3


def test_cells_and_their_low_halves_are_stored_and_added_to() -> None:
    cells = cells_of(mmap.mmap(-1, 4096))
    cells[3] = (1 << 64) - 1
    cells.store(3, 7, 4)
    cells.add(4, -1, 4)
    cells.add(5, -2, 8)
    cells.store(6, 9, 8)
    assert [cells[n] for n in range(2, 8)] == [0, 0xFFFFFFFF_00000007, 0xFFFFFFFF, (1 << 64) - 2, 9, 0]
    assert len(cells) == 512
    assert cells.view()[6] == 9


def test_there_are_no_others_and_no_fewer() -> None:
    cells = cells_of(mmap.mmap(-1, 4096))
    for index in (-1, 512):
        with pytest.raises(IndexError):
            cells.add(index, 1, 8)
    with pytest.raises(TypeError, match="the number of shared variables is fixed"):
        cells.append(1)


def test_adding_tells_what_was_there() -> None:
    memory = mmap.mmap(-1, 4096)
    cells = cells_of(memory)
    cells[0] = 40
    assert [add_to_word(cells._address, amount) for amount in (2, -43, 0)] == [40, 42, (1 << 64) - 1]


def test_no_addition_of_others_is_lost() -> None:
    cells = cells_of(mmap.mmap(-1, 4096))

    def add(number: int) -> None:
        for _ in range(TIMES):
            cells.add(1, 1, 8)

    in_processes(add)
    assert cells[1] == 3 * TIMES


def test_the_greatest_number_stays_without_a_sign() -> None:
    cells = cells_of(mmap.mmap(-1, 4096))

    def offer(number: int) -> None:
        for n in range(TIMES):
            raise_word(cells._address, n * 3 + number)

    in_processes(offer)
    assert cells[0] == 3 * (TIMES - 1) + 2
    raise_word(cells._address, 1 << 63)
    raise_word(cells._address, 5)
    assert cells[0] == 1 << 63
