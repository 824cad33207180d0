"""Where the manager's records go: its trace file, and the log targets."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from dprobes.engines.places import place_of_probe
from dprobes.errors import ManagerError
from dprobes.manager.targets import LogTarget, TargetStatus
from dprobes.record.tracefile import TraceFileWriter
from dprobes.sinks.base import sink_opener

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dprobes.engines.resolve import Probepoint
    from dprobes.record.place import Place

__all__ = ["TRACE_LIMIT", "ProgramRecords", "Recording"]

TRACE_LIMIT = 256 << 20
"""Bytes that the trace file and its older part take together."""


class Recording:
    """Own the trace file and the log targets; all threads of programs write to it."""

    def __init__(self, trace: Path, limit: int = TRACE_LIMIT) -> None:
        self._lock = threading.Lock()
        self._writer = TraceFileWriter(trace, limit)
        self._targets: dict[tuple[str, str | None], LogTarget] = {}

    @property
    def trace(self) -> Path:
        """The trace file."""
        return self._writer.path

    @property
    def problem(self) -> str | None:
        """What is wrong with the trace file at present."""
        return self._writer.problem

    def open_program(self, name: str, major: int, details: dict[str, Any]) -> ProgramRecords:
        """Announce a program, and return where its records go."""
        with self._lock:
            return ProgramRecords(self, name, self._writer.add_program(name, major, details))

    # Log targets

    def add_target(self, name: str, module: str | None, format_name: str) -> None:
        """Add a log target; one that is there already stays as it is."""
        opener = sink_opener(name)
        name = name if "/" in name else name.upper()
        with self._lock:
            if (name, module) in self._targets:
                return
        target = LogTarget(name, opener, module=module, format_name=format_name)
        with self._lock:
            self._targets[name, module] = target

    def remove_target(self, name: str, module: str | None) -> list[TargetStatus]:
        """Take log targets away, with no ``module`` all of that name; return how they fared."""
        name = name if "/" in name else name.upper()
        with self._lock:
            chosen = [key for key in self._targets if key[0] == name and module in (None, key[1])]
            if not chosen:
                known = ", ".join(sorted({key[0] for key in self._targets})) or "none"
                raise ManagerError(f"there is no log target '{name}'", hint=f"log targets are: {known}")
            taken = [self._targets.pop(key) for key in chosen]
        return [target.close() for target in taken]

    def forget_targets_of(self, module: str) -> None:
        """Take the log targets away that are for one program only."""
        with self._lock:
            taken = [self._targets.pop(key) for key in list(self._targets) if key[1] == module]
        for target in taken:
            target.close()

    def targets(self) -> list[TargetStatus]:
        """Return how the log targets fare."""
        with self._lock:
            return [target.status() for target in self._targets.values()]

    def close(self) -> None:
        """Write what waits, and give everything up."""
        with self._lock:
            targets, self._targets = list(self._targets.values()), {}
        for target in targets:
            target.close()
        with self._lock:
            self._writer.close()

    # Records

    def write(self, program: ProgramRecords, records: list[tuple[int, bytes]]) -> None:
        """Write records of a program to the trace file and the log targets."""
        with self._lock:
            self._writer.write(program.number, records)
            targets = list(self._targets.values())
        if targets:
            encoded, places = [record for _, record in records], [program.places[probe] for probe, _ in records]
            for target in targets:
                target.put(program.name, encoded, places)

    def announce(self, program: ProgramRecords, places: Sequence[Place]) -> None:
        """Announce more probepoints of a program."""
        with self._lock:
            self._writer.add_places(program.number, [(p.symbol, p.function, p.placed) for p in places])

    def end(self, program: ProgramRecords, lost: int) -> None:
        """Forget a program, ``lost`` of whose records never came."""
        with self._lock:
            if lost:
                self._writer.lose(program.number, lost)
                self._writer.write(program.number, [])
            self._writer.end_program(program.number)


class ProgramRecords:
    """Take the records of one program."""

    def __init__(self, recording: Recording, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.places: list[Place] = []
        self._recording = recording

    def write(self, probes: Sequence[Probepoint], records: list[tuple[int, bytes]]) -> None:
        """Write records; ``probes`` are those of the session, which may have grown."""
        if len(probes) > len(self.places):
            more = [place_of_probe(self.name, probe) for probe in probes[len(self.places) :]]
            self.places += more
            self._recording.announce(self, more)
        self._recording.write(self, records)

    def end(self, lost: int) -> None:
        """Say that no more records come."""
        self._recording.end(self, lost)
