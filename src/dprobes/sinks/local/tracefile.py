"""A trace file (``trace.writer``) as a log target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import SinkError
from dprobes.formatters.recordednames import RecordedNames
from dprobes.record.packed import PackedPlaces
from dprobes.trace.content import PlaceEntry
from dprobes.trace.filenames import compression_of
from dprobes.trace.names import NameRegister
from dprobes.trace.writer import TraceFileWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.record.origin import RecordSource
    from dprobes.record.probeinfo import Place
    from dprobes.sinks.interface import Batch

__all__ = ["TraceFileSink"]


class TraceFileSink:
    """
    Append to a trace file, which gets the places of probepoints with their first record, and names for addresses.

    One with a name in .dptz is compressed.
    """

    def __init__(self, path: str) -> None:
        self._writer = TraceFileWriter(Path(path), compress=compression_of(path))
        self._numbers: dict[int, int] = {}
        """The number in the file of each source."""
        self._places: dict[int, dict[Place, int]] = {}
        self._names: dict[int, RecordedNames] = {}
        self._register = NameRegister()

    def create_event(self, source: RecordSource) -> None:
        """Announce a program, or say more of it."""
        if (number := self._numbers.get(source.number)) is not None:
            self._writer.update_program(number, source.details())
            self._names[source.number].know(source)
            return
        self._numbers[source.number] = self._writer.add_program(source.name, source.major, source.details())
        self._places[source.number] = {}
        self._names[source.number] = RecordedNames(source)

    def log_events(self, batch: Batch) -> None:
        """Append the records of a batch, all of them or none."""
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

    def _packed(self, number: int, batch: Batch) -> Sequence[tuple[int, bytes]] | None:
        """Return packed records with the numbers that the file gives their probepoints; None if they are not packed."""
        if (packed := batch.packed) is None or not isinstance(batch.places, PackedPlaces):
            return None
        table, probes = batch.places.table, packed.probes()
        there = {probes} if isinstance(probes, int) else dict.fromkeys(probes)
        known = self._known(number, batch.source, [table[probe] for probe in there])
        return packed.renumbered(lambda probe: known[table[probe]])

    def _known(self, number: int, source: RecordSource, places: Iterable[Place]) -> dict[Place, int]:
        """Announce places that the file does not know, and return the numbers of all that it knows."""
        known = self._places[source.number]
        if new := [place for place in dict.fromkeys(places) if place not in known]:
            self._writer.add_places(number, [PlaceEntry.of(place) for place in new])
            known |= {place: index for index, place in enumerate(new, len(known))}
        return known

    def destroy_event(self, source: RecordSource) -> None:
        """Forget a program."""
        if (number := self._numbers.get(source.number)) is not None:
            if not self._writer.end_program(number):
                raise self._failure()
            del self._numbers[source.number]
            del self._places[source.number]
            del self._names[source.number]

    def flush(self) -> None:
        """Write what is kept back to be compressed."""
        if not self._writer.flush():
            raise self._failure()

    def close(self) -> None:
        """Write what is kept back, and close the file."""
        self._writer.close()
        if self._writer.problem is not None:
            raise self._failure()

    def _failure(self, batch: Batch | None = None) -> SinkError:
        """
        Return the error: what was kept back is lost, and the notes in it are not in the file.

        What was lost before ``batch`` is not among them, because it comes again with it.
        """
        problem = self._writer.problem or f"'{self._writer.path}' cannot be written"
        lost = self._writer.take_lost()
        unmarked = {source: lost[number][0] for source, number in self._numbers.items() if number in lost}
        if batch is not None:
            unmarked[batch.source.number] -= batch.lost
        count = sum(missing - given for missing, given in lost.values())
        return SinkError(problem, lost=count, unmarked={source: n for source, n in unmarked.items() if n > 0})
