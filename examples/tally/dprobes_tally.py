"""
A log target that counts: ``tally:FILE`` gets a line for each probe of a program when the program is gone.

    dprobes run writes.rpn --log-target tally:/tmp/counts -- ls

All methods of a sink are called by one thread, which belongs to the log target; they may take their time.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import SinkError
from dprobes.record.log_record import decode_record

if TYPE_CHECKING:
    from dprobes.record.record_origin import RecordSource
    from dprobes.sinks import Batch, Sink, SinkOptions

__all__ = ["TallySink", "open_tally"]


def open_tally(argument: str, options: SinkOptions) -> Sink:
    """Open ``tally:ARGUMENT``; whatever is wrong with the argument is a ``SinkError``."""
    if not argument:
        raise SinkError("log target 'tally' needs a file: tally:FILE")
    return TallySink((options.directory or Path.cwd()) / argument)


class TallySink:
    """Count the records of each program by symbol, major and minor code."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._programs: dict[int, tuple[RecordSource, Counter[tuple[str, int, int]]]] = {}
        self._write("")  # a file that cannot be written is to be said at once

    def create_event(self, source: RecordSource) -> None:
        """Know a program. It may be known already: then there is more to be said of it, or another sink had failed."""
        _, counts = self._programs.get(source.number, (source, Counter()))
        self._programs[source.number] = (source, counts)

    def log_events(self, batch: Batch) -> None:
        """Count the records of a batch."""
        _, counts = self._programs[batch.source.number]
        for data, place in zip(batch.records, batch.places, strict=True):
            record = decode_record(data)
            counts[place.symbol, record.major or 0, record.minor or 0] += 1
        if batch.lost:
            counts["(lost)", batch.source.major, 0] += batch.lost

    def destroy_event(self, source: RecordSource) -> None:
        """Write the counts of a program, which is gone."""
        if source.number in self._programs:
            _, counts = self._programs.pop(source.number)
            lines = (f"{source.name} {symbol} {major},{minor} {n}\n" for (symbol, major, minor), n in counts.items())
            self._write("".join(lines))

    def flush(self) -> None:
        """Do nothing: counts are written at the end."""

    def close(self) -> None:
        """Write the counts of the programs that are still there."""
        for source, _ in list(self._programs.values()):
            self.destroy_event(source)

    def _write(self, text: str) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise SinkError(f"'{self._path}' cannot be written: {error.strerror}") from error
