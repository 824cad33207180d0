"""
The frame of a PPDF: its header, the table of sections, and their checksums.

All numbers are little-endian::

    offset  size
         0     8  magic  89 50 50 44 46 0d 0a 1a  (".PPDF" and line ends, as PNG has them: a text transfer shows)
         8     2  major version: a reader refuses a newer one
        10     2  minor version: a reader skips sections of a newer one that it does not know
        12     4  size of the file in bytes
        16     4  number of sections
        20     4  CRC-32 of the 20 bytes before and of the table
        24    16  for each section: name (4 ASCII letters), offset, size, CRC-32 of its bytes

The sections follow the table and each other without gaps, so that each byte of the file counts in one checksum.
"""

from __future__ import annotations

import struct
import zlib

from dprobes.errors import FormatError
from dprobes.lazynamedtuple import NamedTuple

__all__ = ["MAGIC", "MAJOR", "MINOR", "NEWER_HINT", "SECTION_MAX", "SIZE_MAX", "Section", "pack", "unpack"]

MAGIC = b"\x89PPDF\r\n\x1a"
MAJOR, MINOR = 1, 3

NEWER_HINT = "update dprobes here, or build the file with an older one"
"""What to do about a file that this version cannot read."""

SIZE_MAX = 64 << 20
SECTION_MAX = 64
"""How many bytes, and how many sections, a file has at most."""

_START = struct.Struct("<8sHHII")
_CHECKSUM = struct.Struct("<I")
_ROW = struct.Struct("<4sIII")
_TABLE = _START.size + _CHECKSUM.size


class Section(NamedTuple):
    """Hold the bytes of a section, and where in the file they are."""

    data: memoryview
    offset: int


def pack(sections: dict[str, bytes], minor: int = MINOR, major: int = MAJOR) -> bytes:
    """Return the file with these sections; raise ``FormatError`` if it is too large."""
    offset = _TABLE + _ROW.size * len(sections)
    size = offset + sum(len(data) for data in sections.values())
    if size > SIZE_MAX:
        raise FormatError(
            f"the compiled program has {size} bytes, and a PPDF at most {SIZE_MAX}",
            hint="make several programs of it, or build it for fewer modules",
        )
    table = b""
    for name, data in sections.items():
        table += _ROW.pack(name.encode("ascii"), offset, len(data), zlib.crc32(data))
        offset += len(data)
    start = _START.pack(MAGIC, major, minor, size, len(sections))
    return b"".join((start, _CHECKSUM.pack(zlib.crc32(start + table)), table, *sections.values()))


def unpack(data: bytes) -> tuple[int, dict[str, Section]]:
    """Return the minor version and the sections of a file; raise ``FormatError`` if its frame is not as it should."""
    count, minor, size = _start(data)
    end = _TABLE + _ROW.size * count
    if size < end:
        raise FormatError(f"expected a size of at least {end} bytes for {count} sections, found {size}", offset=12)
    if len(data) != size:
        what = "truncated" if len(data) < size else "longer than it says"
        raise FormatError(f"the file is {what}: expected {size} bytes, found {len(data)}", offset=min(size, len(data)))
    (expected,) = _CHECKSUM.unpack_from(data, _START.size)
    _check_sum(expected, zlib.crc32(data[: _START.size] + data[_TABLE:end]), "the header", _START.size)
    found: dict[str, Section] = {}
    view, begin = memoryview(data), end
    for place in range(_TABLE, end, _ROW.size):
        raw, offset, length, checksum = _ROW.unpack_from(data, place)
        name = raw.decode("latin-1")
        if not (name.isascii() and name.isalnum()):
            raise FormatError(f"expected four letters as the name of a section, found {raw!r}", offset=place)
        if name in found:
            raise FormatError(f"there are two sections {name}", offset=place)
        if offset != begin or length > size - offset:
            raise FormatError(
                f"expected section {name} at byte {begin} within {size} bytes, found {length} bytes at {offset}",
                offset=place,
            )
        _check_sum(checksum, zlib.crc32(view[offset : offset + length]), f"section {name}", offset)
        found[name] = Section(view[offset : offset + length], offset)
        begin = offset + length
    if begin != size:
        raise FormatError(
            f"expected the end of the file after the last section, found {size - begin} bytes", offset=begin
        )
    return minor, found


def _start(data: bytes) -> tuple[int, int, int]:
    """Return the number of sections, the minor version, and the size that the header gives."""
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise FormatError(f"this is not a PPDF: expected it to begin with {MAGIC.hex(' ')}", offset=0)
    if len(data) < _TABLE:
        raise FormatError(f"the file is truncated: expected a header of {_TABLE} bytes, found {len(data)}", offset=0)
    _, major, minor, size, count = _START.unpack_from(data)
    if major > MAJOR:
        raise FormatError(
            f"the file has version {major}.{minor}, and this dprobes reads versions up to {MAJOR}.x",
            offset=8,
            hint=NEWER_HINT,
        )
    if major < MAJOR:
        raise FormatError(f"expected version {MAJOR}.x, found {major}.{minor}", offset=8)
    if size > SIZE_MAX:
        raise FormatError(f"expected a size of at most {SIZE_MAX} bytes, found {size}", offset=12)
    if count > SECTION_MAX:
        raise FormatError(f"expected at most {SECTION_MAX} sections, found {count}", offset=16)
    return count, minor, size


def _check_sum(expected: int, found: int, what: str, offset: int) -> None:
    if expected != found:
        raise FormatError(
            f"{what} is damaged: expected the CRC-32 {expected:08x}, found {found:08x}",
            offset=offset,
            hint="transfer the file again, in binary mode",
        )
