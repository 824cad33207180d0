"""Machine code of ours that this process runs itself, where Python and the C library lack an instruction."""

from __future__ import annotations

import ctypes
import os

# Nothing that takes long is imported here.

__all__ = ["map_code", "map_file", "unmap_code"]

_PROT_READ, _PROT_EXEC, _MAP_PRIVATE = 1, 4, 2


def map_code(code: bytes) -> int:
    """
    Return the address of code, mapped until it is unmapped; raise OSError if this process may not map any.

    It comes from a file in memory: a page that can be written and executed is not needed at any time.
    """
    file = os.memfd_create("dprobes")
    try:
        os.write(file, code)
        return map_file(file, len(code))
    finally:
        os.close(file)


def map_file(file: int, size: int) -> int:
    """Return the address of the code in the first bytes of an open file, mapped as by ``map_code``."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    address: int | None = libc.mmap(None, size, _PROT_READ | _PROT_EXEC, _MAP_PRIVATE, file, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def unmap_code(address: int, size: int) -> None:
    """Unmap code of so many bytes that nobody will run any more."""
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
