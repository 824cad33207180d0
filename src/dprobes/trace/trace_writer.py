"""
Writing of trace files: frames (``trace_frames``) with records, and the descriptions needed to print them elsewhere.

A writer with a size limit begins a new file when the current one has reached half of the limit, and keeps the previous
one as ``NAME.1``.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dprobes.errors import SinkError
from dprobes.record.record_origin import WallClock, boot_id
from dprobes.record.record_table import RecordTable
from dprobes.trace.frame_file import FrameFile, older_part
from dprobes.trace.packed_blocks import joined, packed, size_of, table_frame
from dprobes.trace.trace_frames import (
    JSON_MAX,
    RECORD_HEAD,
    RECORDS_HEAD,
    VERSION,
    FrameKind,
    json_frame,
    records_frame,
)
from dprobes.trace.trace_frames import frame as binary_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dprobes.keyed.table_layout import TableContents
    from dprobes.trace.trace_content import PlaceEntry

__all__ = ["TraceFileWriter", "WrittenProgram", "older_part"]

# A program of a trace file that is being written: its description as far as the file has it, and frames with the rest.

_FRAME_PLACES = 10_000


@dataclass(slots=True)
class WrittenProgram:
    """
    Program and the extent of its description in the file.

    ``lost`` is the number of lost records that are not noted in the file yet. ``given`` is the number of these that
    ``lose`` has reported.
    """

    number: int
    name: str
    major: int
    details: dict[str, Any]
    places: list[PlaceEntry] = field(default_factory=list)
    is_announced: bool = False
    announced_places: int = 0
    lost: int = 0
    given: int = 0

    @property
    def is_noted(self) -> bool:
        """True if the file describes the program and all its lost records."""
        return self.is_announced and not self.lost

    def frame(self) -> bytes:
        """Return the PROGRAM frame; raise ``SinkError`` if the description is too large for a frame."""
        content = {"id": self.number, "name": self.name, "major": self.major, "details": self.details}
        frame = json_frame(FrameKind.PROGRAM, content)
        if len(frame) > JSON_MAX:
            raise SinkError(
                f"what is to be recorded of '{self.name}' takes {len(frame)} bytes, at most {JSON_MAX} are possible",
                hint="most of it are templates",
            )
        return frame

    def place_frames(self) -> Iterator[bytes]:
        """Iterate over the PLACES frames for the probepoints that the file does not describe yet."""
        for first in range(self.announced_places, len(self.places), _FRAME_PLACES):
            places = self.places[first : first + _FRAME_PLACES]
            self.announced_places = first + len(places)
            yield json_frame(FrameKind.PLACES, {"id": self.number, "first": first, "places": places})

    def lost_frame(self, now: int) -> bytes:
        """Return the LOST frame for the lost records; ``now`` is CLOCK_MONOTONIC in nanoseconds."""
        return json_frame(FrameKind.LOST, {"id": self.number, "count": self.lost, "time": now})

    def take_lost(self) -> tuple[int, int]:
        """Return the counters ``lost`` and ``given``, and set them to 0."""
        lost = self.lost, self.given
        self.lost = self.given = 0
        return lost

    def forget(self) -> None:
        """Mark the program as not described in the file, after a new file was begun."""
        self.is_announced, self.announced_places = False, 0


if TYPE_CHECKING:
    Names = Callable[[bool], dict[str, Any] | None]

_FRAME_BYTES = 1 << 20
"""Size in bytes of records beyond which they are written in several frames."""

_KEPT_BYTES = 256 << 10
_KEPT_NANOSECONDS = 1_000_000_000
"""Limits of the frames that are buffered to be compressed together: their bytes, and nanoseconds."""
_SMALL_BYTES = 512
"""Minimum total size in bytes of frames that are compressed."""
_COMPRESSED_BYTES = 4 << 20
"""Size in bytes of frames beyond which they are compressed in several groups."""


@dataclass(slots=True)
class _Batch:
    """
    Frames that are written together or not at all, and the state to revert if they cannot be written.

    ``since`` is the time of the first record (CLOCK_MONOTONIC, in nanoseconds), or 0 if there is none yet.
    """

    frames: list[bytes] = field(default_factory=list)
    size: int = 0
    since: int = 0
    records: Counter[int] = field(default_factory=Counter)
    given: Counter[int] = field(default_factory=Counter)
    announced: set[int] = field(default_factory=set)
    places: dict[int, int] = field(default_factory=dict)
    has_names: bool = False


class TraceFileWriter:
    """
    Writer that appends to a trace file, mode 0600; ``limit`` is in bytes.

    With ``compress``, records are buffered for up to a second, or until ``flush``, and compressed together. Otherwise
    they are buffered for up to ``hold`` nanoseconds, and joined into frames; the caller must then call ``flush``.

    Records that could not be written are noted as lost as soon as there is room. The writer is not thread-safe. Other
    processes cannot write to the file while it is open.
    """

    def __init__(
        self, path: Path, limit: int | None = None, *, compress: Literal["zstd"] | None = None, hold: int = 0
    ) -> None:
        self._limit = limit
        self._hold = hold
        self._compress = None
        if compress is not None:
            from dprobes.trace.trace_frames import compressor

            self._compress = compressor(compress)
        self._programs: dict[int, WrittenProgram] = {}
        self._ended: set[int] = set()
        """Ended programs that are kept until the file describes them and their lost records."""
        self._next = 1
        self._batch = _Batch()
        self._held: list[Sequence[tuple[int, bytes]]] = []
        self._held_of = self._held_bytes = 0
        """Buffered records that are not in frames yet, their program, and their approximate size in bytes."""
        self._has_head = False
        self._has_names = False
        self._clock = WallClock()
        self._offset: int | None = None
        """The wall-clock offset in nanoseconds that the file has, or None if it must be written again."""
        # A size-limited writer discards old records anyway, so it must be able to replace a file with any contents.
        self._file = FrameFile(path, can_replace=limit is not None)
        self.flush()

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._file.path

    @property
    def is_holding(self) -> bool:
        """True if records are buffered."""
        return bool(self._held or self._batch.frames)

    @property
    def problem(self) -> str | None:
        """The reason why the last attempt to write failed, or None if it succeeded."""
        return self._file.problem

    # Writing

    def add_program(self, name: str, major: int, details: dict[str, Any]) -> int:
        """
        Announce a program, which ``details`` describes (``RecordSource``); return its number in this file.

        Raise ``SinkError`` if the description is too large for a frame.
        """
        number = self._next
        program = WrittenProgram(number, name, major, details)
        program.frame()  # raises ``SinkError`` if it is too large
        self._next += 1
        self._programs[number] = program
        self._announce(number)
        self._flush_some()
        return number

    def update_program(self, program: int, details: dict[str, Any]) -> None:
        """Replace the description of the program with a number. It is written before the program's next records."""
        known = self._programs[program]
        if known.details != details:
            known.details = details
            known.is_announced = False
            self._announce(program)
            self._flush_some()

    def add_places(self, program: int, places: Sequence[PlaceEntry]) -> None:
        """Add descriptions of further probepoints of a program. They are written before the program's next records."""
        self._programs[program].places += places
        self._announce(program)
        self._flush_some()

    def end_program(self, program: int) -> bool:
        """Mark a program as ended, without further records. Return True if all buffered records could be written."""
        self._announce(program)
        self._ended.add(program)
        return self.flush()

    def write(
        self,
        program: int,
        records: Sequence[tuple[int, bytes]],
        names: Names | None = None,
    ) -> bool:
        """Append records as ``append`` does, and return True if that succeeded. Otherwise they are counted as lost."""
        is_written = self.append(program, records, names)
        if not is_written:
            self._programs[program].lost += len(records)
        return is_written

    def append(
        self,
        program: int,
        records: Sequence[tuple[int, bytes]],
        names: Names | None = None,
    ) -> bool:
        """
        Append records, and return True if that succeeded. Otherwise none of them is in the file.

        ``names`` returns the body of a NAMES frame for addresses in the records, or None. Its argument is True if the
        file has all names that were returned before.

        Records that are buffered for compression may still fail to be written later, and are then noted as lost.
        """
        if self._limit is not None and self._file.size + self._batch.size > self._limit // 2:
            self.flush()
            self._begin_another()
        for number in self._ended:
            self._announce(number)
        self._announce(program)
        self._tell(names)
        if self._hold:
            self._keep(program, records)
        else:
            self._add_all(program, records)
        if self._flush_some():
            return True
        self._programs[program].lost -= len(records)
        return False

    def _tell(self, names: Names | None) -> None:
        if names is not None and (said := names(self._has_names)) is not None:
            self._add(json_frame(FrameKind.NAMES, said))
            self._has_names = self._batch.has_names = True

    def append_tables(self, program: int, tables: Sequence[TableContents], names: Names | None = None) -> bool:
        """
        Append the current contents of a program's keyed tables; return True if that succeeded.

        ``names`` is as in ``append``, for the addresses in keys.
        """
        from dprobes.keyed.table_codec import encode_tables

        self._settle()
        self._announce(program)
        self._tell(names)
        head = RECORDS_HEAD.pack(program, time.monotonic_ns())
        self._add(binary_frame(FrameKind.TABLES, head + encode_tables(tables)))
        return self.flush()

    def lose(self, program: int, count: int) -> None:
        """Count ``count`` records as lost at this place of the file."""
        self._programs[program].lost += count
        self._programs[program].given += count

    def take_lost(self) -> dict[int, tuple[int, int]]:
        """
        Return, by program, the number of lost records without a note in the file, and reset it.

        The caller reports them. The second number counts the lost records that the caller has already reported by
        ``lose``.
        """
        return {number: program.take_lost() for number, program in self._programs.items()}

    def flush(self) -> bool:
        """Write buffered records, and return True if that succeeded. Otherwise they are lost."""
        self._settle()
        batch, self._batch = self._batch, _Batch()
        is_written = (self._has_head or self._begin_file()) and self._file.append(self._bytes_of(batch))
        if not is_written:
            self._undo(batch)
        for number in [each for each in self._ended if self._programs[each].is_noted]:
            self._ended.remove(number)
            del self._programs[number]
        return is_written

    def close(self) -> None:
        """Write buffered records, and close the file."""
        for number in self._programs:
            self._announce(number)
        self.flush()
        self._file.close()

    # Batches

    def _keep(self, program: int, records: Sequence[tuple[int, bytes]]) -> None:
        """Buffer records to be joined in frames with the following ones."""
        if not records:
            return
        if program != self._held_of:
            self._settle()
        self._batch.since = self._batch.since or time.monotonic_ns()
        self._held_of = program
        self._held.append(records)
        self._held_bytes += size_of(records)

    def _settle(self) -> None:
        """Encode the buffered records as frames, which are then compressed and written together."""
        held, self._held, self._held_bytes = self._held, [], 0
        for records in joined(held):
            self._add_all(self._held_of, records)

    def _add_all(self, program: int, records: Sequence[tuple[int, bytes]]) -> None:
        """Add records of a program as PACKED or MIXED frames if they can be packed, otherwise as RECORDS frames."""
        if isinstance(records, RecordTable):
            rows = max(1, len(records) * _FRAME_BYTES // max(size_of(records), 1))
            for first in range(0, len(records), rows):
                self._add_records(program, records[first : first + rows])
            return
        first = size = 0
        for end, (_, record) in enumerate(records, 1):
            size += RECORD_HEAD.size + len(record)
            if size > _FRAME_BYTES:
                self._add_records(program, packed(records[first:end]))
                first, size = end, 0
        if first < len(records):
            self._add_records(program, packed(records[first:]))

    def _add_records(self, program: int, records: Sequence[tuple[int, bytes]]) -> None:
        now = time.monotonic_ns()
        if isinstance(records, RecordTable):
            self._add(table_frame(program, now, records))
        else:
            self._add(records_frame(program, now, records))
        self._batch.records[program] += len(records)

    def _announce(self, number: int) -> None:
        """Append frames that readers need before records: a new clock offset, and the description of the program."""
        program, batch = self._programs[number], self._batch
        offset = self._clock.look()
        if self._has_head and offset != self._offset:
            self._offset = offset
            self._add(json_frame(FrameKind.CLOCK, {"wall_offset": offset}))
        if not program.is_announced:
            self._add(program.frame())
            program.is_announced = True
            batch.announced.add(number)
        first = program.announced_places
        for frame in program.place_frames():
            self._add(frame)
            batch.places.setdefault(number, first)
        if program.lost:
            self._add(program.lost_frame(time.monotonic_ns()))
            lost, given = program.take_lost()
            batch.records[number] += lost
            batch.given[number] += given

    def _add(self, frame: bytes) -> None:
        if self._held:
            self._settle()  # the buffered records come first
        batch = self._batch
        batch.since = batch.since or time.monotonic_ns()
        batch.frames.append(frame)
        batch.size += len(frame)

    def _flush_some(self) -> bool:
        """Write the batch, unless it waits for more frames or records. Return True if writing succeeded."""
        batch = self._batch
        if self._compress is not None:
            size, room, patience = batch.size, _KEPT_BYTES, _KEPT_NANOSECONDS
        else:
            size, room, patience = self._held_bytes, _FRAME_BYTES, self._hold
        if not patience or size > room or time.monotonic_ns() - batch.since > patience:
            return self.flush()
        return True

    def _bytes_of(self, batch: _Batch) -> bytes:
        if self._compress is None or batch.size < _SMALL_BYTES:
            return b"".join(batch.frames)
        groups: list[bytearray] = [bytearray()]
        for frame in batch.frames:
            if groups[-1] and len(groups[-1]) + len(frame) > _COMPRESSED_BYTES:
                groups.append(bytearray())
            groups[-1] += frame
        return b"".join(self._compress(bytes(group)) for group in groups)

    def _undo(self, batch: _Batch) -> None:
        """Revert the state for a batch that was not written. Its records are lost."""
        self._offset = None
        self._has_names = self._has_names and not batch.has_names
        for number, count in batch.records.items():
            self._programs[number].lost += count
            self._programs[number].given += batch.given[number]
        for number in batch.announced:
            self._programs[number].is_announced = False
        for number, first in batch.places.items():
            self._programs[number].announced_places = first

    # The file

    def _begin_file(self) -> bool:
        """
        Write the HEADER frame of a new file; return True if that succeeded.

        All programs have to be described again in this file.
        """
        offset = self._clock.look()
        head = json_frame(
            FrameKind.HEADER,
            {
                "version": VERSION,
                "host": platform.node(),
                "kernel": platform.release(),
                "boot_id": boot_id(),
                "wall_offset": offset,
                "part": self._file.part,
            },
        )
        if not self._file.append(head):
            return False
        self._has_head = True
        self._offset = offset
        return True

    def _begin_another(self) -> None:
        """Continue in a new file, which describes no programs yet."""
        if self._file.begin_another():
            self._has_head = self._has_names = False
            for program in self._programs.values():
                program.forget()
