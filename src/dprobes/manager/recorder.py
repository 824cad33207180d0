"""Recorder of the manager: its trace file, and the log targets."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.errors import ManagerError
from dprobes.escapes import escaped
from dprobes.formatters.recorded_names import RecordedNames
from dprobes.record.record_origin import WallClock
from dprobes.resolve.probepoints import places_of, with_files
from dprobes.sinks import Batch, SinkOptions
from dprobes.sinks.sink_thread import LogTargets, close_all
from dprobes.sinks.target_kinds import parse_target
from dprobes.trace.carried_names import NameRegister
from dprobes.trace.trace_content import PlaceEntry
from dprobes.trace.trace_writer import TraceFileWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from dprobes.keyed.table_layout import TableContents
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.sinks.sink_thread import TargetStatus
    from dprobes.target.code_names import LocatedCode

__all__ = ["TRACE_LIMIT", "ProgramRecords", "Recording"]

TRACE_LIMIT = 256 << 20
"""Maximum total size in bytes of the trace file and its older part."""

_CLOSING_LIMIT = 10.0
"""Maximum total time in seconds for log targets to write their queues when a client waits for their end."""


class Recording:
    """
    The trace file and the log targets; the threads of all programs write to it.

    ``directory`` is the place for the files of log targets without a path.
    """

    def __init__(self, trace: Path, directory: Path, limit: int = TRACE_LIMIT) -> None:
        self._lock = threading.Lock()
        self._writer = TraceFileWriter(trace, limit)
        self._names = NameRegister()
        self._directory = directory
        self._targets = LogTargets(_say)
        self._clock = WallClock()

    @property
    def trace(self) -> Path:
        """The trace file."""
        return self._writer.path

    @property
    def problem(self) -> str | None:
        """The current problem of the trace file, or None if there is none."""
        path = self._writer.path
        if self._writer.problem is None and not path.exists():
            return f"'{path}' has been removed: new records cannot be read"
        return self._writer.problem

    # Log targets

    def add_target(self, name: str, module: str | None, format_name: str) -> bool:
        """
        Add a log target. Return False if it exists already; raise ``ManagerError`` for the console.

        ``module`` restricts it to the program with this name, unless it is None.
        """
        target = parse_target(name)
        if target.kind.name == "console":
            raise ManagerError("the manager has no console", hint="'dprobes run --log-target console' has one")
        return self._targets.add(target, module, SinkOptions(format_name, self._directory))

    def remove_target(self, name: str, module: str | None) -> list[TargetStatus]:
        """
        Remove log targets, all of that name if ``module`` is None; return their last status.

        Raise ``ManagerError`` if there is none.
        """
        name = parse_target(name).text
        taken = self._targets.take(name, module)
        if not taken:
            known = ", ".join(self._targets.names()) or "none"
            raise ManagerError(f"there is no log target '{name}'", hint=f"log targets are: {known}")
        return close_all(taken, _CLOSING_LIMIT)

    def forget_targets_of(self, *modules: str, limit: float = _CLOSING_LIMIT) -> None:
        """Remove the log targets of these programs; that may take ``limit`` seconds."""
        close_all([target for module in modules for target in self._targets.take_of(module)], limit)

    def forget_targets(self, names: Iterable[str], module: str) -> None:
        """Remove some of the log targets of one program, if they still exist."""
        strings = [parse_target(name).text for name in names]
        close_all([target for text in strings for target in self._targets.take(text, module)], _CLOSING_LIMIT)

    def targets(self) -> list[TargetStatus]:
        """Return the status of each log target, without the manager's trace file."""
        return self._targets.statuses()

    def close(self) -> None:
        """Write the queued records, and close the trace file and the log targets."""
        self._targets.close(limit=_CLOSING_LIMIT)
        with self._lock:
            self._writer.close()

    # Records

    def open_program(self, source: RecordSource) -> ProgramRecords:
        """Announce a program, and return the writer for its records; ``source`` gets its number here."""
        with self._lock:
            source = replace(source, number=self._writer.add_program(source.name, source.major, source.details()))
        self._targets.create_event(source)
        return ProgramRecords(self, source)

    def write(
        self,
        source: RecordSource,
        records: Sequence[tuple[int, bytes]],
        places: Sequence[Place],
        names: RecordedNames,
    ) -> bool:
        """
        Write records of a program, and return True if they are in the trace file.

        Log targets report their own failures. ``places`` has the places of the program's probepoints. ``names`` is the
        locator of its addresses.
        """
        with self._lock:
            offset = self._clock.look()
        batch = Batch.of(source, records, places, offset)
        located = names.located(batch.records, batch.places)  # without the lock, because it may take long
        with self._lock:
            is_written = self._writer.write(source.number, records, self._names.telling(located))
        self._targets.log_events(batch)
        return is_written

    def announce(self, source: RecordSource, places: Sequence[Place]) -> None:
        """Update the description of a program for readers, and add its new probepoints ``places`` to the trace file."""
        with self._lock:
            self._writer.update_program(source.number, source.details())
            self._writer.add_places(source.number, [PlaceEntry.of(place) for place in places])
        self._targets.create_event(source)

    def end(self, source: RecordSource, lost: int, tables: Sequence[TableContents]) -> None:
        """End a program with ``lost`` further records, and write the contents of its keyed tables."""
        located: Sequence[LocatedCode] = ()
        if tables:
            from dprobes.formatters.table_addresses import ProcessAddresses, names_for

            names = names_for(source, [each.table for each in tables])
            located = names.located(tables) if isinstance(names, ProcessAddresses) else ()
            self._targets.log_tables(source, tables)
        with self._lock:
            if tables:
                self._writer.append_tables(source.number, tables, self._names.telling(located))
            if lost:
                self._writer.lose(source.number, lost)
                self._writer.write(source.number, [])
            self._writer.end_program(source.number)
        self._targets.destroy_event(source)


def _say(target: str, problem: str) -> None:
    """Write a problem of a log target to the manager's log."""
    print(f"dprobes manager: log target {escaped(target)}: {escaped(problem)}", file=sys.stderr, flush=True)  # noqa: T201


class ProgramRecords:
    """A writer of one program's records to the manager's trace file and log targets."""

    def __init__(self, recording: Recording, source: RecordSource) -> None:
        self.places: list[Place] = []
        self._source = source
        self._recording = recording
        self._names = RecordedNames(source)

    def write(self, probes: Sequence[Probepoint], records: Sequence[tuple[int, bytes]]) -> bool:
        """
        Write records of the session, whose current probepoints are ``probes``.

        Return whether the records are in the trace file.
        """
        if len(probes) > len(self.places):
            new = probes[len(self.places) :]
            more = places_of(self._source.module, probes, len(self.places))
            self.places += more
            self._source = with_files(self._source, new)
            self._names.know(self._source)
            self._recording.announce(self._source, more)
        return self._recording.write(self._source, records, self.places, self._names)

    def end(self, lost: int, tables: Sequence[TableContents] = ()) -> None:
        """
        Record that the program has ended.

        ``lost`` is the number of records lost at the end; ``tables`` are the final contents of its keyed tables.
        """
        self._recording.end(self._source, lost, tables)
