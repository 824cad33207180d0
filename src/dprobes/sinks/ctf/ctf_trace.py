"""
Packets of a stream, and their files.

::

    at  packet header                       at  packet context
     0  u32 magic                           32  u64 packet size       in bits, with the padding after the content
     4  u8  uuid[16] of the trace           40  u64 content size      in bits, with header and context
    20  u32 stream class                    48  u64 time of the first event
    24  u64 file                            56  u64 time of the last event
                                            64  u64 events discarded  in the file up to here
                                            72  u32 cpu               in streams of a CPU

Readers refuse a trace if a file has anything after its last whole packet. So a file has its size from the beginning,
and its last packet is padded to the end. The next packet, with its own padding, is written into that padding, which
readers ignore. Then the packet size of the previous packet is overwritten, which is 8 bytes in one page. This makes the
new packet visible. If the writer is interrupted at any moment, or the disk is full, the earlier contents stay readable.
A full file is followed by a larger one, which is renamed into place when it is complete. Files are sparse, so padding
takes no disk space.

To readers, each file is a stream of its own. Trace Compass would count the discarded events of a stream anew in each of
its files.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import shutil
import struct
import uuid
from contextlib import contextmanager
from datetime import UTC, datetime
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from dprobes.record.record_origin import boot_uuid
from dprobes.sinks.ctf.ctf_metadata import STREAM_CLASS, STREAM_CLASS_WITHOUT_CPU, EventClass, Metadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from uuid import UUID

    from dprobes.record.record_origin import RecordSource
    from dprobes.sinks.ctf.ctf_metadata import HeaderItems
    from dprobes.sinks.structured_records import Shape

__all__ = ["Events", "Trace"]

HEADER = struct.Struct("<I16sIQ")
CONTEXT = struct.Struct("<QQQQQ")
_CPU = struct.Struct("<I")
_SIZE = struct.Struct("<Q")

_MAGIC = 0xC1FC1FC1

_FILE_MIN = 1 << 15
_FILE_MAX = 1 << 26
"""Size in bytes of a stream's first file, and the limit up to which the size doubles from file to file."""

_PAGE = 4096
_ALIGNMENT = 8
"""Alignment of packets in bytes, so that a packet size never crosses a page boundary."""


class _State(NamedTuple):
    """
    The position of the end of a stream.

    ``file`` is the number of its last file, which has ``size`` bytes. The last packet of this file begins at byte
    ``packet``, and its content ends at byte ``end``. ``last_time`` is the time of the last event in nanoseconds of the
    trace's clock. ``discarded`` is the number of lost events that the file's last packet states.
    """

    file: int = -1
    size: int = 0
    packet: int = 0
    end: int = 0
    last_time: int = 0
    discarded: int = 0


class Stream:
    """
    Stream of packets of one CPU, or without a CPU, whose events are in the order of time.

    ``numbers`` yields file numbers that are unused in the trace. ``stage`` writes a packet, which becomes part of the
    trace with ``commit``; ``undo`` reverts that. These methods raise ``OSError``.
    """

    def __init__(self, directory: Path, trace: UUID, numbers: Iterator[int], cpu: int | None) -> None:
        self.cpu = cpu
        self._directory = directory
        self._trace = trace
        self._numbers = numbers
        self._before = self._now = self._staged = _State()

    @property
    def last_time(self) -> int:
        """The time of the last event in nanoseconds; the next event must not be earlier."""
        return self._now.last_time

    def stage(self, events: Sequence[tuple[int, bytes]], lost: int) -> None:
        """
        Write a packet of events, each with its time in nanoseconds.

        ``lost`` is the number of events lost before them.
        """
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
        # Readers compare the count of discarded events with the previous packet's, so there must be one.
        before = self._packet(file, b"", first, first, 0, self._size_with(b"")) if lost else b""
        end = len(before) + size
        file_size = max(min(2 * now.size, _FILE_MAX), _FILE_MIN, _aligned(end, _PAGE))
        packet = self._packet(file, body, first, last, lost, file_size - len(before))
        self._make(file, file_size, before + packet)
        self._staged = _State(file, file_size, len(before), end, last, lost)

    def commit(self) -> None:
        """Make the packet of the last ``stage`` visible to readers of the trace."""
        old, new = self._now, self._staged
        if new.file != old.file:
            self._hidden(new.file).rename(self._path(new.file))
        else:
            self._set_size(old, new.packet - old.packet)
        self._before, self._now = old, new

    def undo(self) -> None:
        """Remove the last committed packet from the trace."""
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
        """
        Return a CTF packet with the events ``body``, whose header declares a size of ``size`` bytes.

        The result has only the padding of the last word. ``file`` is the stream's number, ``first`` and ``last`` are
        the times of the first and last event, and ``discarded`` is the total of lost events.
        """
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
        """Overwrite the size in the context of the last packet of ``state`` by ``size`` bytes."""
        with _opened(self._path(state.file)) as descriptor:
            _write(descriptor, _SIZE.pack(8 * size), state.packet + HEADER.size)

    def _path(self, file: int) -> Path:
        return self._directory / f"stream_{file}"

    def _hidden(self, file: int) -> Path:
        return self._directory / f".stream_{file}"


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    """
    Open a file for writing, and close it at the end of the context, because a trace may have hundreds of files.

    ``flags`` are added to those of open(2).
    """
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


# One trace: a directory with its metadata and its streams. Readers insist that times never decrease in a stream, but
# records are out of order: those of several programs, and those of one where a handler was delayed. So there is a
# stream for each CPU, and another one whenever a batch begins before the end of all streams of its CPU. No time is
# changed, and no record is delayed. The metadata are written before the packets that need them, to another file that
# then replaces the old one.

Events = list[tuple[int, bytes]]
"""Encoded events with their times."""

_TIME = itemgetter(0)


class Trace:
    """A trace in a new directory. All methods raise ``OSError``."""

    def __init__(self, directory: Path, wall_offset: int) -> None:
        self.wall_offset = wall_offset
        self._directory = _new_directory(directory)
        self._uuid = uuid.uuid4()
        self._metadata = Metadata(self._uuid, boot_uuid(), wall_offset, platform.node())
        self._is_described = False
        """True if the metadata on disk are complete."""
        self._classes: dict[str, EventClass] = {}
        """The event classes by their content."""
        self._streams: dict[int | None, list[Stream]] = {}
        self._numbers = itertools.count()

    def describe(self, source: RecordSource) -> None:
        """Add the description of a program, which remains after the program was removed."""
        if self._metadata.add_program(source):
            self._is_described = False

    def add_class(self, name: str, header: HeaderItems, shape: Shape, *, has_cpu: bool) -> EventClass:
        """Return the class of events with or without a CPU; an existing class with the same content is reused."""
        number = len(self._metadata.classes)
        stream_class = STREAM_CLASS if has_cpu else STREAM_CLASS_WITHOUT_CPU
        event_class = EventClass(number, stream_class, name, header, shape)
        known = self._classes.setdefault(event_class.content, event_class)
        if known is event_class:
            self._metadata.classes.append(event_class.text)
            self._is_described = False
        return known

    def write(self, events: Mapping[int | None, Events], lost: int) -> None:
        """Write events by their CPUs, all of them or none. ``lost`` is the number of events lost before them."""
        if not self._is_described:
            self._write_metadata()
        staged: list[Stream] = []
        new: list[Stream] = []
        for cpu, found in events.items():
            found.sort(key=_TIME)
            streams = self._streams.get(cpu, ())
            fitting = [stream for stream in streams if stream.last_time <= found[0][0]]
            if fitting:
                stream = max(fitting, key=lambda stream: stream.last_time)
            else:
                stream = Stream(self._directory, self._uuid, self._numbers, cpu)
                new.append(stream)
            stream.stage(found, 0 if staged else lost)
            staged.append(stream)
        _commit(staged)
        for stream in new:
            self._streams.setdefault(stream.cpu, []).append(stream)

    def remove_if_empty(self) -> None:
        """Delete the trace if nothing was written to it."""
        if not self._streams:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _write_metadata(self) -> None:
        path = self._directory / ".metadata"
        try:
            path.write_text(self._metadata.text(), encoding="utf-8", errors="backslashreplace")
            path.rename(self._directory / "metadata")
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self._is_described = True


def _commit(streams: list[Stream]) -> None:
    done: list[Stream] = []
    try:
        for stream in streams:
            stream.commit()
            done.append(stream)
    except OSError:
        for stream in done:
            with contextlib.suppress(OSError):
                stream.undo()
        raise


def _new_directory(parent: Path) -> Path:
    """Create a directory in ``parent`` whose name is the current time, and return its path."""
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path
