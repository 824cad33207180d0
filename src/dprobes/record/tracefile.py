"""
Trace files: records with what is needed to show them elsewhere, appended frame by frame (``traceframes``).

A writer with a size limit begins a new file when half of it is full, and keeps the one before as ``NAME.1``.
"""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dprobes.errors import FormatError, SinkError, reason_of
from dprobes.record.clock import WallClock
from dprobes.record.traceframes import (
    FRAME,
    VERSION,
    FrameKind,
    check_body,
    json_frame,
    records_frame,
    split_head,
    split_json,
    split_records,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["LostRecords", "TraceFileWriter", "TraceProgram", "TraceReader", "TraceRecord", "older_part"]

_PIECE = 1 << 20

Place = tuple[str, str, int | None]
"""Where a probepoint is for people, the function that its pattern matched or "", and the offset it was moved to."""


@dataclass(slots=True)
class TraceProgram:
    """Hold what a trace file says of a program; ``places`` grows as modules are found."""

    id: int
    name: str
    major: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)

    def place(self, probe: int) -> Place:
        """Return the place of a probepoint; one that the file says nothing of is named by its number."""
        return self.places[probe] if probe < len(self.places) else (f"probepoint {probe}", "", None)


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """Join an encoded record with its origin; ``wall_offset`` turns its time into nanoseconds since 1970."""

    program: TraceProgram
    probe: int
    record: bytes
    wall_offset: int


@dataclass(frozen=True, slots=True)
class LostRecords:
    """Say that records of a program were lost at this place of the file."""

    program: TraceProgram
    count: int


def older_part(path: Path) -> Path:
    """Return the path of what a limited writer keeps of the time before."""
    return path.with_name(path.name + ".1")


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


class TraceFileWriter:
    """
    Append to a trace file, mode 0600; ``limit`` is in bytes.

    A failure is kept in ``problem`` until writing succeeds again; records that could not be written are noted as lost
    as soon as there is room. Not thread-safe.
    """

    def __init__(self, path: Path, limit: int | None = None) -> None:
        self.path = path
        self.problem: str | None = None
        self._limit = limit
        self._programs: dict[int, TraceProgram] = {}
        self._lost: dict[int, int] = {}
        self._next = 1
        self._clock = WallClock()
        try:
            self._file = self._open()
            self._size = os.fstat(self._file).st_size
            self._whole = self._size
            if self._size:
                self._mend()
            self._append(self._head())
        except OSError as error:
            raise SinkError(f"'{path}' cannot be written: {reason_of(error)}") from error

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _mend(self) -> None:
        """Cut off what a writer that was killed has left half written."""
        reader = TraceReader(self.path)
        with contextlib.suppress(FormatError):
            for _ in reader.read():
                pass
        reader.close()
        self._size = self._whole = reader.position
        os.ftruncate(self._file, self._size)

    def _head(self) -> bytes:
        return json_frame(
            FrameKind.HEADER,
            {
                "version": VERSION,
                "host": platform.node(),
                "boot_id": _boot_id(),
                "wall_offset": self._clock.offset,
            },
        )

    def add_program(self, name: str, major: int, details: dict[str, Any]) -> int:
        """Announce a program; return its number in this file."""
        number = self._next
        self._next += 1
        program = self._programs[number] = TraceProgram(number, name, major, details)
        self._append(self._program_frame(program))
        return number

    def update_program(self, program: int, details: dict[str, Any]) -> None:
        """Say more of a program."""
        known = self._programs[program]
        if known.details != details:
            known.details = details
            self._append(self._program_frame(known))

    def add_places(self, program: int, places: Sequence[Place]) -> None:
        """Announce more probepoints of a program."""
        known = self._programs[program]
        first = len(known.places)
        known.places += places
        self._append(self._places_frame(known, first))

    def end_program(self, program: int) -> None:
        """Forget a program that has no more records."""
        del self._programs[program]
        self._lost.pop(program, None)

    def write(self, program: int, records: list[tuple[int, bytes]]) -> None:
        """Append records; if that fails, they are lost."""
        if not self.append(program, records):
            self._lost[program] = self._lost.get(program, 0) + len(records)

    def append(self, program: int, records: list[tuple[int, bytes]]) -> bool:
        """Append records, and return whether that was possible; if not, none of them is in the file."""
        if (lost := self._lost.pop(program, 0)) and not self._append(
            json_frame(FrameKind.LOST, {"id": program, "count": lost})
        ):
            self._lost[program] = lost
        if self._limit is not None and self._size > self._limit // 2:
            self._begin_another()
        before = self._clock.offset
        if (offset := self._clock.look()) != before:
            self._append(json_frame(FrameKind.CLOCK, {"wall_offset": offset}))
        return not self._lost.get(program) and self._append(records_frame(program, records))

    def lose(self, program: int, count: int) -> None:
        """Note that records are missing here."""
        self._lost[program] = self._lost.get(program, 0) + count

    def close(self) -> None:
        """Give up the file."""
        os.close(self._file)

    def _append(self, data: bytes) -> bool:
        """Write a frame whole or not at all."""
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            self.problem = f"'{self.path}': {reason_of(error)}"
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            return False
        self.problem = None
        self._size += len(data)
        return True

    def _begin_another(self) -> None:
        """Keep the file as the older part, and go on in a new one."""
        try:
            self.path.replace(older_part(self.path))
            file = self._open()
        except OSError as error:
            self.problem = f"'{self.path}': {reason_of(error)}"
            return
        os.close(self._file)
        self._file, self._size = file, 0
        self._append(self._head())
        for program in self._programs.values():
            self._append(self._program_frame(program))
            if program.places:
                self._append(self._places_frame(program, 0))

    def _program_frame(self, program: TraceProgram) -> bytes:
        content = {"id": program.id, "name": program.name, "major": program.major, "details": program.details}
        return json_frame(FrameKind.PROGRAM, content)

    def _places_frame(self, program: TraceProgram, first: int) -> bytes:
        content = {"id": program.id, "first": first, "places": program.places[first:]}
        return json_frame(FrameKind.PLACES, content)


class TraceReader:
    """
    Read a trace file, also one that is being written; ``position`` is behind the last whole frame.

    ``read`` gives what there is, and may be called again for what has come since.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self._programs: dict[int, TraceProgram] = {}
        self._wall_offset = 0
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise FormatError(f"'{path}': {reason_of(error)}") from error

    @property
    def was_replaced(self) -> bool:
        """Whether the path leads to another file now, as after a limited writer has begun another one."""
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except OSError:
            return True

    def close(self) -> None:
        """Give up the file."""
        self._file.close()

    def read(self) -> Iterator[TraceRecord | LostRecords]:
        """Iterate over the records that are there; raise ``FormatError`` at damage, which a torn tail is not."""
        self._file.seek(self.position)
        data = b""
        at = 0
        while True:
            while len(data) - at >= FRAME.size:
                size, kind, checksum = self._head(data, at)
                end = at + FRAME.size + size
                if len(data) < end:
                    break
                body = data[at + FRAME.size : end]
                check_body(kind, body, checksum, self.position)
                yield from self._frame(kind, body)
                self.position += end - at
                at = end
            more = self._file.read(_PIECE)
            if not more:
                return
            data = data[at:] + more
            at = 0

    def _head(self, data: bytes, at: int) -> tuple[int, int, int]:
        try:
            size, kind, checksum = split_head(data, at)
        except FormatError:
            raise FormatError(f"'{self.path}' is no trace file, or damaged", offset=self.position) from None
        if self.position == 0 and kind != FrameKind.HEADER:
            raise FormatError(f"'{self.path}' does not begin as a trace file", offset=0)
        return size, kind, checksum

    def _frame(self, kind: int, body: bytes) -> Iterator[TraceRecord | LostRecords]:
        try:
            match kind:
                case FrameKind.RECORDS:
                    number, records = split_records(body, self.position)
                    program = self._programs[number]
                    offset = self._wall_offset
                    for probe, record in records:
                        yield TraceRecord(program, probe, record, offset)
                case FrameKind.HEADER:
                    self._on_header(split_json(body, self.position))
                case FrameKind.CLOCK:
                    self._wall_offset = int(split_json(body, self.position)["wall_offset"])
                case FrameKind.PROGRAM:
                    said = split_json(body, self.position)
                    program = self._programs.setdefault(said["id"], TraceProgram(int(said["id"]), ""))
                    program.name, program.major = str(said["name"]), int(said["major"])
                    program.details = dict(said["details"])
                case FrameKind.PLACES:
                    said = split_json(body, self.position)
                    places = self._programs[said["id"]].places
                    del places[int(said["first"]) :]
                    places += [(str(where), str(function), placed) for where, function, placed in said["places"]]
                case FrameKind.LOST:
                    said = split_json(body, self.position)
                    yield LostRecords(self._programs[said["id"]], int(said["count"]))
                case _:
                    pass  # of a later version
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"a frame of '{self.path}' lacks what it must hold: {error!r}", offset=self.position
            ) from None

    def _on_header(self, said: dict[str, Any]) -> None:
        if int(said["version"]) > VERSION:
            raise FormatError(
                f"'{self.path}' has version {said['version']} of the trace format, expected {VERSION}",
                hint="read it with the dprobes that wrote it, or a later one",
            )
        self._wall_offset = int(said["wall_offset"])
        self._programs.clear()
