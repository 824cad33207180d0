"""
The files with the debug information of the running kernel and of its modules, where debug packages have put them.

A file counts only if its build-id is that of what runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.target.elf.debugfiles import DEBUG_DIRECTORY
from dprobes.target.elf.file import ElfFile
from dprobes.target.kernel.buildids import KERNEL_NOTES, build_id_of_notes, running_build_id
from dprobes.target.kernel.modulefiles import find_module_file, open_module_file
from dprobes.target.kernel.runningkernel import module_name

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["described_kernel", "described_module"]


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
    for path in _places(directory, wanted):
        try:
            elf = ElfFile.open(path)
        except TargetError:
            continue
        if elf.build_id == wanted:
            return elf
    return None


def _places(directory: Path, build_id: str) -> Iterator[Path]:
    release = os.uname().release
    yield directory / ".build-id" / build_id[:2] / f"{build_id[2:]}.debug"
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
