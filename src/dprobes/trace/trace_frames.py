r"""
Layout of the frames of a trace file (``.dpt``); ``docs/reference/trace-file.md`` explains it.

A file is a sequence of frames, and begins with a HEADER. All numbers are little-endian::

    u32 size of the body | u8 kind | 3 bytes "dpt" | u32 CRC-32 of the 8 bytes before and the body | body

    kind           body
    1  HEADER      JSON: version of the format, host, kernel, boot id, offset of CLOCK_MONOTONIC to nanoseconds
                   since 1970, and the file's part number in its trace
    2  PROGRAM     JSON: description of a program whose records follow; "id" is its number after this HEADER
    3  PLACES      JSON: probepoints of a program from the number "first" on, as a list of descriptions
    4  RECORDS     u32 program id | u64 time of writing | then for each record: u32 probepoint | u32 size | the record
                   (``record.log_record``)
    5  LOST        JSON: count of records of a program that were lost before this place
    6  CLOCK       JSON: as in HEADER, after the wall clock was set
    7  COMPRESSED  u32 size of the content | a zstd frame; its content is whole frames, none of kind 1 or 7
    8  NAMES       JSON: names for addresses in the records that follow (``carried_names``)
    9  TABLES      u32 program id | u64 time | the keyed tables of the program at that time (``keyed.table_codec``)
   16  PACKED      records of a program, of one shape (``packed_blocks``)
   17  MIXED       records of a program, of several shapes (``packed_blocks``)

Times are CLOCK_MONOTONIC in nanoseconds. A file that was cut off anywhere can be read up to its last whole frame.
"""

from __future__ import annotations

import contextlib
import enum
import json
import struct
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dprobes.errors import FormatError, SinkError

if TYPE_CHECKING:
    import types
    from collections.abc import Container, Sequence

__all__ = [
    "BODY_MAX",
    "FRAME_HEAD",
    "JSON_MAX",
    "READABLE",
    "RECORDS_HEAD",
    "RECORD_HEAD",
    "VERSION",
    "Frame",
    "FrameKind",
    "FrameSplitter",
    "compressor",
    "decompressed",
    "frame",
    "is_trace",
    "json_frame",
    "number_in",
    "records_frame",
    "split_json",
    "torn_head",
]

VERSION = 4
READABLE = (2, 3, VERSION)
"""The versions that can be read: files of version 2 have no PACKED frames, files of version 3 no MIXED ones."""

FRAME_HEAD = struct.Struct("<IB3sI")
_MARK = b"dpt"
_MARK_AT = 5
_CHECKED = 8
"""Number of bytes of the head that the check sum covers."""
RECORDS_HEAD = struct.Struct("<IQ")
RECORD_HEAD = struct.Struct("<II")

_RECORDS_FRAME = struct.Struct("<IB3sIIQ")
"""The head of a RECORDS frame together with the head of its body."""
_SMALL_MAX = 1 << 14
"""Size in bytes of the longest frame that is joined with others."""
_JOINED_MAX = 1 << 16
"""Size in bytes of joined records after which no more are added."""

BODY_MAX = 64 << 20
"""Maximum size in bytes of a body, and of the content of a compressed one. A larger size means damage."""
_SEARCH_MAX = 2 << 30
"""Maximum number of bytes, in total, whose check sums are computed to find intact frames after damage."""
JSON_MAX = 16 << 20
"""Maximum size in bytes of a JSON body: the decoded objects take many times as much memory."""


class FrameKind(enum.IntEnum):
    """Kinds of frames. The numbers are part of the file format."""

    HEADER = 1
    PROGRAM = 2
    PLACES = 3
    RECORDS = 4
    LOST = 5
    CLOCK = 6
    COMPRESSED = 7
    NAMES = 8
    TABLES = 9
    PACKED = 16
    MIXED = 17


class Frame(NamedTuple):
    """Frame. ``kind`` may be a kind of a later version; ``position`` is the file offset of the first byte."""

    kind: int
    body: bytes
    position: int


# Writing


def frame(kind: int, body: bytes) -> bytes:
    """Return an encoded frame of a trace file: its head with kind, size and checksum, then ``body``."""
    return FRAME_HEAD.pack(len(body), kind, _MARK, _checksum(len(body), kind, body)) + body


def _checksum(size: int, kind: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(FRAME_HEAD.pack(size, kind, _MARK, 0)[:_CHECKED]))


def json_frame(kind: int, content: dict[str, Any]) -> bytes:
    """Return an encoded frame of this kind whose body is ``content`` as JSON."""
    return frame(kind, json.dumps(content, separators=(",", ":")).encode())


def records_frame(program: int, written: int, records: Sequence[tuple[int, bytes]]) -> bytes:
    """
    Return the RECORDS frame with pairs of probepoint number and encoded record.

    ``program`` is the program's number in the file. ``written`` is the time of writing, CLOCK_MONOTONIC in nanoseconds.
    """
    parts = [RECORDS_HEAD.pack(program, written)]
    for probe, record in records:
        parts += (RECORD_HEAD.pack(probe, len(record)), record)
    return frame(FrameKind.RECORDS, b"".join(parts))


# Reading


def is_trace(begin: bytes) -> bool:
    """Return whether a file begins with the mark of a trace file's frame, which may be damaged or incomplete."""
    _, _, mark, _ = FRAME_HEAD.unpack_from(begin.ljust(FRAME_HEAD.size, b"\0"))
    return bool(mark == _MARK)


@dataclass(slots=True)
class SmallFrames:
    """
    The joined records of consecutive RECORDS frames of a program.

    The lists have the start of each frame's records, its time of writing, and its position.
    """

    program: int
    body: bytearray = field(default_factory=bytearray)
    starts: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


@lru_cache(1024)
def _checksum_of_head(size: int, kind: int) -> int:
    return _checksum(size, kind, b"")


def _is_filled(data: bytearray, at: int, end: int) -> bool:
    """Return whether the records from byte ``at`` on end exactly at ``end``, the end of their frame."""
    while at + RECORD_HEAD.size <= end:
        at += RECORD_HEAD.size + RECORD_HEAD.unpack_from(data, at)[1]
    return at == end


class FrameSplitter:
    """
    A splitter of a stream of bytes, which arrives in pieces of any size, into frames.

    ``position`` is the offset in the stream after the last frame that was pulled.
    """

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self._bytes = bytearray()
        self._at = 0
        self._searched = 0
        """The offset in the buffer up to which ``skip`` has found no frame."""
        self._search_left = _SEARCH_MAX

    @property
    def rest(self) -> int:
        """Number of bytes after ``position``: frames that can be pulled, and an incomplete one."""
        return len(self._bytes) - self._at

    def push(self, data: bytes) -> None:
        """Append the next bytes of the stream, from which ``pull`` takes frames."""
        del self._bytes[: self._at]
        self._searched = max(self._searched - self._at, 0)
        self._at = 0
        self._bytes += data

    def forget(self) -> None:
        """Drop all bytes after ``position``. The caller pushes them again."""
        self._bytes.clear()
        self._at = self._searched = 0

    def pull(self) -> Frame | None:
        """Return the next frame, or None if it is incomplete; raise ``FormatError`` at damage."""
        body_at = self._at + FRAME_HEAD.size
        if len(self._bytes) < body_at:
            return None
        size, kind, mark, checksum = FRAME_HEAD.unpack_from(self._bytes, self._at)
        position = self.position
        if mark != _MARK or size > BODY_MAX:
            raise FormatError("this is not a frame of a trace file", offset=position)
        if len(self._bytes) < body_at + size:
            return None
        with memoryview(self._bytes) as view, view[body_at : body_at + size] as part:
            body = bytes(part)
        if _checksum(size, kind, body) != checksum:
            raise FormatError("a frame of a trace file is damaged: its check sum is wrong", offset=position)
        self._at = body_at + size
        self.position += FRAME_HEAD.size + size
        return Frame(kind, body, position)

    def pull_small(self, programs: Container[int]) -> SmallFrames | None:
        """
        Return the next complete small RECORDS frames of one of ``programs``, or None if there are none.

        A ``Frame`` object for each of them would take more time than its contents. Frames with any irregularity are
        left to ``pull``.
        """
        data, at, position = self._bytes, self._at, self.position
        found: SmallFrames | None = None
        least = FRAME_HEAD.size + RECORDS_HEAD.size
        with memoryview(data) as view:
            while at + least <= len(data):
                size, kind, mark, checksum, number, written = _RECORDS_FRAME.unpack_from(data, at)
                begin, end = at + least, at + FRAME_HEAD.size + size
                if kind != FrameKind.RECORDS or mark != _MARK or not begin - at <= end - at <= _SMALL_MAX:
                    break
                if end > len(data) or not (number in programs if found is None else number == found.program):
                    break
                body = view[at + FRAME_HEAD.size : end]
                is_sound = zlib.crc32(body, _checksum_of_head(size, kind)) == checksum
                body.release()
                if not is_sound or not _is_filled(data, begin, end):
                    break
                if found is None:
                    found = SmallFrames(number)
                found.starts.append(len(found.body))
                found.written.append(written)
                found.positions.append(position + at - self._at)
                found.body += data[begin:end]
                at = end
                if len(found.body) > _JOINED_MAX:
                    break
        self.position += at - self._at
        self._at = at
        return found

    @property
    def is_hiding(self) -> bool:
        """True if an intact frame follows the bytes at ``position``: these are damage, not an incomplete last frame."""
        return self.rest > 0 and self._next_sound(at_end=True) is not None

    def skip(self, *, at_end: bool) -> int | None:
        """
        Skip damaged bytes up to the next intact frame, and return their number.

        Return None if there is no such frame. The whole stream is searched if ``at_end``, otherwise the bytes pushed so
        far.
        """
        at = self._next_sound(at_end=at_end)
        if at is None:
            return None
        count = at - self._at
        self._at = at
        self.position += count
        return count

    def _next_sound(self, *, at_end: bool) -> int | None:
        """
        Return the offset in the buffer of the next intact frame, or None if there is none.

        Try the end of the damaged frame according to its head first: its records may contain frames of other files.
        """
        head = self._bytes[self._at : self._at + FRAME_HEAD.size].ljust(FRAME_HEAD.size)
        size, _, mark, _ = FRAME_HEAD.unpack(head)
        if mark == _MARK and size <= BODY_MAX:
            end = self._at + FRAME_HEAD.size + size
            is_sound = self._is_sound(end)
            if is_sound or (is_sound is None and not at_end):
                return end if is_sound else None
        at = max(self._at + 1, self._searched)
        while (mark_at := self._bytes.find(_MARK, at + _MARK_AT)) >= 0:
            at = mark_at - _MARK_AT
            is_sound = self._is_sound(at)
            if is_sound:
                return at
            if is_sound is None and not at_end:
                break  # more bytes may complete it
            at += 1
        self._searched = 0 if at_end else at
        return None

    def _is_sound(self, at: int) -> bool | None:
        """Return whether an intact frame begins at ``at`` in the buffer, or None if it is incomplete."""
        body_at = at + FRAME_HEAD.size
        if len(self._bytes) < body_at:
            return None
        size, kind, mark, checksum = FRAME_HEAD.unpack_from(self._bytes, at)
        if mark != _MARK or size > min(BODY_MAX, self._search_left):
            return False
        if len(self._bytes) < body_at + size:
            return None
        self._search_left -= size
        with memoryview(self._bytes) as view, view[body_at : body_at + size] as body:
            return bool(_checksum(size, kind, body) == checksum)


def torn_head(data: bytes, size: int) -> int | None:
    """
    Return the kind of the frame that begins in the last ``size`` bytes of a file and is incomplete.

    Return None if no frame begins there.
    """
    if len(data) < FRAME_HEAD.size:
        return None
    body, kind, mark, _ = FRAME_HEAD.unpack_from(data)
    return kind if mark == _MARK and size <= FRAME_HEAD.size + body <= FRAME_HEAD.size + BODY_MAX else None


def split_json(frame: Frame, name: str) -> dict[str, Any]:
    """Return the content of a JSON frame of the file ``name``; raise ``FormatError`` if it is invalid or too large."""
    if len(frame.body) > JSON_MAX:
        raise FormatError(
            f"a frame of '{name}' holds {len(frame.body)} bytes of JSON, at most {JSON_MAX} are allowed",
            offset=frame.position,
        )
    try:
        content = json.loads(frame.body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise FormatError(f"a frame of '{name}' does not hold a JSON object", offset=frame.position)
    return content


def number_in(content: dict[str, Any], key: str, *, low: int = 0, high: int = (1 << 63) - 1) -> int:
    """Return an integer of a JSON object; raise ``ValueError`` if it is missing or outside the limits."""
    value = content.get(key)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"'{key}' is not a number between {low} and {high}")
    return value


# Compressed frames of trace files, by the package zstandard. Sizes are checked before memory is allocated.

_SIZE = struct.Struct("<I")
_LEVEL = 3
_HINT = "pip install 'dprobes[zstd]'"


class Compressor(Protocol):
    """A function that compresses consecutive encoded frames into one."""

    def __call__(self, frames: bytes) -> bytes:
        """Return a COMPRESSED frame that contains ``frames``."""


def compressor(method: str) -> Compressor:
    """Return the compressor named ``method``, which must be "zstd"; raise ``SinkError`` if it is not available."""
    if method != "zstd":
        raise SinkError(f"there is no compression '{method}'", hint="write zstd")
    try:
        import zstandard
    except ImportError:
        raise SinkError("compressed trace files need the Python package zstandard", hint=_HINT) from None
    compress = zstandard.ZstdCompressor(level=_LEVEL).compress
    return lambda frames: frame(FrameKind.COMPRESSED, _SIZE.pack(len(frames)) + compress(frames))


def decompressed(outer: Frame, name: str) -> bytes:
    """Return the frames in a COMPRESSED frame of the file ``name``; raise ``FormatError`` if that is impossible."""
    zstandard = _zstandard(name)
    if len(outer.body) < _SIZE.size:
        raise FormatError(f"a compressed frame of '{name}' does not say its size", offset=outer.position)
    (size,) = _SIZE.unpack_from(outer.body)
    if size > BODY_MAX:
        raise FormatError(
            f"a compressed frame of '{name}' is said to hold {size} bytes, at most {BODY_MAX} are allowed",
            offset=outer.position,
        )
    packed = outer.body[_SIZE.size :]
    content: bytes | None = None
    with contextlib.suppress(zstandard.ZstdError):
        # The library allocates memory according to the size that the compressed data announces.
        if zstandard.get_frame_parameters(packed).content_size == size:
            content = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    if content is None or len(content) != size:
        raise FormatError(f"a compressed frame of '{name}' has other contents than it declares", offset=outer.position)
    return content


def _zstandard(name: str) -> types.ModuleType:
    try:
        import zstandard
    except ImportError:
        raise FormatError(
            f"'{name}' is compressed: reading it needs the Python package zstandard", hint=_HINT
        ) from None
    return zstandard
