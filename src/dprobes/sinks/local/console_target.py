"""Standard output, as the output of a run and as a log target, and output files of a run."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import stat
import sys
from typing import TYPE_CHECKING, TextIO

from dprobes.errors import SinkError, reason_of
from dprobes.formatters.line_formatter import columns_of
from dprobes.sinks.text_sinks import byte_sink, write_parts
from dprobes.standard_files import PATIENCE, WaitingFile, give_up, waiting_file_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dprobes.sinks import Sink, SinkOptions

__all__ = ["ConsoleOutlet", "StreamOutlet", "console", "file", "open"]

_STANDARD_OUTPUT = 1

_UNFLUSHED_MAX = 10_000
"""Maximum number of records that are buffered until a flush, to find out which were written if the stream fails."""

_HELD_MAX = 100_000
"""Maximum number of records that are kept while a run ends and the output is not read."""


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001 - the name that all sinks have
    """Open standard output as a log target; raise ``SinkError`` for an argument."""
    if argument:
        raise SinkError(f"log target 'console' takes no argument, found '{argument}'")
    # The run prints tables on standard output anyway.
    return byte_sink(ConsoleOutlet(), options, columns=columns_of(sys.stdout), has_tables=False)


class ConsoleOutlet:
    """Standard output as a log target; records that it does not accept are lost, and reported."""

    def __init__(self) -> None:
        try:
            self._file = os.dup(_STANDARD_OUTPUT)
        except OSError as error:
            raise SinkError(f"standard output: {reason_of(error)}") from error

    def write(self, parts: Sequence[bytes]) -> None:
        """Write encoded records to standard output; raise ``SinkError`` if not all can be written."""
        written = write_parts(self._file, parts, PATIENCE)
        if written.problem is not None:
            raise SinkError(f"standard output: {written.problem}", taken=written.parts)

    def flush(self) -> None:
        """Do nothing: written records are visible at once."""

    def close(self) -> None:
        """Close the copy of the descriptor; standard output itself stays open."""
        os.close(self._file)


class StreamOutlet:
    """
    A text stream whose contents are visible after ``flush``.

    After a failure nothing more is written. A file that the outlet owns is truncated to the last whole record then.
    """

    def __init__(self, stream: TextIO, name: str, *, owned: bool) -> None:
        self._stream = stream
        self._name = name
        self._owned = owned
        self._file = waiting_file_of(stream)
        self._is_abandoned = False
        self._unflushed: list[Sequence[str]] = []
        self._unflushed_count = 0
        self._start = self._position()
        """The file offset where unflushed data begin, None if it is unknown."""

    def write(self, strings: Sequence[str]) -> None:
        """Write records; raise ``SinkError`` if the stream fails, BrokenPipeError if the pipe has no reader."""
        earlier = self._unflushed_count
        self._unflushed.append(strings)
        self._unflushed_count += len(strings)
        try:
            self._stream.write("\n".join(strings) + "\n")
        except BrokenPipeError:
            raise
        except (OSError, ValueError) as error:
            there = self._give_up()
            raise self._failure(error, taken=max(0, there - earlier), lost=max(0, earlier - there)) from error
        if self._unflushed_count > _UNFLUSHED_MAX:
            self.flush()
            if self._unflushed_count > _HELD_MAX:
                self.settle()
        elif self._has_been_given_up:
            there = self._give_up()
            raise self._failure(None, taken=max(0, there - earlier), lost=max(0, earlier - there))

    def flush(self) -> None:
        """Flush the text stream; raise the same errors as ``write``."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            count = self._unflushed_count
            raise self._failure(error, lost=count - self._give_up()) from error
        if self._has_been_given_up:
            count = self._unflushed_count
            raise self._failure(None, lost=count - self._give_up())
        if self._unflushed and not self.is_holding:
            self._forget()
            self._start = self._position()

    @property
    def is_holding(self) -> bool:
        """True if flushed data are still waiting for room."""
        return self._file is not None and self._file.is_holding

    def settle(self) -> None:
        """Flush, and wait for the reader as long as it makes progress. Errors are those of ``write``."""
        self.flush()
        if self._file is not None and self._file.is_holding:
            try:
                self._file.settle()
            except BrokenPipeError:
                raise
            except OSError as error:
                count = self._unflushed_count
                raise self._failure(error, lost=count - self._give_up()) from error
            self.flush()

    @property
    def _has_been_given_up(self) -> bool:
        """True if ``give_up`` has ended the wait for the reader, and this outlet has not handled that yet."""
        return self._file is not None and self._file.is_given_up and not self._is_abandoned

    def _forget(self) -> None:
        self._unflushed = []
        self._unflushed_count = 0

    def _failure(self, error: OSError | ValueError | None, *, taken: int = 0, lost: int = 0) -> SinkError:
        reason = reason_of(error) if error is not None else self._file.problem if self._file is not None else None
        return SinkError(f"{self._name}: {reason}", taken=taken, lost=lost)

    def _position(self) -> int | None:
        if self._file is not None:
            return self._file.written
        try:
            return os.lseek(self._stream.fileno(), 0, os.SEEK_CUR)
        except (OSError, ValueError):
            return None

    def _give_up(self) -> int:
        """Stop writing, and return how many of the unflushed records were written nevertheless."""
        there, end = 0, self._start
        position = self._position()
        encoding, errors = self._stream.encoding or "utf-8", self._stream.errors or "strict"
        if end is not None and position is not None:
            for text in itertools.chain.from_iterable(self._unflushed):
                size = len(text.encode(encoding, errors)) + 1
                if end + size > position:
                    break
                there, end = there + 1, end + size
            if self._owned and self._file is None:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._stream.fileno(), end)
        self.abandon()
        return there

    def abandon(self) -> None:
        """Stop using the stream, which has no reader or accepts no more data; nothing may be written afterwards."""
        self._is_abandoned = True
        self._forget()
        give_up(self._stream)

    def give_up(self) -> bool:
        """End a wait of ``write`` for the stream's reader; return whether it waited. A signal handler may call it."""
        return self._file is not None and self._file.end_wait()

    def close(self) -> None:
        """Flush, and close the stream if the outlet owns it; raise the same errors as ``write``."""
        try:
            self.flush()
        finally:
            if self._owned:
                with contextlib.suppress(OSError):  # the flush has reported the error
                    self._stream.close()


def console() -> StreamOutlet:
    """Return the outlet for standard output; characters that its encoding lacks are escaped, as in files."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return StreamOutlet(sys.stdout, "standard output", owned=False)


def file(path: Path) -> StreamOutlet:
    """Return the outlet for a file, which is created or truncated; raise ``SinkError`` if it cannot be opened."""
    try:
        stream = path.open("w", encoding="utf-8", errors="backslashreplace")
        if (console := waiting_file_of(sys.stdout)) is not None and not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            # For example a named pipe: waits for its reader are like those of standard output.
            whole = io.BufferedWriter(WaitingFile(os.dup(stream.fileno()), str(path), console.ending, is_owned=True))
            stream.close()
            stream = io.TextIOWrapper(whole, "utf-8", "backslashreplace")
    except OSError as error:
        raise SinkError(f"'{path}' cannot be written: {reason_of(error)}") from error
    return StreamOutlet(stream, f"'{path}'", owned=True)
