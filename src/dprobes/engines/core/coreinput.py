"""
What the writer of a core file needs from whoever holds the threads: a new file, and register sets.

All of it is the same whether the threads are stopped by the tracer or by a process that traces them for the core only.
"""

from __future__ import annotations

import os

from dprobes.engines.core.corefile import Note
from dprobes.engines.core.notetypes import NoteType
from dprobes.engines.linux import ptracecalls
from dprobes.engines.linux.ptracecalls import RegisterSet

__all__ = ["POINTER", "create_core_file", "register_sets_of"]

_ATTEMPTS = 1000
"""How many file names are tried."""

_MORE_SETS = {
    8: ((RegisterSet.FLOATING_POINT, NoteType.PRFPREG), (RegisterSet.XSTATE, NoteType.XSTATE)),
    4: (
        (RegisterSet.FLOATING_POINT, NoteType.PRFPREG),
        (RegisterSet.FXSAVE_32, NoteType.PRXFPREG),
        (RegisterSet.XSTATE, NoteType.XSTATE),
        (RegisterSet.TLS_32, NoteType.TLS_386),
    ),
}

POINTER: dict[int, tuple[int, str]] = {8: (16 * 8, "=Q"), 4: (12 * 4, "=I")}
"""Where the instruction pointer is in the general registers, by word size: offset and format."""


def create_core_file(path: str) -> tuple[str, int]:
    """Create a file that is new, called ``path`` or with a number behind that; return its name and descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    name = path
    for number in range(1, _ATTEMPTS):
        try:
            return name, os.open(name, flags, 0o600)
        except FileExistsError:
            name = f"{path}.{number}"
    return name, os.open(name, flags, 0o600)


def register_sets_of(tid: int, word_size: int) -> tuple[Note, ...]:
    """Return the notes about the registers of a stopped thread, but for the general ones."""
    sets = ((kind, ptracecalls.get_register_set(tid, which)) for which, kind in _MORE_SETS[word_size])
    return tuple(Note(kind, data) for kind, data in sets if data)
