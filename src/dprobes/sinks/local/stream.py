"""Standard output, as the output of a run and as a log target, and files of a run's own."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
from typing import TYPE_CHECKING, TextIO

from dprobes.errors import SinkError, reason_of
from dprobes.formatters.terminalcolumns import columns_of
from dprobes.sinks.bytesinks import byte_sink
from dprobes.sinks.descriptorwriter import write_parts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dprobes.sinks.interface import Sink, SinkOptions

__all__ = ["ConsoleOutlet", "StreamOutlet", "console", "file", "open"]


_STANDARD_OUTPUT = 1

_PATIENCE = 10.0

_UNFLUSHED_MAX = 10_000
"""Records that are kept until they are flushed: should the stream fail, they say which of them are in it."""


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001 - the name that all sinks have
    """Open standard output as a log target."""
    if argument:
        raise SinkError(f"log target 'console' takes no argument, found '{argument}'")
    # Tables go to standard output anyway.
    return byte_sink(ConsoleOutlet(), options, columns=columns_of(sys.stdout), has_tables=False)


class ConsoleOutlet:
    """Write to standard output as any other log target: what it does not take any more is lost, and said."""

    def __init__(self) -> None:
        try:
            self._file = os.dup(_STANDARD_OUTPUT)
        except OSError as error:
            raise SinkError(f"standard output: {reason_of(error)}") from error

    def write(self, parts: Sequence[bytes]) -> None:
        """Write records."""
        written = write_parts(self._file, parts, _PATIENCE)
        if written.problem is not None:
            raise SinkError(f"standard output: {written.problem}", taken=written.parts)

    def flush(self) -> None:
        """Do nothing: what is written is visible."""

    def close(self) -> None:
        """Leave standard output to others."""
        os.close(self._file)


class StreamOutlet:
    """
    Write text to a stream, where it is visible after ``flush``.

    A stream that fails takes nothing more. A file of our own ends behind the last whole record then.
    """

    def __init__(self, stream: TextIO, name: str, *, owned: bool) -> None:
        self._stream = stream
        self._name = name
        self._owned = owned
        self._unflushed: list[Sequence[str]] = []
        self._unflushed_count = 0
        self._start = self._position()
        """Where what is not flushed begins, None where nobody can tell."""

    def write(self, strings: Sequence[str]) -> None:
        """Write records; raise ``SinkError`` if the stream fails, BrokenPipeError if nobody reads it any more."""
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

    def flush(self) -> None:
        """Make what was written visible; raises as ``write``."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            count = self._unflushed_count
            raise self._failure(error, lost=count - self._give_up()) from error
        if self._unflushed:
            self._forget()
            self._start = self._position()

    def _forget(self) -> None:
        self._unflushed = []
        self._unflushed_count = 0

    def _failure(self, error: OSError | ValueError, *, taken: int = 0, lost: int = 0) -> SinkError:
        return SinkError(f"{self._name}: {reason_of(error)}", taken=taken, lost=lost)

    def _position(self) -> int | None:
        try:
            return os.lseek(self._stream.fileno(), 0, os.SEEK_CUR)
        except (OSError, ValueError):
            return None

    def _give_up(self) -> int:
        """Write nothing more, and return how many of the records that were not flushed are there nevertheless."""
        there, end = 0, self._start
        position = self._position()
        encoding, errors = self._stream.encoding or "utf-8", self._stream.errors or "strict"
        if end is not None and position is not None:
            for text in itertools.chain.from_iterable(self._unflushed):
                size = len(text.encode(encoding, errors)) + 1
                if end + size > position:
                    break
                there, end = there + 1, end + size
            if self._owned:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._stream.fileno(), end)
        self.abandon()
        return there

    def abandon(self) -> None:
        """Give up: nobody reads the stream any more or it takes no more, and nothing more may be written to it."""
        self._forget()
        # Python writes what it has kept when it closes the stream; let that go nowhere.
        with contextlib.suppress(ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def close(self) -> None:
        """Flush, and close the stream if it is the outlet's own; raises as ``write``."""
        try:
            self.flush()
        finally:
            if self._owned:
                with contextlib.suppress(OSError):  # flushing said it already
                    self._stream.close()


def console() -> StreamOutlet:
    """Return the outlet that writes to standard output; what its encoding lacks is escaped, as in files."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return StreamOutlet(sys.stdout, "standard output", owned=False)


def file(path: Path) -> StreamOutlet:
    """Return the outlet that writes to a new file; raise ``SinkError`` if that cannot be."""
    try:
        stream = path.open("w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise SinkError(f"'{path}' cannot be written: {reason_of(error)}") from error
    return StreamOutlet(stream, f"'{path}'", owned=True)
