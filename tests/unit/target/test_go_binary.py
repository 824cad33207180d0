"""Which files Go has made, and where their functions take arguments: what its linker leaves, and whatever else."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.elf_headers import LoadSegment, Section
from dprobes.target.go_binary import Convention, convention_of, go_version, passes_in_registers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

MAGIC = b"\xff Go buildinf:"
BASE = 0x1000


@dataclass(eq=False)
class MadeUpFile:
    """Answer as an ``ElfFile`` does that has its data at link address BASE."""

    data: bytes
    machine: str = "x86_64"
    word_size: int = 8
    byte_order: Literal["little"] = "little"
    has_sections: bool = True
    sections: Sequence[Section] = field(init=False)
    load_segments: Sequence[LoadSegment] = field(init=False)

    def __post_init__(self) -> None:
        size = len(self.data)
        self.sections = [Section(".go.buildinfo", 1, 3, BASE, 0, size, 0, 0)] if self.has_sections else []
        self.load_segments = [LoadSegment(BASE, size, 0, size, 6)]

    def section(self, name: str) -> Section | None:
        return next((each for each in self.sections if each.name == name), None)

    def bytes_at(self, offset: int, size: int, what: str) -> bytes:
        if offset + size > len(self.data):
            raise TargetError(what)
        return self.data[offset : offset + size]

    def read(self, address: int, size: int) -> bytes:
        if not BASE <= address <= BASE + len(self.data) - size:
            raise TargetError("it is not there")
        return self.data[address - BASE : address - BASE + size]


def version_of(data: bytes, **more: object) -> tuple[int, int] | None:
    return go_version(MadeUpFile(data, **more))  # type: ignore[arg-type]


def inline(version: str) -> bytes:
    return MAGIC + bytes([8, 2]) + bytes(16) + bytes([len(version)]) + version.encode() + bytes(40)


def by_pointer(version: str, size: int = 8) -> bytes:
    head = MAGIC + bytes([size, 0]) + struct.pack("<Q", BASE + 32) + bytes(8)
    return head + struct.pack("<QQ", BASE + 48, len(version)) + version.encode() + bytes(40)


def test_the_version_is_in_place_or_where_a_pointer_leads() -> None:
    assert version_of(inline("go1.19.8")) == (1, 19)
    assert version_of(inline("go1.22rc1")) == (1, 22)
    assert version_of(by_pointer("go1.17")) == (1, 17)
    assert version_of(bytes(100) + inline("go1.21"), has_sections=False) == (1, 21)


@pytest.mark.parametrize(
    "data", [b"", bytes(64), MAGIC, inline("devel +a1b2"), by_pointer("go1.17", 4), by_pointer("")[:40], inline("")]
)
def test_what_says_no_version_is_none_of_go(data: bytes) -> None:
    assert version_of(data) is None


@given(st.binary(max_size=80))
def test_whatever_follows_the_mark_it_is_a_version_or_none(data: bytes) -> None:
    version_of(MAGIC + data)


def test_registers_are_passed_since_1_17_on_x86_64() -> None:
    for version, machine, passes in (
        ("go1.17", "x86_64", True),
        ("go1.16.9", "x86_64", False),
        ("go1.20", "i386", False),
    ):
        assert passes_in_registers(MadeUpFile(inline(version), machine)) is passes  # type: ignore[arg-type]
    assert not passes_in_registers(ElfFile.open("/bin/true"))


@pytest.mark.parametrize(
    ("name", "convention"),
    [
        ("main.Sum", Convention.GO),
        ("main.(*Pair).Scale", Convention.GO),
        ("type..eq.main.Pair", Convention.GO),
        ("internal/cpu.Initialize", Convention.GO),
        (None, Convention.GO),
        ("internal/cpu.cpuid.abi0", Convention.ABI0),
        ("scaled", Convention.C),
        ("_cgo_342ac0447040_Cfunc_scaled", Convention.C),
        ("parse.constprop.0", Convention.C),
        ("parse.part.3.cold", Convention.C),
        (".hidden", Convention.C),
    ],
)
def test_the_name_of_a_function_tells_its_convention(name: str | None, convention: Convention) -> None:
    assert convention_of(name) is convention
