"""
The ioctl PROCMAP_QUERY on ``/proc/PID/maps``: the files that a process executes, without the text of all mappings.

The kernel takes at least a third of a microsecond to print the line of a mapping. A query of one mapping takes as long,
but only a quarter of the mappings are code of a file, and only these are queried.

The ioctl exists since Linux 6.11, kernel commit ed5d583a88a9 ("fs/procfs: implement efficient VMA querying API for
/proc/<pid>/maps").
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from fcntl import ioctl
from typing import TYPE_CHECKING

from dprobes.platform.linux.procfs import without_waiting
from dprobes.target.process_maps import COVERING_OR_NEXT, EXECUTABLE, NAME_MAX, OF_FILE, PROCMAP_QUERY, QUERY

if TYPE_CHECKING:
    from typing import Self

__all__ = ["MapQuestion"]


_WANTED = EXECUTABLE | COVERING_OR_NEXT | OF_FILE

_OURS_MAX = 1 << 12
"""Maximum number of this process's mappings that are queried."""

_ADDRESS = struct.Struct("=Q")
_ASKED, _END, _INODE = 16, 32, 64
"""Offsets of the address in a query, and of the end of the mapping and the inode in the answer."""


class MapQuestion:
    """
    Query whether a process has an executable mapping of a file.

    A mapping is of the file if its inode number matches, or if its name contains ``base``. On some file systems
    mappings have other inode numbers than stat(2). Without ``base`` no names are requested, which takes a third less
    time.
    """

    def __init__(self, inode: int, base: str = "") -> None:
        self._inode = inode
        self._base = os.fsencode(base)
        self._query = bytearray(QUERY.size)
        self._name = ctypes.create_string_buffer(NAME_MAX)
        self._view = memoryview(self._name)
        self._address = ctypes.addressof(self._name)

    @classmethod
    def about(cls, path: str, inode: int, base: str) -> Self:
        """Return the query about a file, by inode number alone if a mapping of this process shows that number."""
        by_number, executable = cls(inode), mmap.PROT_READ | mmap.PROT_EXEC
        try:
            with (
                open(path, "rb", opener=without_waiting) as file,
                mmap.mmap(file.fileno(), 1, flags=mmap.MAP_PRIVATE, prot=executable),
            ):
                if by_number.answer(os.getpid(), _OURS_MAX):
                    return by_number
        except (OSError, ValueError):
            pass  # the file may not be executed, or is empty
        return cls(inode, base)

    def answer(self, thread: int, most: int) -> bool | None:
        """
        Return whether a process has an executable mapping of the file; None after ``most`` other ones, or on an error.

        Raise ``PermissionError`` if its mappings may not be read, ``ProcessLookupError`` if it has ended.
        """
        try:
            descriptor = os.open(f"/proc/{thread}/maps", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ProcessLookupError(*error.args) from None
        try:
            return self._ask(descriptor, most) if self._base else self._ask_for_numbers(descriptor, most)
        except OSError as error:
            if error.errno == errno.ENOENT:  # there is no further mapping
                return False
            if error.errno == errno.ESRCH:
                raise
            return None
        finally:
            os.close(descriptor)

    def _ask(self, descriptor: int, most: int) -> bool | None:
        query, end = self._query, 0
        for _ in range(most):
            QUERY.pack_into(query, 0, QUERY.size, _WANTED, end, 0, 0, 0, 0, 0, 0, 0, 0, NAME_MAX, 0, self._address, 0)
            ioctl(descriptor, PROCMAP_QUERY, query)
            _, _, _, _, end, _, _, _, inode, _, _, length, *_ = QUERY.unpack(query)
            if inode == self._inode or self._base in bytes(self._view[:length]):
                return True
        return None

    def _ask_for_numbers(self, descriptor: int, most: int) -> bool | None:
        query, wanted = self._query, self._inode
        QUERY.pack_into(query, 0, QUERY.size, _WANTED, *[0] * 13)
        for _ in range(most):
            ioctl(descriptor, PROCMAP_QUERY, query)
            if _ADDRESS.unpack_from(query, _INODE)[0] == wanted:
                return True
            query[_ASKED : _ASKED + _ADDRESS.size] = query[_END : _END + _ADDRESS.size]
        return None
