r"""
Mappings of code, execve and fork of processes, from the kernel's ring of a perf event on each CPU.

Layouts are those of perf_event_open(2), "MMAP layout". A ring is a page of positions, followed by the data, whose size
is a power of two::

    page 0   1024  u64 data_head: the kernel's position | u64 data_tail: the reader's; both only grow

    record   u32 type | u16 misc | u16 size | fields of the type | u64 time

    MMAP2    u32 pid, tid | u64 address, length, page offset | u32 major, minor | u64 inode, generation
             | u32 protection, flags | path \0, filled up
    COMM     u32 pid, tid | name \0, filled up            misc bit 13: by execve
    FORK     u32 pid, parent, tid, parent's tid | u64 time
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import struct
import threading
import time
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.ebpf.attach.run_scope import descendants
from dprobes.errors import TargetError
from dprobes.platform.linux.perf_calls import open_process_news
from dprobes.platform.linux.procfs import online_cpus
from dprobes.target.process_maps import Mapping

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.engine_interface import Scope
    from dprobes.target.process_images import ProcessImages

__all__ = ["Executed", "ForkedProcess", "ImageWatch", "MappedFile", "ProcessNews"]

_PAGES = 128
"""Pages of data in a ring: enough for the records of a few hundred calls of execve."""

_DATA_SIZE = _PAGES * mmap.PAGESIZE
_HEAD_AT, _TAIL_AT = 1024 // 8, 1032 // 8

_HEAD = struct.Struct("=IHH")
_TIME = struct.Struct("=Q")


class RecordType(enum.IntEnum):
    """Types of the records that are used (PERF_RECORD_*)."""

    COMM = 3
    FORK = 7
    MMAP2 = 10


_BY_EXEC = 1 << 13
_MAPPED = struct.Struct("=IIQQQIIQQII")
_COMMAND = struct.Struct("=II")
_FORKED = struct.Struct("=IIII")


class MappedFile(NamedTuple):
    """
    A new executable mapping in a process, of a file or of a kernel area such as the vDSO.

    ``time`` is CLOCK_MONOTONIC in nanoseconds.
    """

    time: int
    pid: int
    mapping: Mapping


class Executed(NamedTuple):
    """
    Successful execve of a process, with its new name. Events of its new mappings follow.

    ``time`` is CLOCK_MONOTONIC in nanoseconds.
    """

    time: int
    pid: int
    name: str


class ForkedProcess(NamedTuple):
    """A forked process and its parent; ``time`` is CLOCK_MONOTONIC in nanoseconds."""

    time: int
    pid: int
    parent: int


News = MappedFile | Executed | ForkedProcess


class ProcessNews:
    """Reader of the events of all processes from now on. The constructor raises OSError if the kernel refuses."""

    def __init__(self) -> None:
        self._rings: list[_Ring] = []
        self._waiting: list[News] = []
        try:
            for cpu in online_cpus():
                self._rings.append(_Ring(open_process_news(cpu)))
        except BaseException:
            self.close()
            raise

    def take(self) -> list[News]:
        """
        Return the events since the last call, in the order of time.

        The rings are read one after the other, so an event of a process could be read before its fork. Therefore,
        events after the start of this call wait for the next one.
        """
        now = time.monotonic_ns()
        pieces = [ring.take() for ring in self._rings]
        found = [*self._waiting, *(each for piece in pieces for each in _parsed(piece))]
        found.sort(key=lambda each: each.time)
        first = bisect_right(found, now, key=lambda each: each.time)
        self._waiting = found[first:]
        return found[:first]

    def close(self) -> None:
        """Close the perf rings of all CPUs."""
        while self._rings:
            self._rings.pop().close()


class _Ring:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        try:
            self._memory = mmap.mmap(descriptor, mmap.PAGESIZE + _DATA_SIZE)
        except BaseException:
            os.close(descriptor)
            raise
        self._view = memoryview(self._memory)
        self._positions = self._view[: mmap.PAGESIZE].cast("Q")
        self._data = self._view[mmap.PAGESIZE :]

    def take(self) -> bytes:
        """Return the available records, and release their room."""
        head, tail = self._positions[_HEAD_AT], self._positions[_TAIL_AT]
        if head == tail:
            return b""
        start, size = tail % _DATA_SIZE, head - tail
        data = bytes(self._data[start : start + size])
        data += bytes(self._data[: size - len(data)])
        self._positions[_TAIL_AT] = head
        return data

    def close(self) -> None:
        self._positions.release()
        self._data.release()
        self._view.release()
        self._memory.close()
        os.close(self._descriptor)


def _parsed(data: bytes) -> Iterator[News]:
    position = 0
    while position + _HEAD.size <= len(data):
        kind, misc, size = _HEAD.unpack_from(data, position)
        if size < _HEAD.size + _TIME.size:
            return  # the kernel writes no such record
        body, end = position + _HEAD.size, position + size
        (when,) = _TIME.unpack_from(data, end - _TIME.size)
        match kind:
            case RecordType.MMAP2:
                pid, _, start, length, offset, major, minor, inode, _, _, _ = _MAPPED.unpack_from(data, body)
                path = data[body + _MAPPED.size : end - _TIME.size].partition(b"\0")[0]
                if inode or path.startswith(b"["):
                    device, name = os.makedev(major, minor), os.fsdecode(path)
                    mapping = Mapping(start, start + length, "r-xp", offset, device, inode, name, deleted=False)
                    yield MappedFile(when, pid, mapping)
            case RecordType.COMM if misc & _BY_EXEC:
                pid, _ = _COMMAND.unpack_from(data, body)
                called = data[body + _COMMAND.size : end - _TIME.size].partition(b"\0")[0]
                yield Executed(when, pid, os.fsdecode(called))
            case RecordType.FORK:
                pid, parent, _, _ = _FORKED.unpack_from(data, body)
                if pid != parent:
                    yield ForkedProcess(when, pid, parent)
        position = end


class ImageWatch:
    """
    Watch that reports mappings, execve and fork of the processes in a scope to ``images``.

    The reports are needed for the symbols and stacks of processes that have ended. For a process tree, ``pid`` is its
    first process; only processes of the tree are reported. If the kernel does not provide events, only the symbols of
    ended processes are missing.
    """

    def __init__(self, images: ProcessImages, scope: Scope, pid: int | None = None) -> None:
        self._images = images
        self._looking = threading.Lock()
        self._news: ProcessNews | None = None
        self._follow = scope.follow
        self._tree: set[int] | None = None
        from dprobes.target.process_maps import code_mappings, command_name

        with contextlib.suppress(OSError):
            self._news = ProcessNews()
        if pid is None:
            return
        self._tree = {pid}
        if scope.is_command:
            return
        if scope.follow:
            self._tree.update(descendants(pid))
        for each in self._tree:
            with contextlib.suppress(TargetError):
                images.began(each, 0, code_mappings(each)[0], command_name(each))

    def look(self) -> None:
        """Report the events since the last call to ``images``; any thread may call this."""
        images = self._images

        with self._looking:
            for each in self._news.take() if self._news is not None else ():
                if not self._is_of_scope(each):
                    continue
                match each:
                    case Executed(time, pid, name):
                        images.began(pid, time, name=name)
                    case MappedFile(time, pid, mapping):
                        images.mapped(pid, time, mapping)
                    case ForkedProcess(time, pid, parent):
                        images.forked(pid, parent, time)

    def _is_of_scope(self, each: News) -> bool:

        if self._tree is None:
            return True
        if isinstance(each, ForkedProcess):
            if self._follow and each.parent in self._tree:
                self._tree.add(each.pid)
            else:
                self._tree.discard(each.pid)  # the id was that of a process that has ended
        return each.pid in self._tree

    def close(self) -> None:
        """Close the perf events that report mappings."""
        with self._looking:
            if self._news is not None:
                self._news.close()
                self._news = None
