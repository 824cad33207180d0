"""
Symbols that are not in the module itself: separate debug files, and the file that ``--sym`` names.

Rules: GDB manual, "Debugging Information in Separate Files" (build-id and ``.gnu_debuglink`` methods).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.elf.contents import file_contents
from dprobes.target.elf.file import ElfFile
from dprobes.target.elf.symboltable import elf_symbols
from dprobes.target.symbols import SymbolTable

if TYPE_CHECKING:
    from dprobes.target.symbols import SymbolSource

__all__ = ["DEBUG_DIRECTORY", "find_debug_file", "foreign_debug_file", "lack_of_debug_file", "load_symbols"]

DEBUG_DIRECTORY = Path("/usr/lib/debug")
"""Where distributions install debug files."""

_INFORMATION = (".debug_info", ".zdebug_info")

_DIRECTORY_DIGITS = 2
"""The digits of a build-id that are the name of a directory below ``.build-id``."""


def find_debug_file(module: ElfFile, directory: Path = DEBUG_DIRECTORY) -> ElfFile | None:
    """
    Return the separate debug file of ``module``, by build-id or else by ``.gnu_debuglink``; None if there is none.

    Those of modules of the kernel are found by the module's own name, for distributions do not link them. A file that
    does not match (other build-id, other checksum) or cannot be read is skipped.
    """
    if (path := _by_build_id(module, directory)) is not None and (found := _open_matching(path, module)) is not None:
        return found
    link = _debug_link(module)
    if link is None:
        beside = _real(module.path).parent
        return _of_kernel_module(module, beside, directory) if module.type == "rel" else None
    for path in _linked_places(module, link[0], directory):
        if _checksum(path) == link[1] and (found := _open_matching(path, module)) is not None:
            return found
    return None


def foreign_debug_file(module: ElfFile, directory: Path = DEBUG_DIRECTORY) -> str | None:
    """
    Return what is wrong with the file where the debug file of ``module`` is expected, None if there is no file.

    It is that of another build. It is asked where ``find_debug_file`` has found none.
    """
    if (path := _by_build_id(module, directory)) is not None and (problem := _of_other_build(path, module)) is not None:
        return problem
    if (link := _debug_link(module)) is None:
        return None
    for path in _linked_places(module, link[0], directory):
        if (problem := _of_other_build(path, module)) is not None:
            return problem
        if (checksum := _checksum(path)) is not None and checksum != link[1]:
            return (
                f"'{path}' is the debug file of another build: its CRC is {checksum:#010x}, "
                f"and .gnu_debuglink of the module says {link[1]:#010x}"
            )
    return None


def lack_of_debug_file(module: ElfFile, directory: Path = DEBUG_DIRECTORY) -> str | None:
    """Return ``foreign_debug_file`` of a module that has no debug information, its own or in a file; None else."""
    if any(each.name in _INFORMATION and each.in_file for each in module.sections) or find_debug_file(
        module, directory
    ):
        return None
    return foreign_debug_file(module, directory)


def _of_other_build(path: Path, module: ElfFile) -> str | None:
    """Return what says that a file is of another build than ``module``; None if nothing does, or it is no ELF file."""
    try:
        found = ElfFile.open(path)
    except TargetError:
        return None
    if found.build_id is None or module.build_id is None or found.build_id == module.build_id:
        return None
    return (
        f"'{path}' is the debug file of another build: its build-id is {found.build_id}, the module's {module.build_id}"
    )


def _by_build_id(module: ElfFile, directory: Path) -> Path | None:
    """Return where the debug file of a build-id is installed."""
    if module.build_id is None or len(module.build_id) <= _DIRECTORY_DIGITS:
        return None
    first, rest = module.build_id[:_DIRECTORY_DIGITS], module.build_id[_DIRECTORY_DIGITS:]
    return directory / ".build-id" / first / f"{rest}.debug"


def _linked_places(module: ElfFile, name: str, directory: Path) -> list[Path]:
    """Return where the file that ``.gnu_debuglink`` names may be; the module itself is none."""
    own = _real(module.path)
    beside = own.parent
    places = (beside / name, beside / ".debug" / name, directory / beside.relative_to("/") / name)
    return [path for path in places if _real(path) != own]


def _of_kernel_module(module: ElfFile, beside: Path, directory: Path) -> ElfFile | None:
    """Return the debug file of a module of the kernel in the directory ``beside``, whose own file may be packed."""
    if module.build_id is None:
        return None
    name = module.path.name.partition(".ko")[0]
    # /lib may be a link to /usr/lib, and the directory of debug files is older than that.
    for place in (str(beside), str(beside).removeprefix("/usr")):
        # Those of Debian and SUSE are called as the module, those of Fedora and Arch end in '.debug'.
        for suffix in (".ko", ".ko.debug"):
            found = _open_matching(directory / place.lstrip("/") / f"{name}{suffix}", module)
            if found is not None and found.build_id == module.build_id:
                return found
    return None


def load_symbols(path: Path, module: ElfFile) -> SymbolTable:
    """
    Return the symbols for ``module`` that the file ``path`` lists; the content says which of the formats it has.

    These are an unstripped ELF or debug file, whose build-id must be that of ``module`` if both have one, a
    ``System.map`` or other output of ``nm``, and a map file of the GNU linker.
    """
    data = file_contents(path, "a file with symbols")
    sources: list[SymbolSource]
    if data[:4] == b"\x7fELF":
        elf = ElfFile.of_bytes(path, data)
        _check_same_module(elf, module)
        sources = list(elf_symbols(elf))
    else:
        from dprobes.target.listedsymbols import parse_linker_map, parse_nm

        text = data[:].decode("utf-8", "replace")
        listed = parse_linker_map(text)
        if listed is None:
            listed = parse_nm(text)
        if listed is None:
            raise TargetError(
                f"'{path}' holds no symbols in a known format",
                hint="give an unstripped ELF or .debug file, a System.map or the output of nm, or a GNU ld map file",
            )
        sources = [listed]
    if not any(any(True for _ in source.names()) for source in sources):
        raise TargetError(f"'{path}' holds no symbols", hint="give the file as it was before strip, or its debug file")
    return SymbolTable(sources, code_range=module.code_range)


def _check_same_module(elf: ElfFile, module: ElfFile) -> None:
    if elf.machine != module.machine:
        raise TargetError(f"'{elf.path}' is for {elf.machine}, but '{module.path}' for {module.machine}")
    if elf.build_id is not None and module.build_id is not None and elf.build_id != module.build_id:
        raise TargetError(
            f"'{elf.path}' does not belong to '{module.path}': its build-id is {elf.build_id}, "
            f"the module's {module.build_id}",
            hint="give the symbols of exactly this build of the module",
        )


def _open_matching(path: Path, module: ElfFile) -> ElfFile | None:
    try:
        found = ElfFile.open(path)
        _check_same_module(found, module)
    except TargetError:
        return None
    return found.placed_as(module) if module.type == "rel" else found


def _debug_link(module: ElfFile) -> tuple[str, int] | None:
    """Return file name and CRC-32 from ``.gnu_debuglink``: the name, NUL, padding to 4 bytes, then the checksum."""
    section = next((s for s in module.sections if s.name == ".gnu_debuglink" and s.in_file), None)
    if section is None or section.offset + section.size > len(module.data):
        return None
    data = module.data[section.offset : section.offset + section.size]
    end = data.find(b"\0")
    place = (end + 4) & ~3
    name = data[:end].decode("utf-8", "surrogateescape")
    if end <= 0 or len(data) < place + 4 or "/" in name or name in (".", ".."):
        return None
    return name, int.from_bytes(data[place : place + 4], module.byte_order)


def _real(path: Path) -> Path:
    # Path.resolve() raises RuntimeError where links lead in a circle.
    return Path(os.path.realpath(path))


def _checksum(path: Path) -> int | None:
    import zlib

    try:
        return zlib.crc32(file_contents(path, "a debug file"))
    except TargetError:
        return None
