"""
The files of tracefs, which describe the kernel's tracepoints and hold its kprobe events.

Where tracefs is not mounted, it is mounted for this process alone, by file descriptors that have no place in the file
tree (``fsopen``, ``fsmount``): the kernel takes it away when they are closed.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TraceFiles", "open_trace_files"]

_MOUNTED = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))

# include/uapi/asm-generic/unistd.h and linux/mount.h; kernel commits 24dcb3d90a1f, ecdab150fddb, 93766fbd2696 (v5.2)
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_CLOEXEC = 1
_FSCONFIG_CMD_CREATE = 6


class TraceFiles:
    """The directory of tracefs, by a descriptor; names count from there."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, name: str) -> str:
        """Return the text of a file; OSError if it cannot be read."""
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._descriptor)
        with os.fdopen(descriptor, encoding="utf-8") as file:
            return file.read()

    @property
    def descriptor(self) -> int:
        """The directory's descriptor, which its owner closes."""
        return self._descriptor

    def append(self, name: str, line: str) -> None:
        """Write a line to a file that takes commands; OSError as the kernel answers."""
        # What is opened with O_TRUNC forgets all that others have written (probes_open in kernel/trace/trace_kprobe.c).
        descriptor = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, dir_fd=self._descriptor)
        try:
            os.write(descriptor, f"{line}\n".encode() if line else b"")
        finally:
            os.close(descriptor)

    def names(self, directory: str) -> list[str]:
        """Return the names of the directories in a directory, in order; OSError if it cannot be read."""
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._descriptor)
        try:
            with os.scandir(descriptor) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        finally:
            os.close(descriptor)


@contextmanager
def open_trace_files() -> Iterator[TraceFiles]:
    """Give the files of tracefs; OSError where this process may not see them."""
    descriptor = _open_directory()
    try:
        yield TraceFiles(descriptor)
    finally:
        os.close(descriptor)


def _open_directory() -> int:
    for directory in _MOUNTED:
        if (directory / "events").is_dir():
            return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return _mount_alone()


def _mount_alone() -> int:
    """Return the root of tracefs, mounted nowhere."""
    context = _call(_SYS_FSOPEN, b"tracefs", _CLOEXEC)
    try:
        _call(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        return _call(_SYS_FSMOUNT, context, _CLOEXEC, 0)
    finally:
        os.close(context)


def _call(number: int, *arguments: bytes | int | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    words = (ctypes.c_long(each) if isinstance(each, int) else ctypes.c_char_p(each) for each in arguments)
    result: int = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"tracefs: {os.strerror(error)}")
    return result
