"""Decoding of a trace file's bytes, in pieces of any size, into records, and readers that follow files."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from dprobes.errors import FormatError, reason_of
from dprobes.record.record_origin import RecordSource
from dprobes.trace.carried_names import CarriedNames
from dprobes.trace.packed_blocks import TableBlock, split_mixed, split_packed
from dprobes.trace.trace_content import (
    Damage,
    FrameJoints,
    LostRecords,
    PlaceEntry,
    RecordBlock,
    TraceOrigin,
    TraceProgram,
    TraceTables,
)
from dprobes.trace.trace_frames import (
    READABLE,
    RECORDS_HEAD,
    VERSION,
    Frame,
    FrameKind,
    FrameSplitter,
    number_in,
    split_json,
)
from dprobes.trace.trace_writer import older_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dprobes.record.record_table import RecordTable
    from dprobes.trace.packed_blocks import Block
    from dprobes.trace.trace_content import TraceRecord

__all__ = ["MissingPart", "TraceFollower", "TraceParser", "TraceReader"]

_ID_MAX = (1 << 32) - 1


class TraceParser:
    """
    Parser of the bytes of a trace file.

    The result does not depend on the sizes of the pieces. A frame's contents are yielded as soon as the frame is
    complete. ``name`` is the file's name in errors. A ``FormatError`` whose offset is ``position`` means that no valid
    frame begins there. After any other ``FormatError``, parsing must end.

    With the callback ``on_damage``, frames with invalid contents are skipped, and ``skip`` skips bytes that are not a
    frame. The descriptions of programs may then be incomplete.
    """

    def __init__(self, name: str, on_damage: Callable[[Damage], None] | None = None) -> None:
        self.name = name
        self._on_damage = on_damage
        self._was_damaged = False
        self._told_end = -1
        """The offset of the damage that was last reported as extending to the end of the file."""
        self.origin = TraceOrigin(name)
        self._frames = FrameSplitter()
        self._inner: FrameSplitter | None = None
        self._outer_position = 0
        self._programs: dict[int, TraceProgram] = {}
        self._names = CarriedNames()
        self._wall_offset = 0
        self.tables: list[TraceTables] = []
        """The latest keyed tables of each program that has any."""

    @property
    def position(self) -> int:
        """The file offset after the last whole frame that was parsed."""
        return self._frames.position

    def forget(self) -> None:
        """Drop the bytes after ``position``. The caller feeds them again."""
        self._frames.forget()

    def feed(self, data: bytes) -> Iterator[Block | LostRecords]:
        """
        Iterate over the contents that ``data`` completes; raise ``FormatError`` at damage.

        If iteration was stopped, the next call yields the rest.
        """
        self._frames.push(data)
        while True:
            try:
                found: Block | LostRecords | None = self._pull_small()
                if found is None:
                    if (frame := self._pull()) is None:
                        return
                    found = self._of_frame(frame)
            except FormatError as error:
                if error.offset is None or error.offset >= self.position or self._on_damage is None:
                    raise
                self._inner = None
                self._pass_over(error.offset, self.position - error.offset, error.message)
                continue
            if found is not None:
                yield found

    def push(self, data: bytes) -> None:
        """Append bytes for ``skip``, without decoding them."""
        self._frames.push(data)

    def skip(self, *, at_end: bool) -> bool:
        """
        Skip bytes up to the next frame, and return whether there is one in the bytes fed and pushed so far.

        ``at_end`` means that no more bytes follow.
        """
        offset = self.position
        size = self._frames.skip(at_end=at_end)
        if (size is not None or at_end) and offset != self._told_end:
            if size is not None:
                self._pass_over(offset, size, f"'{self.name}' is damaged")
            else:
                self._told_end = offset
                self._pass_over(offset, self._frames.rest, f"'{self.name}' is damaged up to its end")
        return size is not None

    def check_end(self) -> None:
        """Raise ``FormatError`` if intact frames follow the incomplete one at the current end of the file."""
        if self._frames.is_hiding:
            raise FormatError(f"'{self.name}' is damaged", offset=self.position)

    def _pass_over(self, offset: int, size: int, problem: str) -> None:
        self._was_damaged = True
        if self._on_damage is not None:
            self._on_damage(Damage(self.name, offset, size, problem))

    def _pull_small(self) -> RecordBlock | None:
        """Return the records of the next small RECORDS frames, or None if other frames follow."""
        inner = self._inner
        small = (self._frames if inner is None else inner).pull_small(self._programs)
        if small is None:
            return None
        positions = small.positions if inner is None else [self._outer_position] * len(small.positions)
        joints = FrameJoints(small.starts, small.written, positions) if len(positions) > 1 else None
        program, body = self._programs[small.program], bytes(small.body)
        return RecordBlock(program, body, 0, self._wall_offset, small.written[0], positions[0], joints)

    def _pull(self) -> Frame | None:
        if self._inner is not None and (frame := self._pull_inner(self._inner)) is not None:
            return frame
        self._inner = None
        try:
            frame = self._frames.pull()
        except FormatError:
            what = "is damaged" if self.position else "is not a trace file, or is damaged"
            raise FormatError(f"'{self.name}' {what}", offset=self.position) from None
        if frame is not None and frame.position == 0 and frame.kind != FrameKind.HEADER:
            raise FormatError(f"'{self.name}' does not begin as a trace file", offset=0)
        return frame

    def _pull_inner(self, inner: FrameSplitter) -> Frame | None:
        """
        Return the next frame in a COMPRESSED frame, None after the last.

        Errors have the position of the COMPRESSED frame.
        """
        outer = self._outer_position
        try:
            frame = inner.pull()
        except FormatError:
            raise FormatError(f"a compressed frame of '{self.name}' holds no frames", offset=outer) from None
        if frame is None and inner.rest:
            raise FormatError(f"a compressed frame of '{self.name}' holds a part of a frame", offset=outer)
        if frame is not None and frame.kind in (FrameKind.HEADER, FrameKind.COMPRESSED):
            raise FormatError(f"a compressed frame of '{self.name}' holds one that must not be in it", offset=outer)
        return frame and frame._replace(position=outer)

    def _of_frame(self, frame: Frame) -> Block | LostRecords | None:
        try:
            match frame.kind:
                case FrameKind.RECORDS:
                    return self._records(frame)
                case FrameKind.PACKED:
                    return self._table(frame, split_packed)
                case FrameKind.MIXED:
                    return self._table(frame, split_mixed)
                case FrameKind.HEADER:
                    self._on_header(split_json(frame, self.name))
                case FrameKind.CLOCK:
                    self._wall_offset = _wall_offset_in(split_json(frame, self.name))
                case FrameKind.PROGRAM:
                    self._on_program(split_json(frame, self.name))
                case FrameKind.PLACES:
                    self._on_places(split_json(frame, self.name))
                case FrameKind.NAMES:
                    self._names.add(split_json(frame, self.name))
                case FrameKind.TABLES:
                    self._on_tables(frame)
                case FrameKind.LOST:
                    return self._lost(split_json(frame, self.name))
                case FrameKind.COMPRESSED:
                    from dprobes.trace.trace_frames import decompressed

                    self._outer_position = frame.position
                    self._inner = FrameSplitter()
                    self._inner.push(decompressed(frame, self.name))
                case _:
                    pass  # a kind of frame from a later version
        except (TypeError, ValueError) as error:
            raise FormatError(
                f"a frame of '{self.name}' does not hold what it must: {error}", offset=frame.position
            ) from None
        return None

    def _records(self, frame: Frame) -> RecordBlock:
        if len(frame.body) < RECORDS_HEAD.size:
            raise ValueError("there is no program and time")
        number, written = RECORDS_HEAD.unpack_from(frame.body)
        return RecordBlock(
            self._program(number), frame.body, RECORDS_HEAD.size, self._wall_offset, written, frame.position
        )

    def _on_tables(self, frame: Frame) -> None:
        from dprobes.keyed.table_codec import decode_tables

        if len(frame.body) < RECORDS_HEAD.size:
            raise ValueError("there is no program and time")
        number, time = RECORDS_HEAD.unpack_from(frame.body)
        program = self._program(number)
        try:
            contents = decode_tables(frame.body[RECORDS_HEAD.size :])
        except FormatError as error:
            raise ValueError(error.message) from None
        self.tables = [each for each in self.tables if each.program is not program]
        self.tables.append(TraceTables(program, time + self._wall_offset, contents))

    def _table(self, frame: Frame, split: Callable[[bytes], tuple[int, int, RecordTable]]) -> TableBlock:
        number, written, records = split(frame.body)
        return TableBlock(self._program(number), records, self._wall_offset, written, frame.position)

    def _lost(self, said: dict[str, Any]) -> LostRecords:
        program = self._program(number_in(said, "id"))
        return LostRecords(program, number_in(said, "count"), number_in(said, "time") + self._wall_offset)

    def _program(self, number: int) -> TraceProgram:
        if (program := self._programs.get(number)) is None:
            if not self._was_damaged:
                raise ValueError(f"no program has the number {number}")
            name = f"program {number}"  # the frames that describe it were damaged
            program = self._programs[number] = self._new_program(RecordSource(number, name, name), {})
        return program

    def _new_program(self, source: RecordSource, details: dict[str, Any]) -> TraceProgram:
        return TraceProgram(source, details, origin=self.origin, names=self._names)

    def _on_header(self, said: dict[str, Any]) -> None:
        version = number_in(said, "version")
        if version not in READABLE:
            raise FormatError(
                f"'{self.name}' has version {version} of the trace format, expected {VERSION}",
                hint=f"read it with the dprobes that wrote it{', or a later one' if version > VERSION else ''}",
            )
        self._wall_offset = _wall_offset_in(said)
        self.origin = TraceOrigin(
            self.name,
            str(said.get("host", "")),
            str(said.get("kernel", "")),
            str(said.get("boot_id", "")),
            number_in(said, "part") if "part" in said else 0,
        )
        self._programs.clear()
        self._names = CarriedNames()

    def _on_program(self, said: dict[str, Any]) -> None:
        number = number_in(said, "id", high=_ID_MAX)
        name, details = said.get("name"), said.get("details")
        if not isinstance(name, str) or not isinstance(details, dict):
            raise TypeError("there is no name, or no details")
        source = RecordSource.from_details(number, name, number_in(said, "major", high=_ID_MAX), details)
        program = self._programs.get(number)
        if program is None or (self._was_damaged and program.name != name):  # a HEADER between them may be damaged
            self._programs[number] = self._new_program(source, details)
        else:
            program.source, program.details = source, details  # an updated description

    def _on_places(self, said: dict[str, Any]) -> None:
        places = self._program(number_in(said, "id")).places
        first, more = number_in(said, "first", high=len(places)), said.get("places")
        if not isinstance(more, list):
            raise TypeError("there are no places")
        places[first:] = [_place(entry) for entry in more]


def _wall_offset_in(said: dict[str, Any]) -> int:
    return number_in(said, "wall_offset", low=-(1 << 63))


def _place(entry: Any) -> PlaceEntry:
    match entry:
        case [str() as where, str() as function, int() | None as placed]:  # the format of older files
            return PlaceEntry(where, function, placed)
        case [str() as where, str() as function, int() | None as placed, bool() as at_return, bool() as is_paired]:
            return PlaceEntry(where, function, placed, at_return, is_paired)
        case [str(), str(), int() | None, bool(), bool(), bool()]:
            return PlaceEntry(*entry)
    raise TypeError("a place is not [where, function, placed, at_return, is_paired, is_code]")


# Readers of trace files, also of those that are being written.

_PIECE = 1 << 20


class TraceReader:
    """
    Reader of a trace file. ``position`` is the offset after the last whole frame that was read.

    ``read`` and ``blocks`` yield the available contents. Further calls yield what was written since the previous one.
    With the callback ``on_damage``, damage is skipped.
    """

    def __init__(self, path: Path, on_damage: Callable[[Damage], None] | None = None) -> None:
        self.path = path
        self._skips = on_damage is not None
        self._parser = TraceParser(str(path), on_damage)
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise FormatError(f"'{path}': {reason_of(error)}") from error
        self._is_seekable = self._file.seekable()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def position(self) -> int:
        """The file offset where reading continues."""
        return self._parser.position

    @property
    def origin(self) -> TraceOrigin:
        """The contents of the last HEADER that was read."""
        return self._parser.origin

    @property
    def tables(self) -> Sequence[TraceTables]:
        """The latest keyed tables of each program, as far as the file was read."""
        return self._parser.tables

    @property
    def was_replaced(self) -> bool:
        """True if the path leads to another file now, or to none, as after a size-limited writer began a new file."""
        try:
            return not os.path.samestat(self.status, self.path.stat())
        except OSError:
            return True

    @property
    def part(self) -> int:
        """Part number in the file's first HEADER, or 0 if that is unreadable. The file must be seekable."""
        frames = FrameSplitter()
        with contextlib.suppress(OSError, FormatError, ValueError):
            frames.push(os.pread(self._file.fileno(), _PIECE, 0))
            if (frame := frames.pull()) is not None and frame.kind == FrameKind.HEADER:
                return number_in(split_json(frame, str(self.path)), "part")
        return 0

    @property
    def status(self) -> os.stat_result:
        """The file status, from the open file: it may have been renamed."""
        return os.fstat(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self) -> Iterator[TraceRecord | LostRecords]:
        """Iterate over the available records; raise ``FormatError`` at damage, but not at an incomplete last frame."""
        for found in self.blocks():
            if isinstance(found, LostRecords):
                yield found
            else:
                yield from found

    def blocks(self) -> Iterator[Block | LostRecords]:
        """Iterate over the contents that ``read`` yields, but in blocks of records."""
        failed_at = -1
        while True:
            self._go_back()
            try:
                yield from self._parser.feed(b"")
                while data := self._next():
                    yield from self._parser.feed(data)
                self._parser.check_end()
            except FormatError as error:
                if error.offset != self.position:
                    raise
                # Invalid bytes may be replaced by a frame: a writer whose disk is full removes what it has written, and
                # writes again.
                if failed_at != self.position and self._is_seekable:
                    failed_at = self.position
                    continue
                if not self._skips:
                    raise
                if self._skip():
                    continue
            return

    def _skip(self) -> bool:
        """Skip a damaged part of the file, and return whether an intact frame follows."""
        while not self._parser.skip(at_end=False):
            if data := self._next():
                self._parser.push(data)
                continue
            return self._parser.skip(at_end=True)
        return True

    def _go_back(self) -> None:
        """Seek to the end of the last whole frame: the bytes after it may have been truncated and rewritten."""
        if self._is_seekable:
            self._parser.forget()
            self._file.seek(self.position)

    def _next(self) -> bytes:
        try:
            return self._file.read(_PIECE) or b""
        except OSError as error:
            raise FormatError(f"'{self.path}': {reason_of(error)}") from error


# A reader of a trace through all its files: the older part, the file, and the files that a size-limited writer begins
# in its place.


@dataclass(frozen=True, slots=True)
class MissingPart:
    """A message about a part of a trace that could not be read."""

    message: str


class TraceFollower:
    """
    Reader of a trace from its beginning, and then of the contents that are appended to it.

    Without ``with_older``, an existing older part is not read. A slow reader reads both files that a size-limited
    writer keeps, whenever these change. Records are missed only if the writer has filled two files in the meantime.
    With the callback ``on_damage``, damage is skipped.
    """

    def __init__(
        self, path: Path, *, with_older: bool = True, on_damage: Callable[[Damage], None] | None = None
    ) -> None:
        self.path = path
        self._on_damage = on_damage
        self._with_older = with_older
        self._readers: list[TraceReader] = []
        self._tables: list[TraceTables] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers:
            reader.close()
        self._readers = []

    def tables(self) -> list[TraceTables]:
        """Return the latest keyed tables of each program, as far as the trace was read."""
        return [*self._tables, *(each for reader in self._readers for each in reader.tables)]

    def _give_up(self, reader: TraceReader) -> None:
        self._tables += reader.tables
        reader.close()

    def poll(self) -> Iterator[Block | LostRecords | MissingPart]:
        """
        Iterate over the contents that were not read yet; raise ``FormatError`` at damage.

        If iteration was stopped, the next call yields the rest.
        """
        if not self._readers:
            self._readers = self._open(after=None)
        while True:
            reader = self._readers[0]
            is_older = len(self._readers) > 1
            try:
                yield from reader.blocks()
            except FormatError as error:
                if not is_older:
                    raise
                # The user did not name the older file, and the newer one is readable.
                yield MissingPart(f"{error.message}; the rest of it is skipped")
            if is_older:
                self._give_up(self._readers.pop(0))
                continue
            if not reader.was_replaced or not self.path.exists():
                return
            # The replaced file is complete, so this reads the rest.
            yield from reader.blocks()
            following = self._open(after=reader)
            part, last = following[0].part, reader.origin.part
            if part and part != last + 1:
                yield MissingPart(f"'{self.path}' was replaced faster than it was read: records are missing here")
            self._give_up(reader)
            self._readers = following

    def _open(self, after: TraceReader | None) -> list[TraceReader]:
        """Open the file and return its readers. The older part is the first reader, unless ``after`` was reading it."""
        while True:
            reader = TraceReader(self.path, self._on_damage)
            older = self._older() if self._with_older or after is not None else None
            if not reader.was_replaced:  # after a replacement the two files need not be adjacent parts
                if older is None:
                    return [reader]
                if after is None or not os.path.samestat(older.status, after.status):
                    return [older, reader]
                older.close()
                return [reader]
            reader.close()
            if older is not None:
                older.close()

    def _older(self) -> TraceReader | None:
        path = older_part(self.path)
        if not path.exists():
            return None
        try:
            return TraceReader(path, self._on_damage)
        except FormatError:
            if path.exists():
                raise
            return None
