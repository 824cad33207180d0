"""
The mappings of a process, from the text of ``/proc/PID/maps``.

The tracer process uses this while its target is stopped, so it imports nothing costly and makes named tuples,
which are several times faster to make than dataclasses. Rules: proc(5), and ``show_map_vma`` in the kernel.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "PAGE_SIZE",
    "Mapping",
    "command_name",
    "executable_mappings",
    "file_offset_at",
    "parse_maps",
    "read_maps",
    "run_time_address",
]

PAGE_SIZE = 4096
"""The unit of mappings on x86."""

_DELETED = " (deleted)"
_READ_SIZE = 1 << 16


class Mapping(NamedTuple):
    """
    Say that ``start`` to ``end`` (excluded) shows the file from byte ``offset`` on.

    ``permissions`` are four letters (``r-xp``); ``device`` is the number that ``os.stat`` gives for most file systems.
    ``path`` is empty for anonymous memory, and in brackets for the kernel's own areas (``[vdso]``); ``deleted`` says
    that the file no longer has that name.
    """

    start: int
    end: int
    permissions: str
    offset: int
    device: int
    inode: int
    path: str
    deleted: bool

    @property
    def executable(self) -> bool:
        """Whether the mapping holds code."""
        return self.permissions[2] == "x"

    @property
    def is_file(self) -> bool:
        """Whether the mapping shows a file."""
        return self.path.startswith("/")


def parse_maps(text: str) -> list[Mapping]:
    """Return every mapping of ``text``, in order of addresses."""
    # Not splitlines: only newline ends a line here, and a path may hold any other separator.
    return [_parse_line(line) for line in text.split("\n") if line]


def executable_mappings(text: str) -> list[Mapping]:
    """Return only the mappings of ``text`` that show the code of a file; the other lines are hardly looked at."""
    found = []
    for line in text.split("\n"):
        permissions = line.find(" ") + 1
        if line[permissions + 2 : permissions + 3] == "x" and "/" in line:
            mapping = _parse_line(line)
            if mapping.path.startswith("/"):
                found.append(mapping)
    return found


def read_maps(pid: int, limit: int | None = None) -> str:
    """
    Return the text of ``/proc/PID/maps``; raise ``TargetError`` if the process is gone or not ours to see.

    Not much more than ``limit`` bytes are read, and only whole lines are returned.
    """
    try:
        descriptor = os.open(f"/proc/{pid}/maps", os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = []
            left = sys.maxsize if limit is None else limit
            while left > 0 and (part := os.read(descriptor, _READ_SIZE)):
                parts.append(part)
                left -= len(part)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError) as e:
        raise TargetError(f"process {pid} does not exist") from e
    except PermissionError as e:
        raise TargetError(
            f"process {pid} may not be inspected by this user",
            hint="run as the user that owns the process, or as root",
        ) from e
    if not parts:
        raise TargetError(f"process {pid} has no memory: it is a kernel thread or has ended")
    text = os.fsdecode(b"".join(parts))
    return text if left > 0 else text[: text.rfind("\n") + 1]


def command_name(pid: int) -> str:
    """Return what a process is called (proc(5), ``comm``), which is how its program begins; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:  # noqa: PTH123 - the tracer does without pathlib
            return os.fsdecode(file.read().removesuffix(b"\n"))
    except OSError:
        return ""


def run_time_address(mappings: Iterable[Mapping], file_offset: int) -> int | None:
    """Return where byte ``file_offset`` of a file is, given the mappings of that file; executable ones win."""
    found = None
    for mapping in mappings:
        address = mapping.start + file_offset - mapping.offset
        if mapping.start <= address < mapping.end:
            if mapping.executable:
                return address
            if found is None:
                found = address
    return found


def file_offset_at(mappings: Iterable[Mapping], address: int) -> int | None:
    """Return which byte of the file is at run-time ``address``, given the mappings of that file."""
    for mapping in mappings:
        if mapping.start <= address < mapping.end:
            return address - mapping.start + mapping.offset
    return None


def _parse_line(line: str) -> Mapping:
    try:
        addresses, permissions, offset, device, inode, *rest = line.split(None, 5)
        start, _, end = addresses.partition("-")
        major, _, minor = device.partition(":")
        path = rest[0] if rest else ""
        deleted = path.endswith(_DELETED)
        if deleted:
            path = path[: -len(_DELETED)]
        if "\\" in path:
            path = path.replace("\\012", "\n")  # the one character that the kernel escapes here
        return Mapping(
            int(start, 16),
            int(end, 16),
            permissions,
            int(offset, 16),
            os.makedev(int(major, 16), int(minor, 16)),
            int(inode),
            path,
            deleted,
        )
    except ValueError as e:
        raise TargetError(f"'{line}' is not a line of a process's memory map") from e
