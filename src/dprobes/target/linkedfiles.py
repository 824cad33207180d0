"""The files that a program is linked with: what the dynamic loader maps before the program begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.elf.file import ElfFile
from dprobes.target.modules import find_module

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["linked_files"]

_FILES_MAX = 500
"""How many libraries of a program are looked at."""


def linked_files(program: Path) -> dict[str, Path | None]:
    """Return the libraries that a program is linked with, and those of these, by their names; None is not found."""
    found: dict[str, Path | None] = {}
    waiting = [program]
    while waiting and len(found) < _FILES_MAX:
        try:
            elf = ElfFile.open(waiting.pop())
        except TargetError:
            continue
        for name in elf.needed:
            if name not in found:
                found[name] = path = find_module(name, architecture=elf.machine)
                if path is not None:
                    waiting.append(path)
    return found
