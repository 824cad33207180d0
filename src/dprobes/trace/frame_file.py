"""A file to which frames are appended atomically, by one process only. It does not interpret frame bodies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.errors import FormatError, SinkError, reason_of
from dprobes.trace.trace_frames import (
    READABLE,
    VERSION,
    Frame,
    FrameKind,
    FrameSplitter,
    number_in,
    split_json,
    torn_head,
)

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FrameFile", "older_part"]

# The intact part of an existing trace file, which a writer continues; an incomplete end is cut off.

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Sound:
    """The intact part of a trace file: ``end`` is its size in bytes, ``part`` the file's part number in its trace."""

    end: int
    part: int


def sound_part(file: int, name: str) -> Sound:
    """
    Return the intact part of a trace file. The rest is a torn end.

    A torn end is the beginning of a frame, which a killed writer leaves, or it is the result of a power failure: zeros,
    or a last frame with a wrong check sum. Raise ``SinkError`` for any other contents, which may be valuable data.
    """
    frames = FrameSplitter()
    part = at = 0
    try:
        while data := os.pread(file, _PIECE, at):
            at += len(data)
            frames.push(data)
            while (frame := frames.pull()) is not None:
                if frame.kind == FrameKind.HEADER:
                    part = _part_of(frame, name)
                elif frame.position == 0:
                    raise _refusal(name, "is not a trace file")
        is_torn = frames.position > 0 or torn_head(os.pread(file, _PIECE, 0), at) == FrameKind.HEADER
    except (FormatError, ValueError):
        is_torn = frames.position > 0 and _is_torn(file, frames.position, os.fstat(file).st_size)
    if at and not is_torn:
        raise _refusal(name, f"is damaged at byte {frames.position}" if frames.position else "is not a trace file")
    return Sound(frames.position, part)


def _part_of(header: Frame, name: str) -> int:
    said = split_json(header, name)
    if (version := number_in(said, "version")) not in READABLE:
        raise _refusal(name, f"has version {version} of the trace format, expected {VERSION}")
    return number_in(said, "part") if "part" in said else 0


def _refusal(name: str, what: str) -> SinkError:
    return SinkError(
        f"'{name}' {what}: records cannot be appended to it", hint="move it away, or write to another file"
    )


def _is_torn(file: int, position: int, size: int) -> bool:
    """Return whether the bytes from ``position`` on, where no intact frame begins, are a file's torn end."""
    return torn_head(os.pread(file, _PIECE, position), size - position) is not None or _are_zeros(file, position)


def _are_zeros(file: int, position: int) -> bool:
    while data := os.pread(file, _PIECE, position):
        if data.strip(b"\0"):
            return False
        position += len(data)
    return True


def older_part(path: Path) -> Path:
    """Return the path of the previous file of a writer with a size limit."""
    return path.with_name(path.name + ".1")


class FrameFile:
    """
    An open trace file, mode 0600, positioned after its contents.

    The constructor raises ``SinkError`` if the file cannot be written or continued. ``problem`` is the last failure
    until writing succeeds again, then None. ``size`` is the size of all whole frames in bytes, ``part`` the file's part
    number in its trace. If ``can_replace`` is true, a file that cannot be continued is renamed to the older part. A
    pipe has no contents to continue, and receives the same bytes as a new file.
    """

    def __init__(self, path: Path, *, can_replace: bool) -> None:
        self.path = path
        self.problem: str | None = None
        self.size = self.part = 0
        self._is_torn = False
        self._is_stream = False
        try:
            self._file = self._open()
            try:
                self._go_on(can_replace=can_replace)
            except BaseException:
                os.close(self._file)
                raise
        except OSError as error:
            raise SinkError(f"'{path}' cannot be written: {reason_of(error)}") from error

    def _open(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            self._is_stream = not stat.S_ISREG(self.path.stat().st_mode)
        # A process that also opens a pipe for reading gets no EPIPE when there are no other readers.
        access = os.O_WRONLY if self._is_stream else os.O_RDWR | os.O_APPEND | os.O_CREAT
        file = os.open(self.path, access | os.O_CLOEXEC, 0o600)
        if os.isatty(file):
            os.close(file)
            raise SinkError(f"'{self.path}' is a terminal, and a trace file is not text", hint="leave out -o")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Any other error means that the file system has no locks: the file is used without a lock.
            if error.errno == errno.EWOULDBLOCK:
                os.close(file)
                raise SinkError(
                    f"'{self.path}' is being written by another process", hint="write to another file"
                ) from None
        return file

    def _go_on(self, *, can_replace: bool) -> None:
        """
        Continue after the contents of the file, without a torn end; raise ``SinkError`` if that is impossible.

        With ``can_replace``, keep unreadable contents as the older part, and begin another file.
        """
        if self._is_stream:
            return
        try:
            sound = sound_part(self._file, str(self.path))
        except SinkError:
            if not can_replace or not self.begin_another():
                raise
            return
        self.size, self.part = sound.end, sound.part
        os.ftruncate(self._file, self.size)

    def append(self, data: bytes) -> bool:
        """Write frames, and return True if that succeeded. On failure, the file contains none of them."""
        if not data:
            return True
        written = 0
        try:
            if self._is_torn:
                os.ftruncate(self._file, self.size)
                self._is_torn = False
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            self.problem = f"'{self.path}': {reason_of(error)}"
            if self._is_stream and not written:
                return False
            try:
                os.ftruncate(self._file, self.size)
            except OSError:
                self._is_torn = True  # append nothing until the truncation succeeds
            return False
        self.problem = None
        self.size += len(data)
        return True

    def begin_another(self) -> bool:
        """Rename the file to the older part, continue in a new file, and return whether that succeeded."""
        if self._is_stream:
            self.problem = f"'{self.path}' is a pipe, of which no part can be kept"
            return False
        try:
            with contextlib.suppress(FileNotFoundError):
                self.path.replace(older_part(self.path))
            file = self._open()
        except (OSError, SinkError) as error:
            self.problem = f"'{self.path}': {reason_of(error)}" if isinstance(error, OSError) else error.message
            return False
        os.close(self._file)
        self._file, self.size, self.part = file, 0, self.part + 1
        self._is_torn = False
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
