"""From the bytes of a trace file, in pieces of any size, to its records. Knows no files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.errors import FormatError
from dprobes.record.origin import RecordSource
from dprobes.trace.content import (
    Damage,
    FrameJoints,
    LostRecords,
    PlaceEntry,
    RecordBlock,
    TraceOrigin,
    TraceProgram,
    TraceTables,
)
from dprobes.trace.frames import READABLE, RECORDS_HEAD, VERSION, Frame, FrameKind, FrameSplitter, number_in, split_json
from dprobes.trace.mixedblock import MixedBlock, split_mixed
from dprobes.trace.names import CarriedNames
from dprobes.trace.packedblock import PackedBlock, split_packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.trace.mixedblock import Block

__all__ = ["TraceParser"]

_ID_MAX = (1 << 32) - 1


class TraceParser:
    """
    Parse a trace file that is fed to it.

    However the bytes are cut, what comes out is the same, and comes as soon as its frame is whole. ``name`` is what
    errors call the file. An error at ``position`` says that there is no frame; after any other one parsing must end.

    With ``on_damage``, to which damage is told, frames that do not hold what they must are skipped, and ``skip``
    skips what is no frame. What is known of programs may be incomplete then.
    """

    def __init__(self, name: str, on_damage: Callable[[Damage], None] | None = None) -> None:
        self.name = name
        self._on_damage = on_damage
        self._was_damaged = False
        self._told_end = -1
        """Where damage begins that nothing sound followed when it was told."""
        self.origin = TraceOrigin(name)
        self._frames = FrameSplitter()
        self._inner: FrameSplitter | None = None
        self._outer_position = 0
        self._programs: dict[int, TraceProgram] = {}
        self._names = CarriedNames()
        self._wall_offset = 0
        self.tables: list[TraceTables] = []
        """The latest tables of each program that has any."""

    @property
    def position(self) -> int:
        """The place in the file behind the last whole frame that was looked at."""
        return self._frames.position

    def forget(self) -> None:
        """Drop the bytes behind ``position``, which will be fed again."""
        self._frames.forget()

    def feed(self, data: bytes) -> Iterator[Block | LostRecords]:
        """
        Iterate over what has become whole with ``data``; raise ``FormatError`` at damage.

        Whoever stops iterating gets the rest with the next call.
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
        """Add bytes for ``skip``."""
        self._frames.push(data)

    def skip(self, *, at_end: bool) -> bool:
        """
        Skip what is no frame, to the next one, and return whether there is one in what was fed and pushed.

        ``at_end`` says that no more comes.
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
        """Raise ``FormatError`` if what is not whole where the file ends at present hides sound frames."""
        if self._frames.is_hiding:
            raise FormatError(f"'{self.name}' is damaged", offset=self.position)

    def _pass_over(self, offset: int, size: int, problem: str) -> None:
        self._was_damaged = True
        if self._on_damage is not None:
            self._on_damage(Damage(self.name, offset, size, problem))

    def _pull_small(self) -> RecordBlock | None:
        """Return the records of the small frames that are next, None if there is none."""
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
        """Return the next one of compressed frames; errors are at the frame that holds them."""
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
                    return self._packed(frame)
                case FrameKind.MIXED:
                    number, written, records = split_mixed(frame.body)
                    return MixedBlock(self._program(number), records, self._wall_offset, written, frame.position)
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
                    from dprobes.trace.compression import decompressed

                    self._outer_position = frame.position
                    self._inner = FrameSplitter()
                    self._inner.push(decompressed(frame, self.name))
                case _:
                    pass  # of a later version
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
        from dprobes.keyed.codec import decode_tables

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

    def _packed(self, frame: Frame) -> PackedBlock:
        number, written, records = split_packed(frame.body)
        return PackedBlock(self._program(number), records, self._wall_offset, written, frame.position)

    def _lost(self, said: dict[str, Any]) -> LostRecords:
        program = self._program(number_in(said, "id"))
        return LostRecords(program, number_in(said, "count"), number_in(said, "time") + self._wall_offset)

    def _program(self, number: int) -> TraceProgram:
        if (program := self._programs.get(number)) is None:
            if not self._was_damaged:
                raise ValueError(f"no program has the number {number}")
            name = f"program {number}"  # what says more of it was damaged
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
            program.source, program.details = source, details  # there is more to be said of it

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
        case [str() as where, str() as function, int() | None as placed]:  # which older files have
            return PlaceEntry(where, function, placed)
        case [str() as where, str() as function, int() | None as placed, bool() as at_return, bool() as is_paired]:
            return PlaceEntry(where, function, placed, at_return, is_paired)
        case [str(), str(), int() | None, bool(), bool(), bool()]:
            return PlaceEntry(*entry)
    raise TypeError("a place is not [where, function, placed, at_return, is_paired, is_code]")
