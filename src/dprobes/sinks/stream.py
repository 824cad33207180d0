"""The console and plain files: one record after the other, each with a line end."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, TextIO

from dprobes.errors import SinkError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["StreamSink", "console", "file"]


class StreamSink:
    """Write text to a stream; what is written is visible at once."""

    def __init__(self, stream: TextIO, name: str, *, owned: bool) -> None:
        self._stream = stream
        self._name = name
        self._owned = owned

    def write(self, text: str) -> None:
        """Write one record; raise ``SinkError`` if the stream fails, BrokenPipeError if nobody reads it any more."""
        try:
            self._stream.write(text + "\n")
        except BrokenPipeError:
            raise
        except (OSError, ValueError) as error:
            self.abandon()
            raise SinkError(f"{self._name}: {getattr(error, 'strerror', None) or error}") from error

    def flush(self) -> None:
        """Make what was written visible; raises as ``write``."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            self.abandon()
            raise SinkError(f"{self._name}: {error.strerror}") from error

    def abandon(self) -> None:
        """Give up: nobody reads the stream any more or it takes no more, and nothing more may be written to it."""
        if not self._owned:
            # Python flushes standard output at exit; let what is left go nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def close(self) -> None:
        """Flush, and close the stream if it is the sink's own; raises as ``write``."""
        try:
            self.flush()
        finally:
            if self._owned:
                with contextlib.suppress(OSError):  # flushing said it already
                    self._stream.close()


def console() -> StreamSink:
    """Return the sink that writes to standard output."""
    return StreamSink(sys.stdout, "standard output", owned=False)


def file(path: Path, *, append: bool = False) -> StreamSink:
    """Return the sink that writes to a new file, or appends to one; raise ``SinkError`` if that cannot be."""
    try:
        stream = path.open("a" if append else "w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise SinkError(f"'{path}' cannot be written: {(error.strerror or str(error)).lower()}") from error
    return StreamSink(stream, f"'{path}'", owned=True)
