# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.symbol_table import elf_symbols
from dprobes.target.unwind.frame_tables import FileFrames
from unit.target.conftest import Toolbox

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
int called(int n);
int first(int n) { return called(n) + called(n + 1); }
__attribute__((section(".init.text"))) int second(int n) { return called(n) * called(n - 1); }
"""


def made(tmp_path: Path) -> Path:
    (tmp_path / "frames.c").write_text(SOURCE)
    Toolbox(tmp_path).run("gcc", "-c", "-g", "-O2", "-fno-asynchronous-unwind-tables", "frames.c", "-o", "frames.o")
    return tmp_path / "frames.o"


def test_the_frames_of_an_object_file_are_relocated(tmp_path: Path) -> None:
    path = made(tmp_path)
    elf = ElfFile.open(path)
    listed = Toolbox(tmp_path).run("readelf", "--debug-dump=frames", path)
    sizes = [int(end, 16) - int(start, 16) for start, end in re.findall(r"pc=([0-9a-f]+)\.\.([0-9a-f]+)", listed)]
    assert 2 == len(sizes)
    (table,) = elf_symbols(elf)
    frames = FileFrames(elf)
    for name, size in zip(("first", "second"), sizes, strict=True):
        (symbol,) = table.find(name)
        rules = frames.rules_at(symbol.address + 1)
        assert rules is not None
        assert (symbol.address, symbol.address + size) == (rules.start, rules.end)
        row = rules.row_at(symbol.address)
        assert row is not None
        assert (7, 8) == (row.frame.register, row.frame.offset)  # rsp + 8, where the return address ends


def test_frames_with_damaged_relocations_are_none(tmp_path: Path) -> None:
    path = made(tmp_path)
    elf = ElfFile.open(path)
    (relocations,) = (each for each in elf.sections if each.name == ".rela.debug_frame")
    data = bytearray(path.read_bytes())
    data[relocations.offset + 8] = 99
    (symbol,) = elf_symbols(elf)[0].find("first")
    assert FileFrames(ElfFile.of_bytes(path, bytes(data))).rules_at(symbol.address) is None
