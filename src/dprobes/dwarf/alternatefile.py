"""
The file of entries that the debug files of a package share (dwz).

::

    .gnu_debugaltlink   path of the file, NUL | its build-id

The path is absolute in Debian's files, elsewhere relative to the file that has it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.dwarf.sections import has_debug_information, section_bytes
from dprobes.errors import TargetError
from dprobes.target.elf.debugfiles import DEBUG_DIRECTORY
from dprobes.target.elf.file import ElfFile

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["find_alternate_file"]


def find_alternate_file(elf: ElfFile, directory: Path | None = None) -> ElfFile:
    """Return the file that ``elf`` shares entries with; raise ``TargetError`` if it is not there, or another one."""
    section = section_bytes(elf, ".gnu_debugaltlink")
    link = bytes(section.data[section.start : section.end])
    name, separator, identity = link.partition(b"\0")
    if not separator or not name or not identity:
        raise TargetError(f"'{elf.path}' has malformed debug information: it does not say what it shares entries with")
    build_id = identity.hex()
    path = Path(os.fsdecode(name))
    for candidate in _candidates(elf, path, build_id, directory or DEBUG_DIRECTORY):
        try:
            found = ElfFile.open(candidate)
        except TargetError:
            continue
        if found.build_id == build_id and has_debug_information(found):
            return found
    raise TargetError(
        f"'{elf.path}' shares debug information with '{path}', which is not there",
        hint="install the package of debug information again",
    )


def _candidates(elf: ElfFile, path: Path, build_id: str, directory: Path) -> Iterator[Path]:
    if path.is_absolute():
        yield path
    else:
        yield Path(os.path.realpath(elf.path)).parent / path
    yield directory / ".build-id" / build_id[:2] / f"{build_id[2:]}.debug"
    yield directory / ".dwz" / path.name
