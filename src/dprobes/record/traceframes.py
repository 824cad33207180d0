r"""
The frames of a trace file (``.dpt``): the one place where their layout is written.

A file is a sequence of frames, and begins with a HEADER. All numbers are little-endian::

    u32 size of the body | u8 kind | 3 bytes "dpt" | u32 CRC-32 of the 8 bytes before and the body | body

    kind         body
    1  HEADER    JSON: version of the format, host, boot id, and what CLOCK_MONOTONIC lacks to be nanoseconds since 1970
    2  PROGRAM   JSON: what is known of a program whose records follow; "id" is its number in this file
    3  PLACES    JSON: probepoints of a program from the number "first" on, as [where, function, placed]
    4  RECORDS   u32 program id, then for each record: u32 probepoint | u32 size | the record (``layout``)
    5  LOST      JSON: how many records of a program were lost before this place
    6  CLOCK     JSON: as in HEADER, after the wall clock was set

A file that was cut off anywhere can be read up to its last whole frame.
"""

from __future__ import annotations

import enum
import json
import struct
import zlib
from typing import Any

from dprobes.errors import FormatError

__all__ = [
    "BODY_MAX",
    "FRAME",
    "VERSION",
    "FrameKind",
    "check_body",
    "frame",
    "json_frame",
    "records_frame",
    "split_head",
    "split_json",
    "split_records",
]

VERSION = 1

FRAME = struct.Struct("<IB3sI")
_MARK = b"dpt"
_CHECKED = 8
"""Bytes of the head that the check sum is about."""
_PROGRAM = struct.Struct("<I")
_RECORD = struct.Struct("<II")

BODY_MAX = 64 << 20
"""Bytes of the longest body; a longer one is damage."""


class FrameKind(enum.IntEnum):
    """Tell frames apart."""

    HEADER = 1
    PROGRAM = 2
    PLACES = 3
    RECORDS = 4
    LOST = 5
    CLOCK = 6


def frame(kind: FrameKind, body: bytes) -> bytes:
    """Return a frame."""
    return FRAME.pack(len(body), kind, _MARK, _checksum(len(body), kind, body)) + body


def _checksum(size: int, kind: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(FRAME.pack(size, kind, _MARK, 0)[:_CHECKED]))


def json_frame(kind: FrameKind, content: dict[str, Any]) -> bytes:
    """Return a frame whose body is JSON."""
    return frame(kind, json.dumps(content, separators=(",", ":")).encode())


def records_frame(program: int, records: list[tuple[int, bytes]]) -> bytes:
    """Return a RECORDS frame."""
    parts = [_PROGRAM.pack(program)]
    for probe, record in records:
        parts += (_RECORD.pack(probe, len(record)), record)
    return frame(FrameKind.RECORDS, b"".join(parts))


def split_head(data: bytes, position: int = 0) -> tuple[int, int, int]:
    """Return size of the body, kind and check sum in a frame's head; raise ``FormatError`` if it is none."""
    size, kind, mark, checksum = FRAME.unpack_from(data, position)
    if mark != _MARK or size > BODY_MAX:
        raise FormatError("this is not a frame of a trace file", offset=position)
    return size, kind, checksum


def check_body(kind: int, body: bytes, checksum: int, position: int) -> None:
    """Raise ``FormatError`` if a frame is not what was written."""
    if _checksum(len(body), kind, body) != checksum:
        raise FormatError("a frame of a trace file is damaged: its check sum is wrong", offset=position)


def split_json(body: bytes, position: int) -> dict[str, Any]:
    """Return the content of a JSON body."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise FormatError("a frame of a trace file does not hold a JSON object", offset=position)
    return content


def split_records(body: bytes, position: int) -> tuple[int, list[tuple[int, bytes]]]:
    """Return the program and the records of a RECORDS body."""
    if len(body) < _PROGRAM.size:
        raise FormatError("a frame with records names no program", offset=position)
    (program,) = _PROGRAM.unpack_from(body)
    records = []
    at = _PROGRAM.size
    while at < len(body):
        if at + _RECORD.size > len(body):
            raise FormatError("a frame ends in the head of a record", offset=position + at)
        probe, size = _RECORD.unpack_from(body, at)
        at += _RECORD.size
        if at + size > len(body):
            raise FormatError("a frame ends in a record", offset=position + at)
        records.append((probe, body[at : at + size]))
        at += size
    return program, records
