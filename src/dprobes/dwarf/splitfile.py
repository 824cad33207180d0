"""
Files of debug information that the compiler has put aside, one for each unit (``-gsplit-dwarf``; DWARF 5, 7.3.2).

The program has a *skeleton* of the unit, with its addresses, lines and the name of the file; a number that both have
says that they belong together.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.elf.file import ElfFile

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NOT_THERE", "split_files"]

NOT_THERE = "put the .dwo files where the program is, or compile it without -gsplit-dwarf"
"""What to do where none of the files is the right one."""


def split_files(program: ElfFile, name: str, directory: str) -> Iterator[ElfFile]:
    """Give the files that may be the one of a unit: where it was compiled, and beside the program."""
    path = Path(directory) / name
    for candidate in (path, Path(os.path.realpath(program.path)).parent / path.name):
        try:
            yield ElfFile.open(candidate)
        except TargetError:
            continue
