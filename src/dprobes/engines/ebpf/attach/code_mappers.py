"""
Processes that execute the code of a file, and differences of their code from the file that exclude uprobes.

Processes are found in ``/proc/*/maps``, in any mount namespace. A file is identified by its device and inode. Processes
that end meanwhile, or that this user may not access, are skipped.

The kernel reads the instruction under a uprobe from the file. If a debugger has a breakpoint there, the kernel treats
it as the uprobe's, and the debugger misses the hit. If another tool has patched the code, the kernel would execute the
file's instruction instead. The last bytes of a tool's jump may be equal to the file's bytes of the following
instruction, so the bytes before a place are compared, too. Only private copies of pages can differ from the file.
``/proc/PID/pagemap`` shows them, and no other pages are read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
import time
from bisect import bisect_left
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Self

from dprobes.engines.engine_interface import Notice
from dprobes.engines.foreign_users import ForeignUsers
from dprobes.errors import TargetError, system_error
from dprobes.platform.linux.procfs import MapQuestion, living_thread, process_field, threads_of
from dprobes.resolve.probepoints import ProbeState
from dprobes.target.code.uprobe_sites import is_replaced_by_call
from dprobes.target.module_lookup import root_of
from dprobes.target.process_maps import PAGE_SIZE, executable_mappings, parse_maps, read_maps

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from dprobes.engines.engine_interface import Scope, StateEvent
    from dprobes.target.process_maps import Mapping

__all__ = [
    "Conflict",
    "FileId",
    "Mapper",
    "Place",
    "RecentMaps",
    "conflict_outside",
    "file_id",
    "find_conflicts",
    "find_mappers",
    "notes_of_outsiders",
    "processes",
]

_QUESTIONS_MAX = 1 << 16
_LINE = 64
"""Maximum number of mappings to query in a process, and minimum size in bytes of a line of ``maps``."""


class FileId(NamedTuple):
    """Identity of a file, as stat(2) returns it."""

    device: int
    inode: int


class Mapper(NamedTuple):
    """
    Process and its executable mappings of a file, in order of addresses.

    ``thread`` is the id of a living thread, whose ``/proc`` entries show the memory. ``text`` has the contents of its
    ``maps`` file.
    """

    pid: int
    thread: int
    mappings: tuple[Mapping, ...]
    text: str


class RecentMaps:
    """
    Cache of ``/proc/PID/maps``, at most ``age`` seconds old. It may be used by several threads.

    Many sessions search for files at the same time, and reading a ``maps`` file takes longer than searching it.
    """

    def __init__(self, age: float = 0.2) -> None:
        self._age = age
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[float, int, str, str]] = {}
        self._swept = 0.0

    def of(self, pid: int, limit: int | None = None) -> tuple[int, str, str]:
        """
        Return the id of a living thread, the contents of its ``maps`` file, and its root directory (``root_of``).

        If the process has ended, the contents are empty. At most ``limit`` bytes are read, unless it is None.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._swept > self._age:
                self._swept = now
                self._seen = {each: seen for each, seen in self._seen.items() if now - seen[0] <= self._age}
            seen = self._seen.get(pid)
            if seen is None:
                thread, text = _maps_of(pid, limit)
                seen = self._seen[pid] = (now, thread, text, root_of(thread))
            return seen[1:]


def _maps_of(pid: int, limit: int | None) -> tuple[int, str]:
    """
    Return the id of a living thread and the contents of its ``maps`` file.

    If the first thread has ended, its file is empty, and another thread's is read. If the process has ended or is not
    accessible, the contents are empty. ``limit`` is as in ``read_maps``.
    """
    thread, text = pid, ""
    with contextlib.suppress(TargetError):
        text = read_maps(pid, limit)
    if not text and (thread := living_thread(pid)) != pid:
        with contextlib.suppress(TargetError):
            text = read_maps(thread, limit)
    return thread, text


def file_id(path: str | os.PathLike[str]) -> FileId:
    """Return the device and inode number of the file at a path; raise ``OSError`` if it does not exist."""
    status = os.stat(path)
    return FileId(status.st_dev, status.st_ino)


def processes() -> list[int]:
    """Return the ids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def find_mappers(
    path: str | os.PathLike[str], pids: Iterable[int] | None = None, users: ForeignUsers | None = None
) -> list[Mapper]:
    """
    Return the accessible processes among ``pids`` (default: all) that map the file ``path`` executable.

    ``users`` limits the time that is spent on processes of other users.
    """
    wanted = file_id(path)
    base = os.path.basename(os.path.realpath(path))
    found: list[Mapper] = []
    question = MapQuestion.about(os.fspath(path), wanted.inode, base)
    for pid, limit in (users or ForeignUsers(base)).bounded(processes() if pids is None else pids):
        with contextlib.suppress(PermissionError):
            if _is_likely(question, pid, limit) and (mapper := _mapper(pid, wanted, base, limit)) is not None:
                found.append(mapper)
    return found


def _is_likely(question: MapQuestion, pid: int, limit: int | None) -> bool:
    """Return False if a process certainly does not map the file; raise ``PermissionError`` if it is not accessible."""
    try:
        return question.answer(pid, _QUESTIONS_MAX if limit is None else limit // _LINE) is not False
    except ProcessLookupError:
        # If the first thread of a process has ended, the other threads show the memory. A kernel thread has none.
        return living_thread(pid) != pid


def _mapper(pid: int, wanted: FileId, base: str, limit: int | None) -> Mapper | None:
    thread, text = _maps_of(pid, limit)
    if f" {wanted.inode} " not in text and base not in text:
        return None
    mappings = tuple(m for m in executable_mappings(text) if _shows(thread, m, wanted, base))
    return Mapper(pid, thread, mappings, text) if mappings else None


def _shows(pid: int, mapping: Mapping, wanted: FileId, base: str) -> bool:
    if (mapping.device, mapping.inode) == wanted:
        return True
    if mapping.inode != wanted.inode and not mapping.path.endswith(f"/{base}"):
        return False
    # On some file systems (btrfs, overlayfs) maps shows other numbers than stat.
    try:
        return file_id(f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}") == wanted
    except OSError:
        return False


BEFORE = 7
"""Size in bytes of the longest jump, which has three prefixes, without its last byte."""

_INT3, _CALL, _JUMP, _SHORT_JUMP = 0xCC, 0xE8, 0xE9, 0xEB
_JUMP_SIZE, _SHORT_JUMP_SIZE = 5, 2
_PREFIXES = b"\x2e\x36\x3e\x26\x64\x65\x66\xf2\xf3"
"""Prefixes that a jump may have (segment overrides, operand size, REPNE/BND, REP)."""
_CALL_DISTANCE = struct.Struct("<i")
_TRAMPOLINE = "[uprobes-trampoline]"
"""Name of the kernel's page that is called where the kernel has replaced a NOP of five bytes by a call."""

_OUTSIDERS_SHOWN = 3

# Documentation/admin-guide/mm/pagemap.rst
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61


class Place(NamedTuple):
    """
    File offset of a probepoint, and the bytes of its instruction in the file.

    ``before`` are the up to ``BEFORE`` preceding bytes: a jump that begins there may overlap the instruction.
    """

    offset: int
    raw: bytes
    before: bytes = b""


class Conflict(NamedTuple):
    """Reason, ``detail``, why no uprobe can be at file offsets: the code of the process ``pid`` differs there."""

    pid: int
    offsets: tuple[int, ...]
    detail: str


class _Finding(Enum):
    SAME = "the file's bytes"
    BREAKPOINT = "a breakpoint"
    UPROBE = "a uprobe"
    PATCH = "other code"


PATCHED = "memory differs from the file: another tool has patched this code"


def find_conflicts(
    path: str, places: Iterable[Place], pids: Iterable[int] | None = None, users: ForeignUsers | None = None
) -> list[Conflict]:
    """
    Return the places at which the code of processes differs from the mapped file ``path``.

    ``pids`` has the processes, by default all; inaccessible ones are skipped. ``users`` limits the time for processes
    of other users.

    A breakpoint in a process without a tracer counts as a uprobe, which is no conflict. A uprobe is in all processes,
    so breakpoints at the same offset in traced processes count as uprobes, too.
    """
    ordered = sorted(places)
    users = users or ForeignUsers(os.path.basename(path))
    differing: dict[int, _Differences] = {}
    found = {mapper.pid: mapper for mapper in find_mappers(path, pids, users)}
    for pid, _ in users.bounded(found):
        with contextlib.suppress(OSError):  # it is not accessible, has ended, or unmapped the file
            differing[pid] = _certain_differences(path, found[pid], ordered)
    return list(_conflicts_among(differing))


def _conflicts_among(differing: dict[int, _Differences]) -> Iterator[Conflict]:
    """Iterate over the conflicts among the differences of processes, by process id. Uprobes are no conflicts."""
    if not any(any(found) for found in differing.values()):
        return
    from dprobes.engines.refusals import jump_text, tracer_text

    tracers = {pid: _tracer_of(pid) for pid, (breakpoints, _) in differing.items() if breakpoints}
    uprobes = {offset for pid, (breakpoints, _) in differing.items() if not tracers.get(pid) for offset in breakpoints}
    for pid, (breakpoints, patched) in differing.items():
        if others := tuple(offset for offset in breakpoints if offset not in uprobes):
            yield Conflict(pid, others, tracer_text(tracers[pid]))
        if patched:
            tracer = _tracer_of(pid)
            name = process_field(tracer, "Name") if tracer else None
            detail = jump_text(tracer) or (f"{PATCHED}; process {tracer} ({name}) traces it" if name else PATCHED)
            yield Conflict(pid, tuple(patched), detail)


def conflict_outside(path: str, places: Sequence[Place], inside: Collection[int]) -> str | None:
    """
    Return a message about a process whose code excludes a uprobe at ``places`` in a file, or None if there is none.

    The code excludes it by a debugger's breakpoint, or because it was changed. Processes with an id in ``inside`` are
    ignored.
    """
    for conflict in find_conflicts(path, places) if places else ():
        if conflict.pid not in inside:
            name = process_field(conflict.pid, "Name")
            place = f"process {conflict.pid} ({name})"
            return f"a uprobe would be in {place} as well, which does not allow it: {conflict.detail}"
    return None


def notes_of_outsiders(states: Iterable[StateEvent], scope: Scope, inside: Collection[int]) -> list[Notice]:
    """
    Return a notice if the code of processes outside of the scope excludes probepoints, else an empty list.

    ``inside`` are the ids of the processes in the scope.
    """
    outside = sorted({state.pid for state in states if state.state is ProbeState.CONFLICT} - {0, *inside})
    if not outside:
        return []
    if not scope.is_tree:
        hint = "end the tool that changed the code, or give -p PID or a command to probe one process only"
        return [Notice("uprobes apply to all processes that execute a file", hint, is_warning=False)]
    shown = ", ".join(map(str, outside[:_OUTSIDERS_SHOWN])) + (", ..." if outside[_OUTSIDERS_SHOWN:] else "")
    who = f"processes {shown} are" if outside[1:] else f"process {shown} is"
    message = f"{who} not in the scope of this run, but uprobes apply to all processes that execute the file"
    return [Notice(message, "--engine ptrace inserts the probepoints in the processes in scope only", is_warning=False)]


_Differences = tuple[list[int], list[int]]
"""File offsets of breakpoints, and of other changed code."""


def _certain_differences(path: str, mapper: Mapper, places: Sequence[Place]) -> _Differences:
    """Return the result of ``_differences``, or two empty lists if the process called execve during the comparison."""
    seen: Mapper | None = mapper
    while seen is not None:
        mapper, found = seen, _differences(seen, places)
        if not any(found):
            break
        seen = next(iter(find_mappers(path, [mapper.pid])), None)
        if seen is not None and seen.mappings == mapper.mappings:
            return found
    return [], []


def _differences(mapper: Mapper, places: Sequence[Place]) -> _Differences:
    """Return the file offsets of ``places`` where a process has breakpoints, and of those with other changed code."""
    breakpoints: list[int] = []
    patched: list[int] = []
    trampolines: list[Mapping] | None = None
    with _Memory(mapper.thread) as memory:
        for address, place in _copied(memory, mapper, places):
            found = memory.read(address, len(place.raw))
            if place.before and _is_in_jump(place.before, memory.read(address - len(place.before), len(place.before))):
                patched.append(place.offset)
                continue
            if found == place.raw:
                continue
            if trampolines is None:
                trampolines = [m for m in parse_maps(mapper.text) if m.path == _TRAMPOLINE]
            match _compare(place.raw, found, address, trampolines):
                case _Finding.BREAKPOINT:
                    breakpoints.append(place.offset)
                case _Finding.PATCH:
                    patched.append(place.offset)
    return breakpoints, patched


def _is_in_jump(original: bytes, before: bytes) -> bool:
    """
    Return whether a jump begins in the bytes ``before`` a place and ends after them.

    Jumps that are also in the file's bytes, ``original``, are ignored.
    """
    size = len(before)
    for start in range(size):
        opcode = size - len(before[start:].lstrip(_PREFIXES))
        if opcode == size or before[start : opcode + 1] == original[start : opcode + 1]:
            continue
        length = {_JUMP: _JUMP_SIZE, _SHORT_JUMP: _SHORT_JUMP_SIZE}.get(before[opcode], 0)
        if opcode + length > size:
            return True
    return False


def _compare(raw: bytes, found: bytes, address: int, trampolines: Sequence[Mapping]) -> _Finding:
    """
    Return the kind of the code ``found`` at ``address``: unchanged, a debugger's breakpoint, a uprobe, or changed.

    ``raw`` has the instruction's bytes in the file. ``trampolines`` has the process's mappings of the kernel's uprobe
    trampolines.
    """
    if found == raw:
        return _Finding.SAME
    if found[0] in (_INT3, _CALL) and is_replaced_by_call(raw, 64):
        target = address + len(found) + _CALL_DISTANCE.unpack_from(found, 1)[0]
        if any(trampoline.start <= target < trampoline.end for trampoline in trampolines):
            return _Finding.UPROBE
    if found[0] == _INT3 and found[1:] == raw[1:]:
        return _Finding.BREAKPOINT
    return _Finding.PATCH


def _copied(memory: _Memory, mapper: Mapper, places: Sequence[Place]) -> Iterator[tuple[int, Place]]:
    """Iterate over the ``places`` in pages that a process has copied (MAP_PRIVATE), with their addresses there."""
    for mapping in mapper.mappings:
        first = bisect_left(places, (mapping.offset,))
        after = bisect_left(places, (mapping.offset + mapping.end - mapping.start,))
        if first == after:
            continue
        distance = mapping.start - mapping.offset
        start = max(places[first].offset + distance - BEFORE, mapping.start) // PAGE_SIZE
        last = places[after - 1]
        # The last instruction may extend into the next page, but not beyond the mapping.
        end = min((last.offset + len(last.raw) - 1 + distance) // PAGE_SIZE, mapping.end // PAGE_SIZE - 1)
        copies = memory.private_copies(start, end + 1)
        if not copies:
            continue
        for place in places[first:after]:
            address = place.offset + distance
            before = place.before[-(address - mapping.start) :] if address > mapping.start else b""
            ends = address - len(before), address, address + len(place.raw) - 1
            if not copies.isdisjoint(each // PAGE_SIZE for each in ends):
                yield address, place._replace(before=before)


def _tracer_of(pid: int) -> int:
    """Return the id of the tracer of a thread of ``pid``, or 0 if none is traced."""
    with contextlib.suppress(OSError):
        for tid in sorted(threads_of(pid)):
            if tracer := int(process_field(tid, "TracerPid") or 0):
                return tracer
    return 0


class _Memory:
    """Memory of a process, with a cache of pages and access to ``/proc/PID/pagemap``. It is a context manager."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._descriptor = -1
        self._pages: dict[int, bytes] = {}

    def __enter__(self) -> Self:
        self._descriptor = os.open(f"/proc/{self._thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def private_copies(self, start: int, end: int) -> set[int]:
        """Return the numbers of the anonymous pages among those from ``start`` up to ``end``, exclusive."""
        descriptor = os.open(f"/proc/{self._thread}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(descriptor, 8 * (end - start), 8 * start)
        finally:
            os.close(descriptor)
        entries = memoryview(data[: len(data) & ~7]).cast("Q")
        return {
            start + n
            for n, entry in enumerate(entries)
            if entry & _SWAPPED or (entry & _PRESENT and not entry & _OF_FILE)
        }

    def read(self, address: int, size: int) -> bytes:
        """Return memory, in at most two pages; raise ``ProcessLookupError`` if the process has ended."""
        page, place = divmod(address, PAGE_SIZE)
        data = self._page(page)[place : place + size]
        if len(data) < size:
            data += self._page(page + 1)[: size - len(data)]
        if len(data) < size:
            raise system_error(errno.ESRCH)
        return data

    def _page(self, page: int) -> bytes:
        if page not in self._pages:
            self._pages[page] = os.pread(self._descriptor, PAGE_SIZE, page * PAGE_SIZE)
        return self._pages[page]
