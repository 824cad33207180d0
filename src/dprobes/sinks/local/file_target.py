"""File to which records are appended. A file whose name ends in .dpt or .dptz is a trace file."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import SinkError, reason_of
from dprobes.sinks.target_kinds import is_trace_name
from dprobes.sinks.text_sinks import byte_sink, write_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.sinks import Sink, SinkOptions

__all__ = ["FileOutlet", "open"]

_PATIENCE = 10.0
"""Seconds without progress after which a write to a pipe or a terminal fails."""


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001 - the name that all sinks have
    """Open the file in the argument; raise ``SinkError`` if that fails."""
    if not argument:
        raise SinkError("log target 'file' needs a path: file:PATH")
    if is_trace_name(argument):
        from dprobes.sinks.local.trace_file_target import TraceFileSink

        return TraceFileSink(argument)
    outlet = FileOutlet(argument)
    return byte_sink(outlet, options, goes_on=outlet.goes_on)


class FileOutlet:
    """
    A file, pipe or device to which records are appended.

    Each write usually is one system call, so that concurrent writers do not interleave within lines. A record for which
    there is no room leaves nothing in a regular file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            # O_NONBLOCK: opening a named pipe without a reader must not block.
            self._file = os.open(
                path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK, 0o666
            )
        except OSError as error:
            raise self._opening_error(error) from error

    def _opening_error(self, error: OSError) -> SinkError:
        if error.errno == errno.ENXIO and Path(self._path).is_fifo():
            return SinkError(f"'{self._path}' cannot be written: no process reads this pipe")
        return SinkError(f"'{self._path}' cannot be written: {reason_of(error)}")

    @property
    def goes_on(self) -> bool:
        """True if the file is not empty."""
        return os.fstat(self._file).st_size > 0

    def write(self, parts: Sequence[bytes]) -> None:
        """Append records; raise ``SinkError`` if not all can be written, without a partial one."""
        written = write_parts(self._file, parts, _PATIENCE)
        if written.problem is not None:
            self._take_back(written.extra)
            raise SinkError(f"'{self._path}': {written.problem}", taken=written.parts)

    def _take_back(self, count: int) -> None:
        """
        Truncate the file by the ``count`` bytes of an incomplete record.

        A file that cannot be truncated keeps them.
        """
        with contextlib.suppress(OSError):
            if count:
                os.ftruncate(self._file, os.fstat(self._file).st_size - count)

    def flush(self) -> None:
        """Do nothing: written records are visible at once."""

    def close(self) -> None:
        """Close the file; raise ``SinkError`` if the kernel reports an error."""
        try:
            os.close(self._file)
        except OSError as error:
            raise SinkError(f"'{self._path}': {reason_of(error)}") from error
