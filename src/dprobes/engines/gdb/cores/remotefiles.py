"""
Files of the machine that a stub runs on, by the packets of GDB manual, appendix E.7 ("Host I/O Packets").

gdbserver has them, and QEMU since 8.1. Errors come as ``OSError``, with GDB's numbers of them, which are Linux's as far
as they go (appendix E.13.7, "Errno Values").
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.gdb.stub import Stub

__all__ = ["RemoteFile", "open_remote", "read_remote"]

_CHUNK = 0x1000
_FILE_MAX = 64 << 20


class RemoteFile:
    """An open file, by the number that the stub gave it."""

    def __init__(self, stub: Stub, number: int) -> None:
        self._stub = stub
        self._number = number

    def read_at(self, offset: int, size: int) -> bytes:
        """Return bytes from a place on; fewer at the end of the file."""
        data = bytearray()
        while len(data) < size:
            count = min(_CHUNK, size - len(data))
            _, piece = _asked(self._stub, f"pread:{self._number:x},{count:x},{offset + len(data):x}")
            if not piece:
                break
            data += piece[:count]
        return bytes(data)

    def close(self) -> None:
        """Have the stub close it."""
        _asked(self._stub, f"close:{self._number:x}")


@contextlib.contextmanager
def open_remote(stub: Stub, path: str) -> Iterator[RemoteFile]:
    """Hold a file open for reading; raise OSError if there is none, or the stub knows no files."""
    number, _ = _asked(stub, f"open:{os.fsencode(path).hex()},0,0")
    file = RemoteFile(stub, number)
    try:
        yield file
    finally:
        file.close()


def read_remote(stub: Stub, path: str) -> bytes:
    """Return the contents of a file; raise OSError if it cannot be read."""
    with open_remote(stub, path) as file:
        return file.read_at(0, _FILE_MAX)


def _asked(stub: Stub, what: str) -> tuple[int, bytes]:
    """Return the number and the data that a stub answers."""
    answer = stub.ask_if_known_kind("vFile", f"vFile:{what}")
    if answer is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    numbers, _, data = answer.partition(b";")
    result, _, problem = numbers.decode("ascii", "replace").removeprefix("F").partition(",")
    try:
        number, code = int(result, 16), int(problem or "0", 16)
    except ValueError:
        raise OSError(errno.EPROTO, os.strerror(errno.EPROTO)) from None
    if number < 0:
        raise OSError(code, os.strerror(code))
    return number, data
