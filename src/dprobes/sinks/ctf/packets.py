"""
The packets of a stream, and the files that they are in.

::

    at  packet header                       at  packet context
     0  u32 magic                           32  u64 packet size       in bits, with the padding behind the content
     4  u8  uuid[16] of the trace           40  u64 content size      in bits, with header and context
    20  u32 stream class                    48  u64 time of the first event
    24  u64 file                            56  u64 time of the last event
                                            64  u64 events discarded  in the file up to here
                                            72  u32 cpu               in streams of a CPU

Readers refuse a trace that has a file with anything behind its last whole packet. So a file has its size from the
beginning, and its last packet is padded to the end. The next packet is written into that padding, where nobody looks,
and padded itself; then the packet size of the last one is overwritten, which is 8 bytes in one page, and the new packet
is there. That may be interrupted anywhere, or find no room on the disk: what was there stays readable. A file that is
full is followed by a larger one, which gets its name when it is complete. Files are sparse, so padding takes no room.

To readers each file is a stream of its own. Trace Compass would count the discarded events of a stream anew in each of
its files.
"""

from __future__ import annotations

import os
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple
from dprobes.sinks.ctf.metadata import STREAM_CLASS, STREAM_CLASS_WITHOUT_CPU

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from uuid import UUID

__all__ = ["CONTEXT", "HEADER", "Stream"]

HEADER = struct.Struct("<I16sIQ")
CONTEXT = struct.Struct("<QQQQQ")
_CPU = struct.Struct("<I")
_SIZE = struct.Struct("<Q")

_MAGIC = 0xC1FC1FC1

_FILE_MIN = 1 << 15
_FILE_MAX = 1 << 26
"""The size of a stream's first file, and that up to which it doubles from file to file."""

_PAGE = 4096
_ALIGNMENT = 8
"""Bytes; so a packet size is never in two pages."""


class _State(NamedTuple):
    """
    Hold how far a stream is.

    ``file`` is the number of its last file, which has ``size`` bytes; the last packet in that begins at ``packet``, and
    the content of it ends at ``end``.
    """

    file: int = -1
    size: int = 0
    packet: int = 0
    end: int = 0
    last_time: int = 0
    discarded: int = 0


class Stream:
    """
    Append packets of one CPU, or of none that is known, whose events are in order of time.

    ``numbers`` are those that no file of the trace has. ``stage`` writes a packet, which is part of the trace once
    ``commit`` was called; ``undo`` takes that back. All raise ``OSError``.
    """

    def __init__(self, directory: Path, trace: UUID, numbers: Iterator[int], cpu: int | None) -> None:
        self.cpu = cpu
        self._directory = directory
        self._trace = trace
        self._numbers = numbers
        self._before = self._now = self._staged = _State()

    @property
    def last_time(self) -> int:
        """The time of its last event; that of the next one must not be before."""
        return self._now.last_time

    def stage(self, events: Sequence[tuple[int, bytes]], lost: int) -> None:
        """Write a packet of events, each with its time, before which ``lost`` others were lost."""
        now = self._now
        first, last = events[0][0], events[-1][0]
        body = b"".join([event for _, event in events])
        size = self._size_with(body)
        if now.end + size <= now.size:
            discarded = now.discarded + lost
            packet = self._packet(now.file, body, first, last, discarded, now.size - now.end)
            with _opened(self._path(now.file)) as descriptor:
                _write(descriptor, packet, now.end)
            self._staged = now._replace(packet=now.end, end=now.end + size, last_time=last, discarded=discarded)
            return
        file = next(self._numbers)
        # Readers compare the count with that of the packet before: there must be one.
        before = self._packet(file, b"", first, first, 0, self._size_with(b"")) if lost else b""
        end = len(before) + size
        file_size = max(min(2 * now.size, _FILE_MAX), _FILE_MIN, _aligned(end, _PAGE))
        packet = self._packet(file, body, first, last, lost, file_size - len(before))
        self._make(file, file_size, before + packet)
        self._staged = _State(file, file_size, len(before), end, last, lost)

    def commit(self) -> None:
        """Make what was staged part of the trace."""
        old, new = self._now, self._staged
        if new.file != old.file:
            self._hidden(new.file).rename(self._path(new.file))
        else:
            self._set_size(old, new.packet - old.packet)
        self._before, self._now = old, new

    def undo(self) -> None:
        """Take the last commit back."""
        old, new = self._before, self._now
        if new.file != old.file:
            self._path(new.file).unlink()
        else:
            self._set_size(old, old.size - old.packet)
        self._now = old

    @property
    def _start_size(self) -> int:
        return HEADER.size + CONTEXT.size + (0 if self.cpu is None else _CPU.size)

    def _size_with(self, body: bytes) -> int:
        return _aligned(self._start_size + len(body), _ALIGNMENT)

    def _packet(self, file: int, body: bytes, first: int, last: int, discarded: int, size: int) -> bytes:
        """Return a packet that is padded to ``size`` bytes; of the padding only what fills the last word is in it."""
        content = self._start_size + len(body)
        stream_class = STREAM_CLASS_WITHOUT_CPU if self.cpu is None else STREAM_CLASS
        return b"".join((
            HEADER.pack(_MAGIC, self._trace.bytes, stream_class, file),
            CONTEXT.pack(8 * size, 8 * content, first, last, discarded),
            b"" if self.cpu is None else _CPU.pack(self.cpu),
            body,
            bytes(self._size_with(body) - content),
        ))  # fmt: skip

    def _make(self, file: int, size: int, data: bytes) -> None:
        path = self._hidden(file)
        try:
            with _opened(path, os.O_CREAT | os.O_TRUNC) as descriptor:
                _write(descriptor, data, 0)
                os.ftruncate(descriptor, size)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def _set_size(self, state: _State, size: int) -> None:
        """Write the size of the last packet anew."""
        with _opened(self._path(state.file)) as descriptor:
            _write(descriptor, _SIZE.pack(8 * size), state.packet + HEADER.size)

    def _path(self, file: int) -> Path:
        return self._directory / f"stream_{file}"

    def _hidden(self, file: int) -> Path:
        return self._directory / f".stream_{file}"


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    """Open a file for writing; none stays open, since there may be hundreds of them."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
