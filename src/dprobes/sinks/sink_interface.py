"""
The interface of sinks: the paper's interface to trace daemons (seed 000, section 5).

A sink receives the announcement of a program before its first record (create event), its records (log events), and the
end of the program (destroy event). It is opened by a function that takes the argument of a log target, ``udp://host``
in ``syslog:udp://host``, and ``SinkOptions``. Those that come with DProbes are in ``target_kinds``; a plug-in names
such a function as an entry point of the group ``dprobes.sinks``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from dprobes.record.record_table import RecordTable, TableBytes, TablePlaces

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dprobes.record.record_origin import Place, RecordSource

__all__ = ["Batch", "Sink", "SinkOptions", "bytes_of"]


def bytes_of(records: Sequence[bytes]) -> int:
    """Return the total size of records in bytes."""
    return records.size if isinstance(records, TableBytes) else sum(map(len, records))


class Batch(NamedTuple):
    """
    Encoded records of one source, each with its place.

    ``wall_offset`` converts their time, CLOCK_MONOTONIC, into nanoseconds since 1970. ``lost`` records of the source
    were lost before these on their way to the sink; a batch without records reports that for the end of a program.
    """

    source: RecordSource
    records: Sequence[bytes]
    places: Sequence[Place]
    wall_offset: int
    lost: int = 0

    @classmethod
    def of(
        cls, source: RecordSource, found: Sequence[tuple[int, bytes]], places: Sequence[Place], wall_offset: int
    ) -> Self:
        """Return a batch of records, each with its probepoint; ``places`` is indexed by probepoint number."""
        if isinstance(found, RecordTable):
            return cls(source, TableBytes(found), TablePlaces(found, places), wall_offset)
        return cls(source, [record for _, record in found], [places[probe] for probe, _ in found], wall_offset)

    @property
    def packed(self) -> TablePlaces | None:
        """The record table of the batch, with the places of its probepoints; None if the records are not packed."""
        return self.places if isinstance(self.places, TablePlaces) and isinstance(self.records, TableBytes) else None

    def after(self, count: int) -> Batch:
        """Return the batch without its first ``count`` records."""
        lost = 0 if count else self.lost
        return Batch(self.source, self.records[count:], self.places[count:], self.wall_offset, lost)


class SinkOptions(NamedTuple):
    """
    Options for the output of records.

    ``format_name`` is one of LOG_FORMATS; sinks with a structure of their own ignore it. ``directory`` is the place for
    the files of a sink whose argument is empty.
    """

    format_name: str = "text"
    directory: Path | None = None


class Sink(Protocol):
    """
    A consumer of records. All methods raise ``SinkError`` on failure, and are called by one thread.

    A failed sink is closed and opened again, and gets the announcements of all active programs. So it must start anew
    if that is harmless, and otherwise continue existing contents. A sink that may block for long should also have a
    method ``abort``: another thread calls it at the end to make the blocked call fail. A sink that makes progress
    within a call, as by several requests, should have an attribute ``steps``, an increasing number; it gets larger
    batches. A sink for keyed tables has a method ``log_tables(source, contents)``. It gets all tables of a program
    (``keyed.table_layout``) at its end, and at intervals if the user requests that.
    """

    def create_event(self, source: RecordSource) -> None:
        """Register a program before its first record; a further call with the same number updates its description."""

    def log_events(self, batch: Batch) -> None:
        """
        Write the records of a batch.

        ``SinkError.taken`` is the number of records taken: these are never passed again, the others are.
        ``SinkError.lost`` is the number of taken records, now or before, that never arrived. ``RecordsRefusedError``
        reports only these: all records were taken, and the sink continues.
        """

    def destroy_event(self, source: RecordSource) -> None:
        """Drop the state of a program, which has no more records."""

    def flush(self) -> None:
        """Make taken records visible."""

    def close(self) -> None:
        """Flush, and release the resources of the sink."""
