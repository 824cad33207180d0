"""Contents of trace files, as readers return them: records, in blocks or one by one, and notes of lost records."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dprobes.errors import FormatError
from dprobes.record.log_record import time_of
from dprobes.record.record_origin import Place, boot_id
from dprobes.trace.carried_names import CarriedNames
from dprobes.trace.trace_frames import RECORD_HEAD

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.keyed.table_layout import TableContents
    from dprobes.record.record_origin import RecordSource

__all__ = [
    "FrameJoints",
    "LostRecords",
    "PlaceEntry",
    "RecordBlock",
    "TraceOrigin",
    "TraceProgram",
    "TraceRecord",
    "TraceTables",
    "merged",
]


class PlaceEntry(NamedTuple):
    """The description of a probepoint in a trace file: the fields of ``Place`` after its module."""

    where: str
    function: str = ""
    placed: int | None = None
    at_return: bool = False
    is_paired: bool = False
    is_code: bool = True

    @classmethod
    def of(cls, place: Place) -> PlaceEntry:
        """Return the entry of a PLACES frame that describes a probepoint."""
        return cls(place.symbol, place.function, place.placed, place.at_return, place.is_paired, place.is_code)

    @property
    def routine(self) -> str:
        """The function of the probepoint, as in ``Place``."""
        return self.in_module("").routine

    def in_module(self, module: str) -> Place:
        """Return the probepoint that this entry describes, in the module of this name."""
        return Place(module, *self)


@dataclass(frozen=True, slots=True)
class TraceOrigin:
    """The origin of records: ``file`` is the file's name, ``part`` its number among a size-limited writer's files."""

    file: str = ""
    host: str = ""
    kernel: str = ""
    boot_id: str = ""
    part: int = 0


@dataclass(eq=False, slots=True)
class TraceProgram:
    """
    Description of a program in a trace file. Later frames may update it, and ``places`` grows as modules are found.

    The number of ``source`` is valid after one HEADER of one file, so programs are compared by identity. ``names`` has
    the names of all programs after the HEADER.
    """

    source: RecordSource
    details: dict[str, Any] = field(default_factory=dict)
    places: list[PlaceEntry] = field(default_factory=list)
    origin: TraceOrigin = TraceOrigin()
    names: CarriedNames = field(default_factory=CarriedNames)

    @property
    def name(self) -> str:
        """The name of the program."""
        return self.source.name

    @property
    def may_run(self) -> bool:
        """True if the program's records are from this boot of this machine, so that the processes may still run."""
        own = boot_id()
        return bool(own) and self.origin.boot_id == own

    def place(self, probe: int) -> PlaceEntry:
        """Return the place of a probepoint. A place without a description in the file is named by its number."""
        return self.places[probe] if probe < len(self.places) else PlaceEntry(f"probepoint {probe}", is_code=False)


@dataclass(frozen=True, slots=True)
class TraceTables:
    """The keyed tables of a program at ``time``, in nanoseconds since 1970."""

    program: TraceProgram
    time: int
    contents: tuple[TableContents, ...]


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """
    Encoded record with its origin.

    ``written`` is the time of writing, shortly after the hit, in CLOCK_MONOTONIC nanoseconds. ``wall_offset`` converts
    this time and the record's own time into nanoseconds since 1970.
    """

    program: TraceProgram
    probe: int
    record: bytes
    wall_offset: int
    written: int

    @property
    def wall_time(self) -> int:
        """Time of the record in nanoseconds since 1970, or its time of writing if the record has no time."""
        time = time_of(self.record)
        return (self.written if time is None else time) + self.wall_offset


@dataclass(frozen=True, slots=True)
class LostRecords:
    """
    A number of records of a program that were lost at this place of the file.

    ``wall_time`` is the time of the note about them, in nanoseconds since 1970.
    """

    program: TraceProgram
    count: int
    wall_time: int


@dataclass(frozen=True, slots=True)
class Damage:
    """Skipped bytes of a file, ``size`` of them from ``offset`` on, and a description of the damage."""

    file: str
    offset: int
    size: int
    problem: str


@dataclass(frozen=True, slots=True)
class FrameJoints:
    """The boundaries of joined frames: the start of each frame's records, its time of writing, and its position."""

    starts: Sequence[int]
    written: Sequence[int]
    positions: Sequence[int]

    def frame_at(self, at: int) -> int:
        """Return the index of the frame that contains the record whose head is at byte ``at`` of the joined frames."""
        return bisect_right(self.starts, at) - 1


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """
    Records of one program as encoded in the file: ``body`` from ``start`` on.

    Iteration yields them one by one; ``record_columns`` processes them together. ``written`` and ``position`` belong to
    the frame. If ``joints`` lists the boundaries of several frames, they belong to the first one.
    """

    program: TraceProgram
    body: bytes
    start: int
    wall_offset: int
    written: int
    position: int
    joints: FrameJoints | None = None

    def __iter__(self) -> Iterator[TraceRecord]:
        body, at = self.body, self.start
        while at < len(body):
            probe, begin, end = self.bounds(at)
            yield TraceRecord(self.program, probe, body[begin:end], self.wall_offset, self.written_at(at))
            at = end

    @property
    def last_written(self) -> int:
        """The time of writing of the last record."""
        return self.written if self.joints is None else self.joints.written[-1]

    def written_at(self, at: int) -> int:
        """Return the time of writing of the record whose head is at ``at``."""
        return self.written if self.joints is None else self.joints.written[self.joints.frame_at(at)]

    def position_at(self, at: int) -> int:
        """Return the file offset of the frame of the record whose head is at ``at``."""
        return self.position if self.joints is None else self.joints.positions[self.joints.frame_at(at)]

    def bounds(self, at: int) -> tuple[int, int, int]:
        """
        Return the probepoint of the record whose head is at ``at``, and the record's start and end.

        Raise ``FormatError`` if the frame ends in the record.
        """
        begin = at + RECORD_HEAD.size
        if begin > len(self.body):
            raise FormatError(
                f"a frame of '{self.program.origin.file}' ends in the head of a record", offset=self.position
            )
        probe, size = RECORD_HEAD.unpack_from(self.body, at)
        if begin + size > len(self.body):
            raise FormatError(f"a frame of '{self.program.origin.file}' ends in a record", offset=self.position)
        return probe, begin, begin + size


# Traces of several files or hosts, merged in the order of time.

_DELAY = 1_000_000_000
"""Maximum nanoseconds between hit and writing for which a merge restores the order of time."""


def merged(traces: Iterable[Iterable[TraceRecord | LostRecords]]) -> Iterator[TraceRecord | LostRecords]:
    """Iterate over the records of traces in the order of wall-clock time. The order of equal times is stable."""
    ordered = [_in_order(trace) for trace in traces]
    return (found for _, found in heapq.merge(*ordered, key=lambda each: each[0]))


def _in_order(trace: Iterable[TraceRecord | LostRecords]) -> Iterator[tuple[int, TraceRecord | LostRecords]]:
    """
    Iterate over the records of a trace in the order of time, sorted within a window of ``_DELAY``.

    Several engines and programs that write to one file do not keep the order of time.
    """
    waiting: list[tuple[int, int, TraceRecord | LostRecords]] = []
    for number, found in zip(itertools.count(), trace, strict=False):
        time = found.wall_time
        heapq.heappush(waiting, (time, number, found))
        written = time if isinstance(found, LostRecords) else found.written + found.wall_offset
        while waiting and waiting[0][0] < written - _DELAY:
            first, _, earliest = heapq.heappop(waiting)
            yield first, earliest
    while waiting:
        first, _, earliest = heapq.heappop(waiting)
        yield first, earliest
