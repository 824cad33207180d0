"""Code that is patched when the kernel runs: alternatives by their section, everything else by its form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.target.code.machine_code import decode
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.kernel.kernel_files import alternatives, is_patched_form

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("entry", [12, 14])
def test_alternatives_of_both_layouts_are_found(entry: int, kernel_file: Callable[[str, int], Path]) -> None:
    assert alternatives(ElfFile.open(kernel_file("vmlinux", entry))) == [(0xFFFFFFFF81000016, 6)]


@pytest.mark.parametrize("entry", [12, 14])
def test_alternatives_of_modules_are_found_by_relocations(entry: int, kernel_file: Callable[[str, int], Path]) -> None:
    elf = ElfFile.open(kernel_file("dummy.ko", entry))
    text = next(section for section in elf.sections if section.name == ".text")
    assert alternatives(elf) == [(text.offset + 0x16, 6)]


def test_another_layout_is_unknown(kernel_file: Callable[[str], Path]) -> None:
    elf = ElfFile.open(kernel_file("vmlinux"))
    section = next(section for section in elf.sections if section.name == ".altinstructions")
    assert isinstance(elf.data, bytes)
    broken = elf.data[: section.offset] + b"\x7f" * 4 + elf.data[section.offset + 4 :]
    assert alternatives(ElfFile.of_bytes(elf.path, broken)) is None


@pytest.mark.parametrize(
    ("code", "is_patched"),
    [
        ("e800000000", True),  # a call, of ftrace or a static one
        ("2ee800000000", True),  # of a thunk, with a prefix
        ("e900000000", True),
        ("eb02", True),  # a jump label
        ("6690", True),
        ("0f1f440000", True),
        ("f30f1efa", True),
        ("0f8500000000", True),  # to a thunk
        ("7502", False),
        ("f0480fb10a", True),  # lock cmpxchg
        ("3e480fb10a", False),
        ("55", False),
        ("4889e5", False),
        ("c3", False),
        ("ff1500000000", True),  # of a paravirtual operation
    ],
)
def test_forms(code: str, is_patched: bool) -> None:
    (instruction,) = decode(bytes.fromhex(code), 64, 0x1000)
    assert is_patched_form(instruction) == is_patched
