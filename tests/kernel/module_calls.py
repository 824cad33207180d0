"""What tests call in guests to load and unload modules of the kernel."""

from __future__ import annotations

import ctypes
import errno
import lzma
import os
from pathlib import Path

__all__ = ["load", "unload"]

_SYS_INIT_MODULE, _SYS_DELETE_MODULE = 175, 176


def load(path: str, parameters: str = "") -> None:
    """Load the module in a file."""
    data = Path(path).read_bytes()
    if path.endswith(".xz"):
        data = lzma.decompress(data)
    _call(_SYS_INIT_MODULE, data, ctypes.c_ulong(len(data)), parameters.encode())


def unload(name: str) -> None:
    """Unload a module that nobody uses."""
    _call(_SYS_DELETE_MODULE, name.encode(), os.O_NONBLOCK)


def _call(number: int, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, *arguments):
        raise OSError(ctypes.get_errno(), errno.errorcode[ctypes.get_errno()])
