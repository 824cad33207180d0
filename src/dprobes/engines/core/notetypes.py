"""The kinds of notes in core files."""

from __future__ import annotations

import enum

__all__ = ["NoteType", "owner_of"]


class NoteType(enum.IntEnum):
    """Number the notes of a core file (``include/uapi/linux/elf.h``)."""

    PRSTATUS = 1
    PRFPREG = 2
    PRPSINFO = 3
    AUXV = 6
    SIGINFO = 0x53494749
    FILE = 0x46494C45
    TLS_386 = 0x200
    XSTATE = 0x202
    VXRS_LOW_S390 = 0x309
    VXRS_HIGH_S390 = 0x30A
    PRXFPREG = 0x46E62B7F


_OF_CORE = (
    NoteType.PRSTATUS,
    NoteType.PRFPREG,
    NoteType.PRPSINFO,
    NoteType.AUXV,
    NoteType.SIGINFO,
    NoteType.FILE,
)


def owner_of(kind: NoteType) -> bytes:
    """Return the name of the owner of a kind, with its NUL."""
    return b"CORE\0" if kind in _OF_CORE else b"LINUX\0"
