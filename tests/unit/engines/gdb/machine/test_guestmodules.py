"""The list of a kernel's modules, and their symbols, by structures that are written down here."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from dprobes.engines.gdb.machine.guestmodules import listed_modules, module_symbols
from dprobes.target.kernel.runningkernel import LoadedModule

if TYPE_CHECKING:
    from dprobes.engines.gdb.machine.guestmemory import GuestMemory
    from dprobes.engines.gdb.machine.kernellayout import KernelLayout

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
        return bytes(self.data.get(address + place, 0) for place in range(size))

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
    found = [each.loaded for each in listed_modules(memory_of(), LAYOUT, HEAD)]
    assert found == [LoadedModule("dummy", BASE, 0x3000), LoadedModule("snd_pcm", BASE + 0x8000, 0x3000)]


def test_a_module_that_is_being_loaded_is_left_out() -> None:
    assert [each.loaded.name for each in listed_modules(memory_of(second=COMING), LAYOUT, HEAD)] == ["dummy"]


def test_a_list_that_does_not_come_back_ends() -> None:
    assert len(list(listed_modules(memory_of(end=0), LAYOUT, HEAD))) == 2
    assert len(list(listed_modules(memory_of(end=FIRST + 8), LAYOUT, HEAD))) == 4096


def test_symbols_are_those_that_the_module_defines() -> None:
    memory = memory_of()
    first, second = listed_modules(memory, LAYOUT, HEAD)
    assert module_symbols(memory, LAYOUT, first) == (
        b"ffffffffc0000010 t begin\t[dummy]\nffffffffc0001000 d table\t[dummy]\n"
    )
    assert module_symbols(memory, LAYOUT, second) == b""
