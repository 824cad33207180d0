"""Which other files have a function of the same name: the dynamic loader gives callers the first one that it finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.elf.file import ElfFile
from dprobes.target.elf.symboltable import elf_symbols

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["providers_of"]


def providers_of(name: str, files: Iterable[Path]) -> list[Path]:
    """Return the files that provide a function for others; those that cannot be read do not."""
    return [path for path in dict.fromkeys(files) if _provides(path, name)]


def _provides(path: Path, name: str) -> bool:
    try:
        tables = elf_symbols(ElfFile.open(path))
        return any(symbol.is_code and symbol.binding != "local" for table in tables for symbol in table.find(name))
    except (TargetError, OSError):
        return False
