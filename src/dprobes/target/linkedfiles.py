"""The files that a program is linked with: what the dynamic loader maps before the program begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.elf.file import ElfFile
from dprobes.target.modules import find_module, is_library_for, searched_directories

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["linked_files", "preloaded_files"]

_FILES_MAX = 500
"""How many libraries of a program are looked at."""


def preloaded_files(environment: Mapping[str, str]) -> Iterator[Path]:
    """Give the files that an environment has the dynamic loader map before all libraries (LD_PRELOAD, ld.so(8))."""
    for name in environment.get("LD_PRELOAD", "").replace(":", " ").split():
        path = find_module(name)
        if path is not None:
            yield path


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
                found[name] = path = _beside(elf, name) or find_module(name, architecture=elf.machine)
                if path is not None:
                    waiting.append(path)
    return found


def _beside(elf: ElfFile, name: str) -> Path | None:
    """Return a library in one of the directories that are searched before those of the system."""
    paths = [directory / name for directory in searched_directories(elf)] if "/" not in name else []
    return next((path.resolve() for path in paths if is_library_for(path, elf.machine)), None)
