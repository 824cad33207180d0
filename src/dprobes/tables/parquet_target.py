"""
A directory of Parquet files (``table_schema``), for databases and data frames.

A Parquet file is unreadable until it is complete, and efficient only if it is large. Records are therefore written to a
journal, a trace file, at once, and survive if the process is killed. When the journal is old or large enough, another
process converts it to Parquet files, which appear atomically.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import SinkError, reason_of
from dprobes.sinks import bytes_of
from dprobes.sinks.local.trace_file_target import TraceFileSink
from dprobes.tables.parquet_journals import Journal, abandoned, start_converter

if TYPE_CHECKING:
    import subprocess

    from dprobes.record.record_origin import RecordSource
    from dprobes.sinks import Batch, Sink, SinkOptions

__all__ = ["ParquetSink", "open"]

RECORDS_MAX = 1 << 20
BYTES_MAX = 128 << 20
SECONDS_MAX = 60.0
"""Limits of a journal in records, bytes and seconds, after which it is converted to Parquet files."""

_LATE = 4
"""Factor by which the limits are exceeded while the previous journal is still being converted."""


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001, ARG001 - the name that all sinks have
    """Open the directory in the argument, which need not exist; raise ``SinkError`` without one or without pyarrow."""
    if not argument:
        raise SinkError("log target 'parquet' needs a directory: parquet:DIR")
    if importlib.util.find_spec("pyarrow") is None:
        raise SinkError("log target 'parquet' needs pyarrow", hint="pip install 'dprobes[parquet]'")
    return ParquetSink(Path(argument))


class ParquetSink:
    """
    A sink that writes records to a journal, which another process converts.

    Records in the journal count as accepted.
    """

    def __init__(self, directory: Path, seconds_max: float = SECONDS_MAX) -> None:
        self._directory = directory
        self._seconds_max = seconds_max
        self._active: dict[int, RecordSource] = {}
        self._journal: Journal | None = None
        self._trace: TraceFileSink | None = None
        self._begun = 0.0
        self._count = self._size = 0
        self._converter: subprocess.Popen[str] | None = None
        self._timer: threading.Timer | None = None
        self._problem: str | None = None
        self._lock = threading.RLock()
        """Held by the log target's thread, and by the timer that checks the journal while no records arrive."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise SinkError(f"'{directory}' cannot be written")
            if journals := abandoned(directory):
                self._converter = start_converter(journals)
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> SinkError:
        return SinkError(f"'{self._directory}': {reason_of(error)}")

    # Programs and their records

    def create_event(self, source: RecordSource) -> None:
        """Store the description of a program before its first record, or replace it."""
        with self._lock:
            self._active[source.number] = source
            if self._trace is not None:
                self._trace.create_event(source)

    def log_events(self, batch: Batch) -> None:
        """Append records to the journal, all of them or none."""
        with self._lock:
            self._raise_problem()
            self._open_journal().log_events(batch)
            self._count += len(batch.records)
            self._size += bytes_of(batch.records)
            try:
                self._finish_if_due()
            except SinkError as error:
                error.taken = len(batch.records)
                raise

    def destroy_event(self, source: RecordSource) -> None:
        """Drop the state of a program. After the last program, the journal is converted."""
        with self._lock:
            self._active.pop(source.number, None)
            if self._trace is not None:
                self._trace.destroy_event(source)
            if not self._active:
                self._finish()

    def flush(self) -> None:
        """Convert the journal if it has reached a limit."""
        with self._lock:
            self._raise_problem()
            self._finish_if_due()

    def close(self) -> None:
        """Convert the journal, and wait for the conversions."""
        with self._lock:
            try:
                self._finish()
                self._reap(patient=True)
                self._raise_problem()
            finally:
                self._let_go()

    # The journal

    def _open_journal(self) -> TraceFileSink:
        if self._trace is None:
            try:
                self._journal = Journal.begin(self._directory)
            except OSError as error:
                raise self._error(error) from error
            self._begun = time.monotonic()
            self._count = self._size = 0
            try:
                self._trace = TraceFileSink(str(self._journal.path), is_safe=True)
                for source in self._active.values():
                    self._trace.create_event(source)
            except BaseException:
                self._let_go()
                raise
            self._timer = threading.Timer(self._seconds_max, self._on_timer)
            self._timer.daemon = True
            self._timer.start()
        return self._trace

    def _finish_if_due(self) -> None:
        self._reap(patient=False)
        factor = 1 if self._converter is None else _LATE
        if (
            self._count >= RECORDS_MAX * factor
            or self._size >= BYTES_MAX * factor
            or (self._count and time.monotonic() - self._begun >= self._seconds_max * factor)
        ):
            self._finish()

    def _finish(self) -> None:
        """Close the journal, and start the process that converts it to Parquet files."""
        if self._trace is None:
            return
        self._reap(patient=True)
        if self._timer is not None:
            self._timer.cancel()
        trace, journal, self._trace, self._journal = self._trace, self._journal, None, None
        assert journal is not None
        trace.close()
        try:
            self._converter = start_converter([journal])
        except OSError as error:
            journal.release()
            raise self._error(error) from error

    def _let_go(self) -> None:
        """Release the journal unconverted: the next sink converts it."""
        if self._timer is not None:
            self._timer.cancel()
        trace, journal, self._trace, self._journal = self._trace, self._journal, None, None
        if trace is not None:
            with contextlib.suppress(OSError, SinkError):
                trace.close()
        if journal is not None:
            journal.release()

    def _on_timer(self) -> None:
        with self._lock:
            try:
                self._finish_if_due()
            except SinkError as error:
                self._problem = error.message
            if self._trace is not None and self._converter is not None:  # wait for the previous conversion
                self._timer = threading.Timer(self._seconds_max, self._on_timer)
                self._timer.daemon = True
                self._timer.start()

    # The converting process

    def _reap(self, *, patient: bool) -> None:
        process = self._converter
        if process is None or (not patient and process.poll() is None):
            return
        _, said = process.communicate()
        self._converter = None
        if process.returncode:
            why = said.strip() or f"exit status {process.returncode}"
            self._problem = f"Parquet files could not be made: {why.splitlines()[-1]}"

    def _raise_problem(self) -> None:
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise SinkError(problem)
