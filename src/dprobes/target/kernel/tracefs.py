"""
Files of tracefs: formats of tracepoints, and definitions of kprobe events.

If tracefs is not mounted, it is mounted for this process alone, without a mount point (``fsopen``, ``fsmount``). The
kernel unmounts it when the file descriptors are closed.
"""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["RecordField", "TraceFiles", "TraceFormat", "open_trace_files", "parse_format"]

# The format of a tracepoint's record: ``events/SUBSYSTEM/NAME/format`` (Documentation/trace/events.rst, section 3).
#
#     name: sched_process_exec
#     ID: 365
#     format:
#             field:unsigned short common_type;       offset:0;       size:2; signed:0;
#             field:__data_loc char[] filename;       offset:8;       size:4; signed:0;


_ID = re.compile(r"^ID: (\d+)$", re.MULTILINE)
_FIELD = re.compile(r"^\s*field:([^;]+);\s*offset:(\d+);\s*size:(\d+);\s*signed:([01]);", re.MULTILINE)
_DECLARATION = re.compile(r"(?P<type>.*?)(?P<name>\w+)(?P<array>\[[^\]]*\])?\Z", re.DOTALL)
_DYNAMIC = ("__data_loc ", "__rel_loc ")


@dataclass(frozen=True, slots=True)
class RecordField:
    """
    Field of a tracepoint's record; ``offset`` and ``size`` are in bytes.

    If ``place`` is "__data_loc" or "__rel_loc", the field is a u32 whose lower half is an offset to the array: from the
    start of the record, or from the end of the field.
    """

    name: str
    type_name: str
    offset: int
    size: int
    is_signed: bool
    is_array: bool
    place: str = ""


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """Format of a tracepoint's record. ``number`` is the tracepoint's number for perf_event_open(2)."""

    number: int
    fields: Mapping[str, RecordField]


def parse_format(text: str) -> TraceFormat:
    """Parse a format, without the fields that all records have; raise ``FormatError`` if it is malformed."""
    number = _ID.search(text)
    if number is None:
        raise FormatError("the format of a tracepoint has no line 'ID: N'")
    fields = (_field(*match.groups()) for match in _FIELD.finditer(text))
    return TraceFormat(int(number[1]), {each.name: each for each in fields if not each.name.startswith("common_")})


def _field(declaration: str, offset: str, size: str, signed: str) -> RecordField:
    place = next((word.strip() for word in _DYNAMIC if declaration.startswith(word)), "")
    match = _DECLARATION.match(declaration.removeprefix(place).strip())
    if match is None:
        raise FormatError(f"the format of a tracepoint has a field without a name: '{declaration}'")
    type_name = match["type"].strip() + (match["array"] or "")
    is_array = bool(match["array"]) or bool(place) or int(size) not in (1, 2, 4, 8)
    return RecordField(match["name"], type_name, int(offset), int(size), signed == "1", is_array, place)


_MOUNTED = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))

# include/uapi/asm-generic/unistd.h and linux/mount.h; kernel commits 24dcb3d90a1f, ecdab150fddb, 93766fbd2696 (v5.2)
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_CLOEXEC = 1
_FSCONFIG_CMD_CREATE = 6


class TraceFiles:
    """Open root directory of tracefs. Names of files are relative to it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, name: str) -> str:
        """Return the text of a file; raise OSError if it cannot be read."""
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._descriptor)
        with os.fdopen(descriptor, encoding="utf-8") as file:
            return file.read()

    @property
    def descriptor(self) -> int:
        """The directory's descriptor, which its owner closes."""
        return self._descriptor

    def append(self, name: str, line: str) -> None:
        """Write a line to a file that takes commands; raise OSError if the kernel refuses the command."""
        # Opening with O_TRUNC would remove the events of all others (probes_open in kernel/trace/trace_kprobe.c).
        descriptor = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, dir_fd=self._descriptor)
        try:
            os.write(descriptor, f"{line}\n".encode() if line else b"")
        finally:
            os.close(descriptor)

    def names(self, directory: str) -> list[str]:
        """Return the sorted names of the subdirectories of a directory; raise OSError if it cannot be read."""
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._descriptor)
        try:
            with os.scandir(descriptor) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        finally:
            os.close(descriptor)


@contextmanager
def open_trace_files() -> Iterator[TraceFiles]:
    """Open the root of tracefs for a ``with`` statement; raise OSError if this process may not access it."""
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
    """Return a descriptor of the root of a new tracefs mount that is attached to no path (fsmount(2))."""
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
