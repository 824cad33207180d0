"""
Files of debug information that the compiler has put aside, one for each unit (``-gsplit-dwarf``; DWARF 5, 7.3.2).

The program has a *skeleton* of the unit, with its addresses, lines and the name of the file; a number that both have
says that they belong together. DWARF 4 has that in GNU's forms.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.dwarf.numbers import At, UnitKind
from dprobes.errors import TargetError
from dprobes.target.elf.file import ElfFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.dwarf.units import Unit

__all__ = ["NOT_THERE", "number_of", "split_files"]

NOT_THERE = "put the .dwo files or their .dwp package where the program is, or compile it without -gsplit-dwarf"
"""What to do where none of the files is the right one."""


def number_of(unit: Unit) -> int | None:
    """Return the number that both parts of a unit have; None if it has none."""
    if unit.sizes.version >= 5:
        return unit.signature if unit.kind in (UnitKind.SKELETON, UnitKind.SPLIT_COMPILE) else None
    number = unit.root.number(At.GNU_DWO_ID)
    return None if number is None else number & (1 << 64) - 1


def split_files(program: ElfFile, name: str, directory: str) -> Iterator[ElfFile]:
    """Give the files that may be the one of a unit: where it was compiled, and beside the program."""
    path = Path(directory) / name
    for candidate in (path, Path(os.path.realpath(program.path)).parent / path.name):
        try:
            yield ElfFile.open(candidate)
        except TargetError:
            continue
