"""
Files in memory that other processes map: memfd_create(2), with seals (fcntl(2)).

A process with such a file open may truncate it; an access to the missing part then raises SIGBUS. So a file that leaves
this process is sealed first, which fixes its size.
"""

from __future__ import annotations

import fcntl
import os

__all__ = ["MEMORY_SEALS", "growing_memory_file", "memory_file"]

MEMORY_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memory_file(name: str, size: int) -> int:
    """Return a descriptor for a new file of ``size`` zeros, which no process can make shorter or longer."""
    return _sealed(name, size, MEMORY_SEALS)


def growing_memory_file(name: str) -> int:
    """Return a descriptor for a new empty file, which can only be made longer."""
    return _sealed(name, 0, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)


def _sealed(name: str, size: int, seals: int) -> int:
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(file)
        raise
    return file
