"""In files of 64-bit PowerPC a function's symbol is the address of a descriptor, which says where the code is."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.symbol_table import FunctionDescriptors
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from pathlib import Path

COMPILER = "powerpc64-linux-gnu-gcc"
SOURCE = "int work(int n) { return n + 1; }\nint data = 5;\n"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is not installed")
    (tmp_path / "work.c").write_text(SOURCE)
    subprocess.run([COMPILER, "-O1", "-shared", "-o", "work.so", "work.c"], cwd=tmp_path, check=True)
    return tmp_path / "work.so"


def test_symbols_of_functions_are_their_code(library: Path) -> None:
    module = Module.load(library)
    descriptors = FunctionDescriptors.of(module.elf)
    assert descriptors is not None
    address = module.address_of("work")
    assert module.elf.code_range(address) is not None
    assert not descriptors.address <= address < descriptors.address + len(descriptors.data)
    assert module.symbol_at(module.file_offset(address) + 4) == ("work", 4)
    assert "work" in module.names_at(module.file_offset(address))
    assert module.elf.code_range(module.address_of("data")) is None


def test_an_address_that_is_none_of_a_descriptor_stays() -> None:
    descriptors = FunctionDescriptors(0x1000, (0x500).to_bytes(8, "big") + bytes(16))
    assert descriptors.code_of(0x1000) == 0x500
    assert descriptors.code_of(0x1004) == 0x1004
    assert descriptors.code_of(0xFF8) == 0xFF8
    assert descriptors.code_of(0x1018) == 0x1018


def test_other_files_have_none() -> None:
    assert FunctionDescriptors.of(ElfFile.open("/bin/true")) is None
