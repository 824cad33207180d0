"""Which places of a process are compared with the file: those in pages that it has a copy of."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from dprobes.engines.ebpf.attach import code_mappers
from dprobes.engines.ebpf.attach.code_mappers import Mapper, Place
from dprobes.target.process_maps import PAGE_SIZE, parse_maps

if TYPE_CHECKING:
    from dprobes.engines.ebpf.attach.code_mappers import _Memory

START = 0x7F0000000000
FIRST = START // PAGE_SIZE
MAPS = f"{START:x}-{START + 4 * PAGE_SIZE:x} r-xp 00001000 08:01 77 /lib/x.so\n"


class Memory:
    """Some pages are copies; nothing is asked about pages outside the mapping."""

    def __init__(self, *copies: int) -> None:
        self._copies = {FIRST + page for page in copies}

    def private_copies(self, start: int, end: int) -> set[int]:
        assert FIRST <= start < end <= FIRST + 4
        return {page for page in self._copies if start <= page < end}


@pytest.mark.parametrize(
    ("copies", "expected"),
    [((), []), ((0,), [0x10, 0xFFE]), ((1,), [0xFFE, 0x1000]), ((3,), [0x3FFE]), ((0, 3), [0x10, 0xFFE, 0x3FFE])],
)
def test_an_instruction_is_where_its_first_and_last_byte_are(copies: tuple[int, ...], expected: list[int]) -> None:
    places = [Place(PAGE_SIZE + offset, bytes(4)) for offset in (0x10, 0xFFE, 0x1000, 0x3FFE)]
    mapper = Mapper(1, 1, tuple(parse_maps(MAPS)), MAPS)
    found = code_mappers._copied(cast("_Memory", Memory(*copies)), mapper, places)
    assert [(START + offset, offset + PAGE_SIZE) for offset in expected] == [(at, place.offset) for at, place in found]
