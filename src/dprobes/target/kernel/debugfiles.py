"""
The files with the debug information of the running kernel and of its modules, where debug packages have put them.

A file counts only if its build-id is that of what runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.elf.debugfiles import DEBUG_DIRECTORY, find_debug_file
from dprobes.target.elf.file import ElfFile
from dprobes.target.elf.symboltable import elf_symbols
from dprobes.target.kernel.buildids import KERNEL_NOTES, build_id_of_notes, running_build_id
from dprobes.target.kernel.modulefiles import find_module_file, module_name, open_module_file
from dprobes.target.symbols import SymbolTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dprobes.target.elf.headers import Section

__all__ = [
    "described_kernel",
    "described_module",
    "kernel_of_build",
    "source_files",
    "sources_in_kernel",
    "sources_in_module",
]

_START = "_text"
_SECTIONS = "/sys/module/{}/sections"
_ALLOC = 2  # SHF_ALLOC


def described_kernel(
    named: Path | None = None, directory: Path = DEBUG_DIRECTORY, notes: Path = KERNEL_NOTES
) -> ElfFile | None:
    """
    Return the running kernel's ``vmlinux``, or the file of a kernel that somebody names; None if there is none.

    Debug packages are in a ``directory``.
    """
    try:
        if named is not None:
            return ElfFile.open(named)
        wanted = build_id_of_notes(notes)
    except TargetError:
        return None
    return kernel_of_build(wanted, directory, _places(directory))


def kernel_of_build(build_id: str, directory: Path = DEBUG_DIRECTORY, others: Iterable[Path] = ()) -> ElfFile | None:
    """Return the file of a kernel of a build, from a debug package or among ``others``; None if there is none."""
    for path in (directory / ".build-id" / build_id[:2] / f"{build_id[2:]}.debug", *others):
        try:
            elf = ElfFile.open(path)
        except TargetError:
            continue
        if elf.build_id == build_id:
            return elf
    return None


def _places(directory: Path) -> Iterator[Path]:
    release = os.uname().release
    yield directory / "boot" / f"vmlinux-{release}"  # Debian, Ubuntu
    for above in ("lib", "usr/lib"):
        yield directory / above / "modules" / release / "vmlinux"  # Fedora, SUSE
    yield Path("/lib/modules") / release / "build" / "vmlinux"  # Arch, and who builds kernels


def described_module(name: str, named: Path | None = None) -> ElfFile | None:
    """
    Return the file of a module by its name, or the one that somebody names; None if there is none.

    If the module is loaded, only a file of the same build counts.
    """
    try:
        elf = open_module_file(named or find_module_file(name))
    except TargetError:
        return None
    if named is not None:
        return elf
    try:
        running = running_build_id(module_name(name))
    except TargetError:
        return elf  # it is not loaded
    return elf if elf.build_id == running else None


def source_files(elf: ElfFile, name: str, place_of: Callable[[Section], int | None]) -> dict[int, str]:
    """
    Return the source files of the local symbols called ``name`` in a file, by the addresses that they have elsewhere.

    ``place_of`` says where a section of the file is there, None if it is not.
    """
    found = {}
    for file, symbol in SymbolTable(elf_symbols(elf), code_range=elf.code_range).in_files(name):
        for section in elf.sections:
            if section.flags & _ALLOC and section.address <= symbol.address < section.address + section.size:
                if (place := place_of(section)) is not None:
                    found[place + symbol.address - section.address] = file
                break
    return found


def sources_in_kernel(elf: ElfFile | None, name: str, start: int) -> dict[int, str]:
    """Return the source files of static symbols of a kernel, which begins at ``start``; none without a file of it."""
    linked = SymbolTable(elf_symbols(elf), code_range=elf.code_range).lookup(_START) if elf is not None else []
    if elf is None or not linked:
        return {}
    return source_files(elf, name, lambda section: section.address + start - linked[0].address)


def sources_in_module(name: str, module: str, sections: str = _SECTIONS) -> dict[int, str]:
    """Return the source files of static symbols of a module that is loaded."""
    elf = described_module(module)
    if elf is None:
        return {}

    def place_of(section: Section) -> int | None:
        try:
            return int(Path(sections.format(module), section.name).read_text(), 16)
        except (OSError, ValueError):
            return None  # what ran when the module was loaded is gone

    return source_files(elf, name, place_of) or (
        source_files(debug, name, place_of) if (debug := find_debug_file(elf)) is not None else {}
    )
