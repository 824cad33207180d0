"""A file that text is appended to; with a name in .dpt, a trace file."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from dprobes.errors import SinkError, reason_of
from dprobes.sinks.texts import TextSink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.sinks.base import Sink, SinkOptions

__all__ = ["FileOutlet", "open"]


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001 - the name that all sinks have
    """Open the file that is named."""
    if not argument:
        raise SinkError("log target 'file' needs a path: file:PATH")
    if argument.endswith(".dpt"):
        from dprobes.sinks.tracefile import TraceFileSink

        return TraceFileSink(argument)
    outlet = FileOutlet(argument)
    return TextSink(outlet, options.format_name, goes_on=outlet.goes_on)


class FileOutlet:
    """
    Append lines to a file, or whatever else a path leads to.

    Each write is one system call as a rule, so that writers of one file do not tear each other's lines. Of a record
    that finds no room nothing stays in a plain file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise SinkError(f"'{path}' cannot be written: {reason_of(error)}") from error

    @property
    def goes_on(self) -> bool:
        """Whether there is something in the file."""
        return os.fstat(self._file).st_size > 0

    def write(self, texts: Sequence[str]) -> None:
        """Append records."""
        parts = [(text + "\n").encode("utf-8", "backslashreplace") for text in texts]
        data = b"".join(parts)
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            taken = whole = 0
            while whole + len(parts[taken]) <= written:
                whole += len(parts[taken])
                taken += 1
            self._take_back(written - whole)
            raise SinkError(f"'{self._path}': {reason_of(error)}", taken=taken) from error

    def _take_back(self, count: int) -> None:
        """Cut off what was just written of a record."""
        with contextlib.suppress(OSError):
            if count:
                os.ftruncate(self._file, os.fstat(self._file).st_size - count)

    def flush(self) -> None:
        """Do nothing: what is written is visible."""

    def close(self) -> None:
        """Close the file."""
        try:
            os.close(self._file)
        except OSError as error:
            raise SinkError(f"'{self._path}': {reason_of(error)}") from error
