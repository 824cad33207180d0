"""The types of a kernel (BTF) in a file: a ``vmlinux``, or a copy of a kernel's ``/sys/kernel/btf/vmlinux``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import FormatError, TargetError, reason_of
from dprobes.target.btf import Btf

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["types_in"]

_SECTION = ".BTF"
_ELF_MAGIC = b"\x7fELF"
_HINT = "name a vmlinux that was made with CONFIG_DEBUG_INFO_BTF, or a copy of that kernel's /sys/kernel/btf/vmlinux"


def types_in(path: Path) -> Btf:
    """Return the types of the kernel that a file is of; raise ``TargetError`` if it has none."""
    try:
        with path.open("rb") as file:
            is_elf = file.read(len(_ELF_MAGIC)) == _ELF_MAGIC
        return Btf(_section_of(path) if is_elf else path.read_bytes())
    except OSError as error:
        raise TargetError(f"'{path}' cannot be read: {reason_of(error)}") from None
    except FormatError as error:
        raise TargetError(f"'{path}' has no types of a kernel: {error.message}", hint=_HINT) from None


def _section_of(path: Path) -> bytes:
    from dprobes.target.elf.file import ElfFile

    elf = ElfFile.open(path)
    for section in elf.sections:
        if section.name == _SECTION:
            return elf.bytes_at(section.offset, section.size, f"the section {_SECTION}")
    raise TargetError(f"'{path}' has no section {_SECTION}, which has the types of a kernel", hint=_HINT)
