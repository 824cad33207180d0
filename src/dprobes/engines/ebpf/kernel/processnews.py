r"""
What the kernel tells of processes: what they map as code, execute and fork, from the ring of a perf event on each CPU.

Layouts are those of perf_event_open(2), "MMAP layout". A ring is a page of positions, then the data, a power of two::

    page 0   1024  u64 data_head: the kernel's position | u64 data_tail: ours; both only grow

    record   u32 type | u16 misc | u16 size | what the type has | u64 time

    MMAP2    u32 pid, tid | u64 address, length, page offset | u32 major, minor | u64 inode, generation
             | u32 protection, flags | path \0, filled up
    COMM     u32 pid, tid | name \0, filled up            misc bit 13: by an exec
    FORK     u32 pid, parent, tid, parent's tid | u64 time
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from bisect import bisect_right
from typing import TYPE_CHECKING

from dprobes.engines.linux.cpus import online_cpus
from dprobes.engines.linux.perfcalls import open_process_news
from dprobes.lazynamedtuple import NamedTuple
from dprobes.target.processmaps import Mapping

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Executed", "ForkedProcess", "MappedFile", "News", "ProcessNews"]

_PAGES = 128
"""Pages of data of a ring: the news of some hundred starts of programs."""

_DATA_SIZE = _PAGES * mmap.PAGESIZE
_HEAD_AT, _TAIL_AT = 1024 // 8, 1032 // 8

_HEAD = struct.Struct("=IHH")
_TIME = struct.Struct("=Q")


class RecordType(enum.IntEnum):
    """Name the records that are of interest (PERF_RECORD_*)."""

    COMM = 3
    FORK = 7
    MMAP2 = 10


_BY_EXEC = 1 << 13
_MAPPED = struct.Struct("=IIQQQIIQQII")
_COMMAND = struct.Struct("=II")
_FORKED = struct.Struct("=IIII")


class MappedFile(NamedTuple):
    """A process has mapped a file, or one of the kernel's own areas, as code."""

    time: int
    pid: int
    mapping: Mapping


class Executed(NamedTuple):
    """A process executes another program from now on, and is called so; what it maps follows."""

    time: int
    pid: int
    name: str


class ForkedProcess(NamedTuple):
    """A process has forked another one."""

    time: int
    pid: int
    parent: int


News = MappedFile | Executed | ForkedProcess


class ProcessNews:
    """The news of all processes from now on; OSError if the kernel does not tell us."""

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
        Return what has happened since the last call, in the order of time.

        A process is never told of before its fork is: the rings are read one by one, so what is younger than the first
        look at one waits for the next call.
        """
        now = time.monotonic_ns()
        pieces = [ring.take() for ring in self._rings]
        found = [*self._waiting, *(each for piece in pieces for each in _parsed(piece))]
        found.sort(key=lambda each: each.time)
        first = bisect_right(found, now, key=lambda each: each.time)
        self._waiting = found[first:]
        return found[:first]

    def close(self) -> None:
        """Hear no more."""
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
        """Return the records that are there, and give their room back."""
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
            return  # nothing that the kernel writes
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
