"""Stacks of programs in a machine, by a file that is compiled here."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, cast

import pytest

from dprobes.arch import architecture
from dprobes.engines.gdb.machine.guest_processes import MappedFile
from dprobes.engines.gdb.machine.guest_stacks import ProgramStacks
from dprobes.rpn.instruction_set import StackEnd
from dprobes.target.elf.elf_file import ElfFile

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.engines.gdb.machine.guest_processes import AddressSpaces

SPACE, BIAS, STACK, ELSEWHERE = 0x100, 0x550000000000, 0x7FFF0000, 0x7F0000000000
SOURCE = (
    "int outer(int n) { return n; } int inner(int n) { return outer(n + 1) + 1; } int main(void) { return inner(1); }"
)


class Spaces:
    """An address space with the code of a file, its build-id, and some words on its stack."""

    def __init__(self, elf: ElfFile, words: dict[int, int], *, is_same: bool = True) -> None:
        self.elf, self.words, self.is_same = elf, words, is_same
        self.segment = next(each for each in elf.load_segments if each.executable)

    def file_at(self, space: int, address: int) -> MappedFile | None:
        start = BIAS + self.segment.vaddr
        if space != SPACE or not start <= address < start + 4096:
            return None
        return MappedFile(space, start, start + 4096, self.segment.offset, True, b"stacked", 7)

    def read(self, _: int, address: int, size: int) -> bytes:
        if address in self.words:
            return self.words[address].to_bytes(size, "little")
        if not BIAS <= address < BIAS + 4096:
            return b""
        data = self.elf.read(address - BIAS, size)
        return data if self.is_same else bytes(size)


@pytest.fixture(scope="module")
def elf(tmp_path_factory: pytest.TempPathFactory) -> ElfFile:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    path: Path = tmp_path_factory.mktemp("stacks") / "stacked"
    command = ["gcc", "-O1", "-fno-inline", "-fomit-frame-pointer", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    return ElfFile.open(path)


def walk(elf: ElfFile, spaces: Spaces, pc: int) -> list[int]:
    names = {
        each.index: f"r{each.name[1:]}" for each in architecture("x86_64").registers if each.name in ("eip", "esp")
    }
    stacks = ProgramStacks(cast("AddressSpaces", spaces), architecture("x86_64"), names, (elf,))
    return stacks.stack({"rip": pc, "rsp": STACK}, SPACE, 10)


def test_a_function_that_has_just_begun_was_called_from_what_is_on_the_stack(elf: ElfFile) -> None:
    place = BIAS + elf.entry
    found = walk(elf, Spaces(elf, {STACK: ELSEWHERE}), BIAS + first_function(elf))
    assert found == [BIAS + first_function(elf), ELSEWHERE, StackEnd.NO_TABLE]
    assert walk(elf, Spaces(elf, {STACK: ELSEWHERE}), place) == [place]  # nothing calls the start of a program


def test_a_file_of_another_build_has_no_tables(elf: ElfFile) -> None:
    place = BIAS + first_function(elf)
    assert walk(elf, Spaces(elf, {STACK: ELSEWHERE}, is_same=False), place) == [place, StackEnd.NO_TABLE]


def test_a_stack_that_cannot_be_read_ends(elf: ElfFile) -> None:
    place = BIAS + first_function(elf)
    assert walk(elf, Spaces(elf, {}), place) == [place, StackEnd.UNREADABLE]


def first_function(elf: ElfFile) -> int:
    listed = subprocess.run(["nm", elf.path], capture_output=True, text=True, check=True).stdout
    return next(int(line.split()[0], 16) for line in listed.splitlines() if line.endswith(" T inner"))
