"""
What sinks have in common: the paper's interface to trace daemons (seed 000, section 5).

A sink is told of a program before its first record (create event), gets its records (log events), and is told when the
program is gone (destroy event). It is opened by a function that takes the argument of a log target, ``udp://host`` in
``syslog:udp://host``, and ``SinkOptions``. Those that come with DProbes are in ``target_kinds``; a plug-in names such
a function as an entry point of the group ``dprobes.sinks``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from dprobes.formatters import FORMATS
from dprobes.record.record_table import RecordTable, TableBytes, TablePlaces

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dprobes.record.record_origin import Place, RecordSource

__all__ = ["LOG_FORMATS", "Batch", "Sink", "SinkOptions", "bytes_of"]

LOG_FORMATS = (*FORMATS, "binary")
"""The formats of log targets: those of formatters, and the records' own bytes."""


def bytes_of(records: Sequence[bytes]) -> int:
    """Return how many bytes records take."""
    return records.size if isinstance(records, TableBytes) else sum(map(len, records))


@dataclass(frozen=True, slots=True)
class Batch:
    """
    Encoded records of one source, each with its place.

    ``wall_offset`` turns their time, CLOCK_MONOTONIC, into nanoseconds since 1970. ``lost`` records of the source were
    lost on their way to the sink before these; a batch without records says that of the last ones of a program.
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
        """Return records, each with its probepoint, as a batch; ``places`` are those of all probepoints."""
        if isinstance(found, RecordTable):
            return cls(source, TableBytes(found), TablePlaces(found, places), wall_offset)
        return cls(source, [record for _, record in found], [places[probe] for probe, _ in found], wall_offset)

    @property
    def packed(self) -> TablePlaces | None:
        """The table that the records are, with the places of its probepoints; None if they are none."""
        return self.places if isinstance(self.places, TablePlaces) and isinstance(self.records, TableBytes) else None

    def after(self, count: int) -> Batch:
        """Return what is left without the first ``count`` records."""
        lost = 0 if count else self.lost
        return Batch(self.source, self.records[count:], self.places[count:], self.wall_offset, lost)


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """
    The way in which records are to be written.

    ``format_name`` is one of LOG_FORMATS; sinks with a structure of
    their own do without. ``directory`` is where a sink whose argument is empty makes its files.
    """

    format_name: str = "text"
    directory: Path | None = None


class Sink(Protocol):
    """
    Take records. All methods raise ``SinkError`` if that fails, and are called by one thread.

    A sink that has failed is closed and opened again, and told of the programs that are active; so it begins anew
    where that is without harm, and goes on with what is there where it is not. One that may wait for long should have a
    method ``abort`` as well: it is called by another thread when nobody waits any more, and lets what waits fail. One
    that gets things done within a call, as by several requests, should show that by an attribute ``steps``, a growing
    number; it gets more records at once. One that takes keyed tables has a method ``log_tables(source, contents)``,
    which gets all tables of a program (``keyed.table_layout``) at its end, and from time to time if that was asked for.
    """

    def create_event(self, source: RecordSource) -> None:
        """Take note of a program, before its records; once more with its number if there is more to be said of it."""

    def log_events(self, batch: Batch) -> None:
        """
        Take the records of a batch.

        ``SinkError.taken`` says how many have been taken: these never come again, the others do. ``SinkError.lost``
        says how many of those that were taken, now or before, never arrived. ``RecordsRefusedError`` says only that:
        all have been taken, and the sink goes on.
        """

    def destroy_event(self, source: RecordSource) -> None:
        """Forget a program, of which no more records will come."""

    def flush(self) -> None:
        """Make visible what was taken."""

    def close(self) -> None:
        """Flush and give up what the sink holds."""
