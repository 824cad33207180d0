"""
Sinks: the code of log targets, and the paper's interface to trace daemons (seed 000, section 5).

A sink receives the announcement of a program before its first record (create event), its records (log events), and the
end of the program (destroy event). A function opens it, with ``SinkOptions`` and the argument of a log target, such as
``udp://host`` in ``syslog:udp://host``. ``target_kinds`` has the functions that come with DProbes. A plug-in names such
a function as an entry point of the group ``dprobes.sinks`` (log-targets.md, "Plug-ins").
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

    ``wall_offset``, added to their time, CLOCK_MONOTONIC, results in nanoseconds since 1970. ``lost`` is the number of
    records of the source that were lost immediately before these on their way to the sink. At the end of a program a
    batch without records may report that number.
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
        """
        Return a batch of records, each a pair of probepoint number and encoded record.

        ``places`` is indexed by probepoint number. ``wall_offset`` in nanoseconds converts CLOCK_MONOTONIC to the wall
        clock.
        """
        if isinstance(found, RecordTable):
            return cls(source, TableBytes(found), TablePlaces(found, places), wall_offset)
        return cls(source, [record for _, record in found], [places[probe] for probe, _ in found], wall_offset)

    @property
    def packed(self) -> TablePlaces | None:
        """The record table of the batch, with the places of its probepoints, or None if the records are not packed."""
        return self.places if isinstance(self.places, TablePlaces) and isinstance(self.records, TableBytes) else None

    def after(self, count: int) -> Batch:
        """Return the batch without its first ``count`` records."""
        lost = 0 if count else self.lost
        return Batch(self.source, self.records[count:], self.places[count:], self.wall_offset, lost)


class SinkOptions(NamedTuple):
    """
    Options for the output of records.

    ``format_name`` is one of LOG_FORMATS; sinks with a structure of their own ignore it. ``directory`` is the directory
    of the files of a sink whose argument is empty.
    """

    format_name: str = "text"
    directory: Path | None = None


class Sink(Protocol):
    """
    Consumer of records. All methods raise ``SinkError`` on failure, and are called by one thread.

    A failed sink is closed and opened again, and gets the announcements of all active programs. It must therefore start
    anew if that is harmless, and otherwise continue existing contents.

    The following members are optional:

    * ``abort`` makes a blocked call fail. Another thread calls it at the end.
    * ``steps`` is an increasing number that shows progress within a call, which may consist of several requests. A sink
      with it gets larger batches.
    * ``log_tables(source, contents)`` accepts keyed tables (``keyed.table_layout``). It gets all tables of a program at
      its end, and at intervals if the user requests that.
    """

    def create_event(self, source: RecordSource) -> None:
        """Register a program before its first record; a further call with the same number updates its description."""

    def log_events(self, batch: Batch) -> None:
        """
        Write the records of a batch.

        ``SinkError.taken`` is the number of accepted records: these are never passed again, the others are.
        ``SinkError.lost`` is the number of accepted records, of this or of earlier batches, that never arrived.
        ``RecordsRefusedError`` reports only lost records: all records were accepted, and the sink continues.
        """

    def destroy_event(self, source: RecordSource) -> None:
        """Drop the state of a program, which has no more records."""

    def flush(self) -> None:
        """Make accepted records visible to readers."""

    def close(self) -> None:
        """Flush, and release the resources of the sink."""
