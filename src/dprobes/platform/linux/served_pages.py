"""
Detection of pages that a server in user space delivers. A reader of such a page may wait forever.

These are pages of files on FUSE, which any user can mount and map, and pages of memory registered with userfaultfd(2).
While process_vm_readv(2) or a read of ``/proc/PID/mem`` waits for one, it cannot be interrupted. So a page that is not
present is checked before it is read. A mapping that is replaced between check and read is not detected. Sources:
``handle_userfault`` in fs/userfaultfd.c, which refuses faults of ``access_remote_vm``; ``pagemap`` and ``mountinfo`` in
proc(5).
"""

from __future__ import annotations

import contextlib
import os
from functools import cache
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.platform.linux.procfs import living_thread, process_field
from dprobes.target.process_maps import PAGE_SIZE, mapping_at

if TYPE_CHECKING:
    from dprobes.target.process_maps import Mapping

__all__ = ["ServedPages"]

_ENTRY = 8
_THERE = 0xC0
"""Bits of the last byte of an entry for a page that is present or in the swap."""
_MOUNTS_MAX = 1 << 20
"""Maximum number of bytes to read from a list of mounts."""
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "rootfs", "hugetlbfs", "devtmpfs", "zfs"})
"""File systems without a device that the kernel reads itself."""


class ServedPages:
    """Check of another user's process for pages, on FUSE or userfaultfd(2), that might block their reader."""

    def __init__(self, tid: int) -> None:
        self._tid = tid
        self._pagemap = os.open(f"/proc/{tid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    @classmethod
    def of(cls, tid: int) -> ServedPages | None:
        """
        Return the check for a stopped thread's process, None for a process of this user.

        Raise OSError if it has ended.
        """
        own = str(os.geteuid())
        return cls(tid) if any(user != own for user in process_field(tid, "Uid").split()) else None

    def close(self) -> None:
        """Close the descriptor of ``/proc/TID/pagemap``."""
        os.close(self._pagemap)

    def first(self, memory: int, address: int, size: int) -> int | None:
        """
        Return the address of the first page of a range that might block its reader, or None if there is none.

        ``memory`` is a descriptor of ``/proc/TID/mem``.
        """
        for page in range(address & -PAGE_SIZE, address + size, PAGE_SIZE):
            if not self._is_there(page) and not self._comes(memory, page):
                return page
        return None

    def may_open(self, mapping: Mapping) -> bool:
        """Return True if a mapped file can be read without waiting for a server."""
        return not mapping.is_file or _is_read_by_kernel(self._tid, mapping.device)

    def _is_there(self, page: int) -> bool:
        try:
            entry = os.pread(self._pagemap, _ENTRY, page // PAGE_SIZE * _ENTRY)
        except (OSError, OverflowError):
            return True  # no process has such pages: a read fails
        return len(entry) < _ENTRY or bool(entry[-1] & _THERE)

    def _comes(self, memory: int, page: int) -> bool:
        """
        Return True if the page can be read without waiting for a server.

        In this case, read it, so that it is present.
        """
        try:
            mapping = mapping_at(living_thread(self._tid), page)
        except TargetError:
            return False
        if mapping is None:
            return True  # a read fails
        if not self.may_open(mapping):
            return False
        try:
            return bool(os.pread(memory, 1, page))
        except OSError:
            return False


def _is_read_by_kernel(tid: int, device: int) -> bool:
    """Return True if the kernel itself reads the file system of a device; return False if that is unknown."""
    if device == _shared_memory():
        return True
    here = _mounted("self").get(device)
    if here is not None:
        return not here.startswith("fuse")
    return _mounted(str(tid)).get(device) in _IN_MEMORY | _on_devices()


@cache
def _shared_memory() -> int:
    """Return the device of files in memory that are not mounted anywhere (memfd_create(2), shmget(2))."""
    descriptor = os.memfd_create("dprobes", os.MFD_CLOEXEC)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


@cache
def _on_devices() -> frozenset[str]:
    """Return the types of file systems that the kernel reads from a device."""
    with open("/proc/filesystems", encoding="ascii", errors="replace") as file:
        return frozenset(line.strip() for line in file if not line.startswith("nodev")) - {"fuseblk"}


def _mounted(process: str) -> dict[int, str]:
    """Return the types of the file systems in ``/proc/PROCESS/mountinfo``, by device number."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError), open(f"/proc/{process}/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file.read(_MOUNTS_MAX).split("\n"):
            words = line.split(" ")
            with contextlib.suppress(ValueError, IndexError):
                major, _, minor = words[2].partition(":")
                found[os.makedev(int(major), int(minor))] = words[words.index("-") + 1]
    return found
