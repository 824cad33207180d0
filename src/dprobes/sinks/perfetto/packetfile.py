"""
The file of a trace: packets, one behind the other, which is appended to.

It begins with a packet that says during which run of the machine it was made, since CLOCK_MONOTONIC begins anew with
the machine. What a writer that was killed has left of its last packet is cut off when the file is opened again.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import uuid

from dprobes.errors import SinkError, reason_of
from dprobes.record.boot import BOOT_ID
from dprobes.sinks.perfetto.messages import trace_uuid

__all__ = ["PerfettoFile"]

_PACKET = 0x0A
"""The key of a packet: field 1, with a length."""

_LENGTH_MAX = 5
"""Bytes of a length: it has 32 bits at most."""


class PerfettoFile:
    """Append packets to a file, which is locked meanwhile; raises ``SinkError``."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise SinkError(f"'{path}' cannot be written: {reason_of(error)}") from error
        try:
            self._size = self._begin()
        except BaseException:
            os.close(self._file)
            raise

    def append(self, packets: bytes) -> None:
        """Append packets, all of them or none."""
        written = 0
        try:
            while written < len(packets):
                written += os.pwrite(self._file, memoryview(packets)[written:], self._size + written)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise self._error(error) from error
        self._size += written

    def close(self) -> None:
        """Close the file."""
        try:
            os.close(self._file)
        except OSError as error:
            raise self._error(error) from error

    def _begin(self) -> int:
        """Look at what is there, and return where to go on."""
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise SinkError(f"'{self._path}' is not a regular file, as a Perfetto trace must be")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SinkError(f"'{self._path}' is being written by another process") from None
            start, size = trace_uuid(_boot_id()), os.fstat(self._file).st_size
            if size < len(start) and os.pread(self._file, size, 0) == start[:size]:
                self._size = 0
                os.ftruncate(self._file, 0)
                self.append(start)
                return len(start)
            if os.pread(self._file, len(start), 0) != start:
                hint = "a trace cannot be continued after a restart of the machine, nor one of another program"
                raise SinkError(f"'{self._path}' exists already, and is not a trace that can be continued", hint=hint)
            with mmap.mmap(self._file, size, access=mmap.ACCESS_READ) as data:
                end = _end_of_packets(data, len(start))
            if end < size:
                os.ftruncate(self._file, end)
        except OSError as error:
            raise self._error(error) from error
        return end

    def _error(self, error: OSError) -> SinkError:
        return SinkError(f"'{self._path}' cannot be written: {reason_of(error)}")


def _end_of_packets(data: mmap.mmap, position: int) -> int:
    """Return where the last whole packet ends."""
    size = len(data)
    while position + 1 < size and data[position] == _PACKET:
        length = 0
        for index in range(_LENGTH_MAX):
            at = position + 1 + index
            if at >= size:
                return position
            length |= (data[at] & 0x7F) << 7 * index
            if data[at] < 0x80:
                break
        else:
            return position
        end = at + 1 + length
        if end > size:
            return position
        position = end
    return position


def _boot_id() -> uuid.UUID:
    """Return what identifies this run of the machine; nothing does where there is no /proc."""
    try:
        return uuid.UUID(BOOT_ID.read_text().strip())
    except (OSError, ValueError):
        return uuid.uuid4()
