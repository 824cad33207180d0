"""Which other files have functions of the same names: the dynamic loader gives callers the first one that it finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.elf.file import ElfFile
from dprobes.target.elf.symboltable import elf_symbols

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["providers_of"]


def providers_of(names: Sequence[str], files: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the files that provide functions for others, by the names of these; what cannot be read provides none."""
    found: dict[str, list[Path]] = {}
    for path in dict.fromkeys(files):
        for name in _provided(path, names):
            found.setdefault(name, []).append(path)
    return found


def _provided(path: Path, names: Sequence[str]) -> list[str]:
    try:
        tables = elf_symbols(ElfFile.open(path))
        return [
            name
            for name in names
            if any(symbol.is_code and symbol.binding != "local" for table in tables for symbol in table.find(name))
        ]
    except (TargetError, OSError):
        return []
