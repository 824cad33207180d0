"""The places in sources where debug information says that functions, variables and types are declared."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from dprobes.dwarf.debug_file import debug_file_of
from dprobes.dwarf.dwarf_numbers import At
from dprobes.dwarf.entry_search import function_at
from dprobes.dwarf.line_table import LineProgram, LineSections
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from dprobes.dwarf.debug_entries import Entry
    from dprobes.target.elf.elf_file import ElfFile

__all__ = ["declaration_of", "function_source"]

_TEXT_SECTIONS = (".debug_line", ".debug_str", ".debug_line_str")
_ORIGINS_MAX = 8
"""Maximum number of entries that refer to each other, from a copy to the entry with the declaration."""


def declaration_of(entry: Entry) -> tuple[PurePath, int] | None:
    """Return the source file and the line where an entry is declared; None if they are not recorded."""
    for _ in range(_ORIGINS_MAX):
        line, file = entry.number(At.DECL_LINE), entry.number(At.DECL_FILE)
        if line and file is not None:
            break
        origin = entry.reference(At.ABSTRACT_ORIGIN) or entry.reference(At.SPECIFICATION)
        if origin is None:
            return None
        entry = origin
    else:
        return None
    root = entry.unit.root
    offset = root.offset_in_section(At.STMT_LIST)
    if offset is None:
        return None
    debug = entry.unit.file
    parts = (debug.section(name) for name in _TEXT_SECTIONS)
    lines, strings, line_strings = (bytes(part.data[part.start : part.end]) for part in parts)
    sections = LineSections(lines, strings, line_strings, is_big_endian=debug.elf.byte_order == "big")
    files = LineProgram(sections, offset).files
    if not 0 <= file < len(files):
        return None
    return PurePath(root.text(At.COMP_DIR) or "/", files[file]), line


def function_source(elf: ElfFile, address: int) -> str | None:
    """
    Return "FILE:LINE" of the function at a link address of a module, by its debug information.

    FILE is the path without directories. Return None without debug information, or if it is damaged.
    """
    try:
        debug = debug_file_of(elf)
        function = None if debug is None else function_at(debug, address)
        declared = None if function is None else declaration_of(function)
    except TargetError:
        return None
    return None if declared is None else f"{declared[0].name}:{declared[1]}"
