"""The list of a kernel's modules, and their symbols, by structures that are written down here."""

from __future__ import annotations

import random
import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from dprobes.engines.gdb.machine import guest_kernel
from dprobes.engines.gdb.machine.guest_kernel import listed_modules, symbols_of_modules
from dprobes.target.kernel.kernel_symbols import Kallsyms
from dprobes.target.kernel.running_kernel import LoadedModule

if TYPE_CHECKING:
    from dprobes.engines.gdb.machine.guest_kernel import KernelLayout
    from dprobes.engines.gdb.machine.machine_target import GuestMemory

LAYOUT = cast(
    "KernelLayout",
    SimpleNamespace(
        module_list=8, module_state=0, module_name=24, module_base=64, module_size=72, module_symbols=80,
        symtab=0, symbol_count=8, strtab=16, typetab=24,
    ),
)  # fmt: skip
HEAD, FIRST, SECOND = 0x1000, 0x2000, 0x3000
LIVE, COMING = 0, 1
BASE = 0xFFFFFFFFC0000000
SYMBOLS, TABLE, NAMES, KINDS = 0x4000, 0x5000, 0x6000, 0x7000


class Memory:
    def __init__(self) -> None:
        self.data: dict[int, int] = {}

    def put(self, address: int, data: bytes) -> None:
        self.data |= {address + place: byte for place, byte in enumerate(data)}

    def read(self, address: int, size: int) -> bytes:
        found = bytearray(size)
        for place, byte in self.data.items():
            if address <= place < address + size:
                found[place - address] = byte
        return bytes(found)

    def word(self, address: int, size: int = 8) -> int:
        return int.from_bytes(self.read(address, size), "little")

    def string(self, address: int) -> bytes:
        return self.read(address, 64).partition(b"\0")[0]


def number(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "little")


def module(memory: Memory, at: int, state: int, name: bytes, base: int, following: int) -> None:
    memory.put(at, number(state, 4))
    memory.put(at + 8, number(following))
    memory.put(at + 24, name + b"\0")
    memory.put(at + 64, number(base) + number(0x3000, 4))


def memory_of(*, second: int = LIVE, end: int = HEAD) -> GuestMemory:
    memory = Memory()
    memory.put(HEAD, number(FIRST + 8))
    module(memory, FIRST, LIVE, b"dummy", BASE, SECOND + 8)
    module(memory, SECOND, second, b"snd_pcm", BASE + 0x8000, end)
    memory.put(FIRST + 80, number(SYMBOLS))
    memory.put(SYMBOLS, number(TABLE) + number(4, 4) + bytes(4) + number(NAMES) + number(KINDS))
    rows = [(0, 0, 0), (1, 2, BASE + 16), (7, 0, 0), (14, 3, BASE + 0x1000)]
    memory.put(TABLE, b"".join(struct.pack("<IBBHQQ", name, 0, 0, section, value, 8) for name, section, value in rows))
    memory.put(NAMES, b"\0begin\0absent\0table\0")
    memory.put(KINDS, b"?tUd")
    return cast("GuestMemory", memory)


def test_modules_come_in_the_order_of_the_list() -> None:
    found = [each.loaded for each in listed_modules(memory_of(), LAYOUT, HEAD).found]
    assert found == [LoadedModule("dummy", BASE, 0x3000), LoadedModule("snd_pcm", BASE + 0x8000, 0x3000)]


def test_a_module_that_is_being_loaded_is_left_out() -> None:
    assert [each.loaded.name for each in listed_modules(memory_of(second=COMING), LAYOUT, HEAD).found] == ["dummy"]


def test_a_list_that_does_not_come_back_ends() -> None:
    found, is_whole = listed_modules(memory_of(end=0), LAYOUT, HEAD)
    assert (len(found), is_whole) == (2, True)
    found, is_whole = listed_modules(memory_of(end=FIRST + 8), LAYOUT, HEAD)
    assert (len(found), is_whole) == (4096, False)


DUMMY = b"ffffffffc0000010 t begin\t[dummy]\nffffffffc0001000 d table\t[dummy]\n"


def test_symbols_are_those_that_the_modules_define() -> None:
    memory = memory_of()
    assert symbols_of_modules(memory, LAYOUT, listed_modules(memory, LAYOUT, HEAD)) == (DUMMY, 0, "")


def changed(place: int, data: bytes) -> GuestMemory:
    """Return the memory with something else in it."""
    memory = memory_of()
    cast("Memory", memory).put(place, data)
    return memory


@pytest.mark.parametrize(
    ("place", "data", "lines", "left_out"),
    [
        (SYMBOLS + 8, number(1 << 31, 4), b"", 1 << 31),
        (NAMES + 1, b"be in", DUMMY[33:], 1),
        (NAMES + 1, b"\n" * 5, DUMMY[33:], 1),
        (KINDS + 3, b"\x80", DUMMY[:33], 1),
        (FIRST + 24, b"a b", b"", 4),
        (TABLE + 24, number(1 << 30, 4), DUMMY[33:], 1),
        (KINDS + 1, b"?", DUMMY.replace(b" t ", b" ? "), 0),
    ],
    ids=["too many", "a blank", "line ends", "no letter", "a module with a blank", "a name elsewhere", "of no kind"],
)
def test_what_can_be_no_symbol_is_left_out_and_counted(place: int, data: bytes, lines: bytes, left_out: int) -> None:
    memory = changed(place, data)
    listed = symbols_of_modules(memory, LAYOUT, listed_modules(memory, LAYOUT, HEAD))
    assert listed[:2] == (lines, left_out)


@pytest.mark.parametrize(("limit", "value"), [("_READ_MAX", 1), ("_LISTING_MAX", 1)])
def test_symbols_of_all_modules_are_bounded(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    """A list of modules may go round in a circle, and each name the same symbols."""
    monkeypatch.setattr(guest_kernel, limit, value)
    memory = memory_of(end=FIRST + 8)
    modules = listed_modules(memory, LAYOUT, HEAD)
    dummies = sum(each.loaded.name == "dummy" for each in modules.found)
    assert symbols_of_modules(memory, LAYOUT, modules) == (DUMMY, 4 * (dummies - 1), "dummy")


def test_memory_that_ends_within_symbols_is_counted() -> None:
    class Short(Memory):
        def read(self, address: int, size: int) -> bytes:
            return super().read(address, 50 if address == TABLE else size)

    memory = Short()
    memory.data = cast("Memory", memory_of()).data
    short = cast("GuestMemory", memory)
    listed = symbols_of_modules(short, LAYOUT, listed_modules(short, LAYOUT, HEAD))
    assert listed == (DUMMY[:33], 2, "dummy")


@pytest.mark.parametrize("part", range(4))
def test_whatever_is_in_memory_is_a_list_of_lines_each_of_which_is_a_symbol(part: int) -> None:
    for seed in range(part, 400, 4):
        dice, memory = random.Random(seed), memory_of()
        data = cast("Memory", memory).data
        for _ in range(dice.randint(1, 8)):
            data[dice.choice(sorted(data))] = dice.choice((0, 1, 8, 10, 32, 91, 93, 0x7F, 0xFF, dice.randrange(256)))
        modules = listed_modules(memory, LAYOUT, HEAD)
        lines, left_out, first = symbols_of_modules(memory, LAYOUT, modules)
        names = {each.loaded.name for each in modules.found}
        symbols = list(Kallsyms(lines).all())
        assert len(symbols) == lines.count(b"\n"), seed
        assert {symbol.module for symbol in symbols} <= names, seed
        assert first in names if left_out else not first, seed
