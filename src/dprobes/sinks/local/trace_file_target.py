"""A trace file (``trace.trace_writer``) as a log target."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import SinkError
from dprobes.formatters.recorded_names import RecordedNames
from dprobes.formatters.table_addresses import ProcessAddresses, names_for
from dprobes.sinks.target_kinds import compression_of
from dprobes.trace.carried_names import NameRegister
from dprobes.trace.trace_content import PlaceEntry
from dprobes.trace.trace_writer import TraceFileWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.keyed.table_layout import TableContents
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.sinks import Batch

__all__ = ["TraceFileSink"]

_HOLD = 50_000_000
"""Nanoseconds for which records are buffered to be joined."""


class TraceFileSink:
    """
    Trace file, to which the places of probepoints and the names of addresses are added with their first records.

    A file whose name ends in .dptz is compressed. In other files, records that arrive one by one are buffered for up to
    50 ms, and then written together by a timer thread. With ``is_safe``, accepted records must be in the file, so they
    are written at once.
    """

    def __init__(self, path: str, *, is_safe: bool = False) -> None:
        compress = compression_of(path)
        self._holds = compress is None and not is_safe
        self._writer = TraceFileWriter(Path(path), compress=compress, hold=_HOLD if self._holds else 0)
        self._lock = threading.Lock()
        """Serializes the thread that uses the sink and the timer thread that writes buffered records."""
        self._timer: threading.Timer | None = None
        self._has_failed = False
        """True if buffered records could not be written, and this was not reported yet."""
        self._numbers: dict[int, int] = {}
        """The program's number in the file by source number."""
        self._places: dict[int, dict[Place, int]] = {}
        self._names: dict[int, RecordedNames] = {}
        self._register = NameRegister()

    @property
    def is_holding(self) -> bool:
        """True if records are buffered."""
        return self._timer is not None or self._has_failed

    def create_event(self, source: RecordSource) -> None:
        """Write the description of a program to the file before its first record, or replace it."""
        with self._lock:
            self._create(source)

    def _create(self, source: RecordSource) -> None:
        if (number := self._numbers.get(source.number)) is not None:
            self._writer.update_program(number, source.details())
            self._names[source.number].know(source)
            return
        self._numbers[source.number] = self._writer.add_program(source.name, source.major, source.details())
        self._places[source.number] = {}
        self._names[source.number] = RecordedNames(source)

    def log_events(self, batch: Batch) -> None:
        """Append the records of a batch, all of them or none."""
        with self._lock:
            self._raise_failure()
            self._log(batch)
            if self._holds and self._timer is None and self._writer.is_holding:
                self._timer = threading.Timer(_HOLD / 1e9, self._on_time)
                self._timer.daemon = True
                self._timer.start()

    def _on_time(self) -> None:
        """Write records that have waited for compression for too long, as called by the timer."""
        with self._lock:
            if self._timer is not None:
                self._timer = None
                self._has_failed |= not self._writer.flush()

    def _raise_failure(self) -> None:
        if self._has_failed:
            self._has_failed = False
            raise self._failure()

    def _log(self, batch: Batch) -> None:
        number = self._numbers[batch.source.number]
        records = self._packed(number, batch)
        if records is None:
            known = self._known(number, batch.source, batch.places)
            records = [(known[place], record) for place, record in zip(batch.places, batch.records, strict=True)]
        if batch.lost:
            self._writer.lose(number, batch.lost)
        located = self._names[batch.source.number].located(batch.records, batch.places)
        if not self._writer.append(number, records, self._register.telling(located)):
            raise self._failure(batch)

    def log_tables(self, source: RecordSource, contents: Sequence[TableContents]) -> None:
        """Append the current contents of a program's keyed tables to the trace file."""
        with self._lock:
            names = names_for(source, [each.table for each in contents])
            located = names.located(contents) if isinstance(names, ProcessAddresses) else []
            number = self._numbers[source.number]
            if not self._writer.append_tables(number, contents, self._register.telling(located)):
                raise self._failure()

    def _packed(self, number: int, batch: Batch) -> Sequence[tuple[int, bytes]] | None:
        """
        Return packed records whose probepoints have the file's numbers, or None if the batch is not packed.

        ``number`` is the program's number in the file.
        """
        if (packed := batch.packed) is None:
            return None
        known = self._known(number, batch.source, packed.distinct())
        return packed.table.renumbered(lambda probe: known[packed.places[probe]])

    def _known(self, number: int, source: RecordSource, places: Iterable[Place]) -> dict[Place, int]:
        """
        Write descriptions of places that the file lacks, and return the file's numbers of all places of the program.

        ``number`` is the program's number in the file.
        """
        known = self._places[source.number]
        if new := [place for place in dict.fromkeys(places) if place not in known]:
            self._writer.add_places(number, [PlaceEntry.of(place) for place in new])
            known |= {place: index for index, place in enumerate(new, len(known))}
        return known

    def destroy_event(self, source: RecordSource) -> None:
        """Mark the program as ended in the file, and drop its state."""
        with self._lock:
            self._raise_failure()
            if (number := self._numbers.get(source.number)) is not None:
                if not self._writer.end_program(number):
                    raise self._failure()
                del self._numbers[source.number]
                del self._places[source.number]
                del self._names[source.number]

    def flush(self) -> None:
        """Write records that are buffered for compression; those buffered for joining are written by the timer."""
        with self._lock:
            self._raise_failure()
            if self._timer is None and not self._writer.flush():
                raise self._failure()

    def settle(self) -> None:
        """Write all buffered records."""
        with self._lock:
            self._raise_failure()
            self._cancel()
            if not self._writer.flush():
                raise self._failure()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Write the buffered records, and close the file."""
        with self._lock:
            self._cancel()
            self._writer.close()
            if self._writer.problem is not None or self._has_failed:
                self._has_failed = False
                raise self._failure()

    def _failure(self, batch: Batch | None = None) -> SinkError:
        """
        Return the error for a failed write.

        Buffered records are lost. ``SinkError.unmarked`` has the numbers of lost records that the file does not report
        yet. Records lost before ``batch`` are not counted: the batch is passed again together with their number.
        """
        problem = self._writer.problem or f"'{self._writer.path}' cannot be written"
        lost = self._writer.take_lost()
        unmarked = {source: lost[number][0] for source, number in self._numbers.items() if number in lost}
        if batch is not None:
            unmarked[batch.source.number] -= batch.lost
        count = sum(missing - given for missing, given in lost.values())
        return SinkError(problem, lost=count, unmarked={source: n for source, n in unmarked.items() if n > 0})
