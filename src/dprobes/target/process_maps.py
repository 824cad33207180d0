"""
Mappings of a process, from the text of ``/proc/PID/maps``, or by ioctl(2) on it where the kernel supports that.

A process may have 65 000 mappings, with paths of any length, and change them at any time. So all queries are bounded.
``mapping_at`` and ``code_mappings`` query only the mappings that they need (``PROCMAP_QUERY``, since Linux 6.11;
``struct procmap_query`` is in include/uapi/linux/fs.h). ``mappings_of`` reads the whole text.

The tracer process uses this module while its target is stopped. So the module imports nothing slow, and its records are
named tuples, which are created several times faster than dataclasses. Rules: proc(5), and ``show_map_vma`` in the
kernel.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from array import array
from fcntl import ioctl
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "CODE_MAX",
    "COVERING_OR_NEXT",
    "EXECUTABLE",
    "MAPS_MAX",
    "NAME_MAX",
    "OF_FILE",
    "PAGE_SIZE",
    "PROCMAP_QUERY",
    "QUERY",
    "Growth",
    "Mapping",
    "code_mappings",
    "command_name",
    "executable_mappings",
    "free_ranges",
    "growth_of",
    "mapping_at",
    "mapping_finder",
    "mappings_of",
    "parse_maps",
    "read_maps",
    "run_time_address",
]

PAGE_SIZE = 4096
"""Granularity of mappings on x86, in bytes."""

CODE_MAX = 1 << 12
"""Maximum number of a process's mappings of code that are read. A process can create any number."""

MAPS_MAX = 16 << 20
"""Maximum number of bytes of ``/proc/PID/maps`` that are read: 65 000 mappings with ordinary names take 7 million."""

QUERY = struct.Struct("=9Q4I2Q")
"""
Layout of ``struct procmap_query``.

The fields are: size, flags, and requested address; start, end, flags, page size and offset of the mapping, and inode of
its file; major and minor number of the device; sizes of the buffers for name and build-id; addresses of these buffers.
"""
PROCMAP_QUERY = 3 << 30 | QUERY.size << 16 | ord("f") << 8 | 17
EXECUTABLE, COVERING_OR_NEXT, OF_FILE = 0x04, 0x10, 0x20
"""Flags that select the mappings of a query."""
_LETTERS = tuple(f"{read}{write}{code}{shared}" for shared in "ps" for code in "-x" for write in "-w" for read in "-r")
"""Permissions as text, by the flags of a mapping."""
NAME_MAX = 4096
"""Maximum size in bytes of a name from the kernel, with a zero at its end."""

_KEPT_LINE = 256
"""Maximum number of characters of a line whose mapping is cached. Any user can create longer lines."""

_HEAP, _STACK = "[heap]", "[stack]"
_HEAP_MOST = 1 << 40
"""Maximum size of the heap in bytes: the mappings of libraries are further away, and grow towards it."""
_STACK_LEAST = 16 << 30
"""Minimum number of bytes below the stack that are reserved for it: its soft limit may be raised to the hard one."""
_STACK_LIMIT = "Max stack size"
_DELETED = " (deleted)"
_READ_SIZE = 1 << 16


class Mapping(NamedTuple):
    """
    Mapping of the addresses from ``start`` to ``end`` (excluded); ``start`` is byte ``offset`` of a file.

    ``permissions`` has four letters (``r-xp``). ``device`` is the number from ``os.stat`` for most file systems.
    ``path`` is empty for anonymous memory, and in brackets for the kernel's own areas (``[vdso]``). ``deleted`` is True
    if the file no longer has that name.
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
        """True if the mapping is executable."""
        return self.permissions[2] == "x"

    @property
    def is_file(self) -> bool:
        """True if the mapping is of a file."""
        return self.path.startswith("/")


class Growth(NamedTuple):
    """
    Limits up to which the memory of a process may grow.

    ``heap`` is the address at which the heap begins, or None if it begins after the program. It grows up to the next
    mapping. ``stack`` is the number of bytes by which the stack may grow down, or None if it may grow down to the
    mapping before it.
    """

    heap: int | None = None
    stack: int | None = _STACK_LEAST


def growth_of(pid: int) -> Growth:
    """Return the limits of the growth of a process's memory, as far as they are readable."""
    heap = None
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
        # proc(5): field 47, which is 0 for users who may not trace the process.
        heap = int(file.read().rpartition(b")")[2].split()[44]) or None
    limits: list[str] = []
    with contextlib.suppress(OSError), open(f"/proc/{pid}/limits", encoding="ascii") as text:  # noqa: PTH123
        limits = next((line.split()[3:5] for line in text if line.startswith(_STACK_LIMIT)), [])
    soft = limits[:1]
    if soft == ["unlimited"]:
        return Growth(heap, None)
    return Growth(heap, max([_STACK_LEAST, *(int(limit) for limit in limits if limit.isdecimal())]))


def free_ranges(mappings: Iterable[Mapping], growth: Growth, floor: int, top: int) -> list[tuple[int, int]]:
    """
    Return the unmapped ranges from ``floor`` to ``top`` by ascending address, ends excluded.

    Ranges into which the heap and the stack may grow are omitted.
    """
    in_order = sorted(mappings, key=lambda mapping: mapping.start)
    found: list[tuple[int, int]] = []
    heap = _heap_range(in_order, growth, top)
    position = floor
    for mapping in in_order:
        end = mapping.start
        if mapping.path == _STACK:
            end = position if growth.stack is None else end - growth.stack
        _add_free(found, position, min(end, top), heap)
        position = max(position, mapping.end)
    _add_free(found, position, top, heap)
    return found


def _heap_range(mappings: list[Mapping], growth: Growth, top: int) -> tuple[int, int]:
    """Return the range of the heap, including the addresses up to which it may grow."""
    start = growth.heap
    if start is None:
        first = next((mapping.start for mapping in mappings if mapping.path == _HEAP), None)
        program = next((mapping.path for mapping in mappings if mapping.is_file), None)
        ends = [mapping.end for mapping in mappings if mapping.path == program]
        start = first if first is not None else max(ends, default=top)
    behind = (m.start for m in mappings if m.start >= start and m.path != _HEAP)
    return start, min(start + _HEAP_MOST, next(behind, top))


def _add_free(found: list[tuple[int, int]], start: int, end: int, but: tuple[int, int]) -> None:
    """Append the parts of the range from ``start`` to ``end`` that are not in the range ``but``."""
    for first, last in ((start, min(end, but[0])), (max(start, but[1]), end)):
        if first < last:
            found.append((first, last))


def parse_maps(text: str) -> list[Mapping]:
    """Return every mapping of ``text``, in order of addresses."""
    # Not splitlines: only newline ends a line here, and a path may have any other separator.
    return [(_parsed if len(line) <= _KEPT_LINE else _parse_line)(line) for line in text.split("\n") if line]


def mappings_of(pid: int) -> list[Mapping]:
    """
    Return every mapping of a process, in order of addresses.

    Errors are those of ``read_maps``. Also raise ``TargetError`` if the text exceeds ``MAPS_MAX``.
    """
    text = read_maps(pid, MAPS_MAX)
    if len(text) >= MAPS_MAX - PAGE_SIZE:
        raise TargetError(f"process {pid} maps more than can be looked at ({MAPS_MAX >> 20} MiB of text)")
    return parse_maps(text)


def mapping_at(pid: int, address: int) -> Mapping | None:
    """Return the mapping at an address, or None if there is none. Errors are those of ``mappings_of``."""
    return mapping_finder(pid)(address)


def mapping_finder(pid: int) -> Callable[[int], Mapping | None]:
    """
    Return a function with the results of ``mapping_at``, for many addresses of one process.

    A kernel without PROCMAP_QUERY makes it read all mappings once, so the process must be stopped meanwhile.
    """
    known: list[Mapping] | None = None

    def find(address: int) -> Mapping | None:
        nonlocal known
        if known is None:
            asked = _ask(pid, 0, 1, address)
            if asked is not None:
                return asked[0][0] if asked[0] else None
            known = mappings_of(pid)
        return next((each for each in known if each.start <= address < each.end), None)

    return find


def code_mappings(pid: int, most: int = CODE_MAX) -> tuple[list[Mapping], bool]:
    """
    Return up to ``most`` executable file mappings of a process, by ascending address, and whether these are all.

    Raise the same ``TargetError`` as ``read_maps``.
    """
    asked = _ask(pid, EXECUTABLE | COVERING_OR_NEXT | OF_FILE, most + 1)
    if asked is None:
        text = read_maps(pid)
        found, is_all = executable_mappings(text), len(text) < MAPS_MAX - PAGE_SIZE
    else:
        found, is_all = [each for each in asked[0] if each.is_file], asked[1]
    return found[:most], is_all and len(found) <= most


def _ask(pid: int, wanted: int, most: int, address: int = 0) -> tuple[list[Mapping], bool] | None:
    """
    Query up to ``most`` mappings from ``address`` on by PROCMAP_QUERY. Return them, and True if there are no others.

    ``wanted`` has the flags that select mappings, such as executable ones. Return None if the query fails.
    """
    name, query = array("B", bytes(NAME_MAX)), bytearray(QUERY.size)
    place, _ = name.buffer_info()
    found: list[Mapping] = []
    with _opened(pid) as descriptor:
        while len(found) < most:
            QUERY.pack_into(query, 0, QUERY.size, wanted, address, 0, 0, 0, 0, 0, 0, 0, 0, NAME_MAX, 0, place, 0)
            try:
                try:
                    ioctl(descriptor, PROCMAP_QUERY, query)
                    is_named = True
                except OSError as error:
                    if error.errno != errno.ENAMETOOLONG:
                        raise
                    QUERY.pack_into(query, 0, QUERY.size, wanted, address, *[0] * 12)
                    ioctl(descriptor, PROCMAP_QUERY, query)
                    is_named = False
            except OSError as error:
                if error.errno == errno.ENOENT:
                    return found, True
                if error.errno == errno.ESRCH:
                    raise TargetError(f"process {pid} has no memory: it is a kernel thread or has ended") from error
                return None
            _, _, _, start, address, bits, _, offset, inode, major, minor, length, *_ = QUERY.unpack(query)
            path = os.fsdecode(name[: length - 1].tobytes()) if length else ""
            if not is_named:
                path = f"/proc/{pid}/map_files/{start:x}-{address:x}"  # too long a path to be used
            deleted = path.endswith(_DELETED)
            found.append(
                Mapping(
                    start,
                    address,
                    _LETTERS[bits & 15],
                    offset,
                    os.makedev(major, minor),
                    inode,
                    path[: -len(_DELETED)] if deleted else path,
                    deleted,
                )
            )
    return found, False


def executable_mappings(text: str) -> list[Mapping]:
    """Return the executable file mappings in the text of ``/proc/PID/maps``. Other lines are not parsed."""
    found = []
    for line in text.split("\n"):
        permissions = line.find(" ") + 1
        if line[permissions + 2 : permissions + 3] == "x" and "/" in line:
            mapping = _parse_line(line)
            if mapping.path.startswith("/"):
                found.append(mapping)
    return found


@contextlib.contextmanager
def _opened(pid: int) -> Iterator[int]:
    """Open ``/proc/PID/maps``; raise ``TargetError`` if the process has ended or may not be inspected."""
    try:
        descriptor = os.open(f"/proc/{pid}/maps", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError) as e:
        raise TargetError(f"process {pid} does not exist") from e
    except PermissionError as e:
        raise TargetError(
            f"process {pid} may not be inspected by this user",
            hint="run as the user that owns the process, or as root",
        ) from e


def read_maps(pid: int, limit: int | None = None) -> str:
    """
    Return the text of ``/proc/PID/maps``; raise ``TargetError`` if the process has ended or may not be inspected.

    Read about ``limit`` bytes, ``MAPS_MAX`` by default, and return only whole lines.
    """
    parts = []
    left = MAPS_MAX if limit is None else limit
    with _opened(pid) as descriptor:
        while left > 0 and (part := os.read(descriptor, _READ_SIZE)):
            parts.append(part)
            left -= len(part)
    if not parts:
        raise TargetError(f"process {pid} has no memory: it is a kernel thread or has ended")
    text = os.fsdecode(b"".join(parts))
    return text if left > 0 else text[: text.rfind("\n") + 1]


def command_name(pid: int) -> str:
    """Return the name of a process (proc(5), ``comm``, at most 15 bytes), or "" if the process has ended."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:  # noqa: PTH123 - the tracer does without pathlib
            return os.fsdecode(file.read().removesuffix(b"\n"))
    except OSError:
        return ""


def run_time_address(mappings: Iterable[Mapping], file_offset: int) -> int | None:
    """
    Return the address of byte ``file_offset`` in a file's mappings, or None if it is not mapped.

    Prefer an executable mapping.
    """
    found = None
    for mapping in mappings:
        address = mapping.start + file_offset - mapping.offset
        if mapping.start <= address < mapping.end:
            if mapping.executable:
                return address
            if found is None:
                found = address
    return found


@lru_cache(1 << 16)  # processes are read repeatedly, and most of their mappings stay
def _parsed(line: str) -> Mapping:
    return _parse_line(line)


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
