"""Where the symbols of a module's files come from: one answer for every file that an engine finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dprobes.target.debugfiles import find_debug_file, load_symbols
from dprobes.target.elfsymbols import elf_symbols
from dprobes.target.location import Module
from dprobes.target.symbols import SymbolTable

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from dprobes.target.elf import ElfFile
    from dprobes.target.symbols import SymbolSource

__all__ = ["OWN_SYMBOLS", "FileSymbols", "SymbolProvider"]


class SymbolProvider(Protocol):
    """Know the symbols of the files that a module's name means."""

    def module_of(self, elf: ElfFile) -> Module:
        """Return the module in a file with its symbols; raise ``TargetError`` if they cannot be given."""

    def machine(self, host: str) -> str | None:
        """Return for which processor a module is to be looked for on a machine, None for the machine's own."""


@dataclass(frozen=True, slots=True)
class FileSymbols:
    """
    Take symbols from the file itself and its debug file, and before them from the file ``extra`` (``--sym``).

    A separate debug file is looked for only when the module's own symbols do not answer a question.
    """

    extra: Path | None = None
    table: type[SymbolTable] = SymbolTable

    def module_of(self, elf: ElfFile) -> Module:
        """Return the module in a file; raise ``TargetError`` if ``extra`` belongs to another one."""
        sources: list[SymbolSource] = []
        if self.extra is not None:
            sources += load_symbols(self.extra, elf).sources
        sources += elf_symbols(elf)
        return Module(elf, self.table(sources, code_range=elf.code_range, later=lambda: _debug_symbols(elf)))

    def machine(self, host: str) -> str | None:  # noqa: ARG002 - a file may have symbols for whatever processor
        """Return None."""
        return None


OWN_SYMBOLS = FileSymbols()
"""No symbols but those of the file itself and its debug file."""


def _debug_symbols(elf: ElfFile) -> Iterable[SymbolSource]:
    debug = find_debug_file(elf)
    return elf_symbols(debug) if debug is not None else []
