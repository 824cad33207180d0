"""Memory that is found by what points to it: whole areas, none twice, and of files what is not in them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal, cast

import pytest

from dprobes.engines.gdb.stub_core import FoundMemory
from dprobes.target.process_maps import PAGE_SIZE

if TYPE_CHECKING:
    from dprobes.engines.gdb.stub_target import StubTarget

PAGE = PAGE_SIZE
BASE = 0x400000


class Memory:
    """Pages that can be read, by their addresses; what was not stored is zero."""

    def __init__(self, pages: set[int], order: Literal["little", "big"] = "little") -> None:
        self.pages, self.byte_order = pages, order
        self.stored: dict[int, bytes] = {}

    def read(self, address: int, size: int) -> bytes:
        for start, data in self.stored.items():
            if start <= address < start + len(data):
                return data[address - start :][:size]
        return b""

    def read_anew(self, address: int, size: int) -> bytes:
        return bytes(size) if address & -PAGE in self.pages else b""


def pages(start: int, count: int) -> set[int]:
    return {start + n * PAGE for n in range(count)}


def found(memory: Memory, word_size: int = 8) -> FoundMemory:
    return FoundMemory(cast("StubTarget", memory), word_size)


def ranges(memory: FoundMemory) -> list[tuple[int, int, int]]:
    return [(each.start, each.end, each.size) for each in memory.segments]


def test_the_area_around_an_address_is_found_once() -> None:
    memory = found(Memory(pages(0x10000, 3) | pages(0x20000, 1)))
    memory.add_around([0x11234, 0x10000, 0x20FFF, 0x13000, 0, 1 << 64, (1 << 64) - 1])
    assert ranges(memory) == [(0x10000, 0x13000, 3 * PAGE), (0x20000, 0x21000, PAGE)]


def test_an_area_ends_at_what_is_known() -> None:
    memory = found(Memory(pages(0x10000, 8)))
    memory.add_stack(0x14008)
    assert ranges(memory) == [(0x14000, 0x18000, 4 * PAGE)]
    memory.add_around([0x11000])
    assert ranges(memory) == [(0x10000, 0x14000, 4 * PAGE), (0x14000, 0x18000, 4 * PAGE)]


def test_an_area_without_end_is_cut() -> None:
    endless = Memory(set())
    endless.read_anew = lambda address, size: bytes(size)  # type: ignore[method-assign]
    memory = found(endless)
    memory.add_around([1 << 40])
    assert ranges(memory) == [((1 << 40) - (1 << 20), (1 << 40) + (1 << 20), 2 << 20)]


def elf(word_size: int, order: Literal["little", "big"], link: int) -> bytes:
    """Return the headers of a file: code with the headers, and data that begins in the page where the code ends."""
    prefix, word = ("<" if order == "little" else ">"), ("Q" if word_size == 8 else "I")
    loaded = [(5, 0, link, 0x1800, 0x1800), (6, 0x1900, link + 0x1900, 0x200, 0x2000)]
    header, entry = (64, 56) if word_size == 8 else (52, 32)
    head = b"\x7fELF".ljust(16, b"\0") + struct.pack(f"{prefix}HHI3{word}", 2, 0, 1, link, header, 0)
    head += struct.pack(f"{prefix}I6H", 0, header, entry, len(loaded), 0, 0, 0)
    assert len(head) == header
    for flags, offset, address, in_file, in_memory in loaded:
        if word_size == 8:
            head += struct.pack(f"{prefix}II6Q", 1, flags, offset, address, address, in_file, in_memory, PAGE)
        else:
            head += struct.pack(f"{prefix}8I", 1, offset, address, address, in_file, in_memory, flags, PAGE)
    return head


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize("word_size", [4, 8])
@pytest.mark.parametrize("link", [0, BASE])
def test_of_a_file_its_headers_and_what_can_be_written(
    word_size: int, order: Literal["little", "big"], link: int
) -> None:
    memory = Memory(set(), order)
    memory.stored[BASE] = elf(word_size, order, link)
    files = found(memory, word_size)
    assert files.add_file(BASE, "/bin/x") == BASE + 4 * PAGE
    assert ranges(files) == [(BASE, BASE + PAGE, PAGE), (BASE + PAGE, BASE + 4 * PAGE, 3 * PAGE)]
    assert [each.permissions for each in files.segments] == ["r-xp", "rw-p"]
    assert [(each.start, each.offset, each.path) for each in files.files] == [
        (BASE, 0, "/bin/x"),
        (BASE + PAGE, PAGE, "/bin/x"),
    ]


def test_what_is_no_file() -> None:
    memory = found(Memory(set()))
    assert memory.add_file(BASE, "/bin/x") == BASE
    assert (memory.segments, memory.files) == ([], [])
