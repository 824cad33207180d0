"""
The fields of sections: little-endian numbers, strings by number, and counts limited by the remaining bytes.

An error has the offset in the file, the expectation, and the value found.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from dprobes.errors import FormatError
from dprobes.rpn.word_arithmetic import MAX_VALUE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "MAGIC",
    "MAJOR",
    "MINOR",
    "NEWER_HINT",
    "NONE",
    "NO_TEXT",
    "SECTION_MAX",
    "SIZE_MAX",
    "Reader",
    "Section",
    "Strings",
    "Writer",
    "pack",
    "unpack",
]

# The frame of a PPDF: its header, the table of sections, and their checksums.
#
# All numbers are little-endian::
#
#     offset  size
#          0     8  magic  89 50 50 44 46 0d 0a 1a  (".PPDF" and line ends, as PNG has them: a text transfer shows)
#          8     2  major version: a reader rejects a newer one
#         10     2  minor version: a reader skips sections of a newer one that it does not know
#         12     4  size of the file in bytes
#         16     4  number of sections
#         20     4  CRC-32 of the 20 bytes before and of the table
#         24    16  for each section: name (4 ASCII letters), offset, size, CRC-32 of its bytes
#
# The sections follow the table and each other without gaps, so that each byte of the file counts in one checksum.

MAGIC = b"\x89PPDF\r\n\x1a"
MAJOR, MINOR = 1, 3

NEWER_HINT = "update dprobes here, or build the file with an older one"
"""Hint for a file that this version cannot read."""

SIZE_MAX = 64 << 20
SECTION_MAX = 64
"""Maximum size of a file in bytes, and maximum number of its sections."""

_START = struct.Struct("<8sHHII")
_CHECKSUM = struct.Struct("<I")
_ROW = struct.Struct("<4sIII")
_TABLE = _START.size + _CHECKSUM.size


class Section(NamedTuple):
    """The bytes of a section, and their offset in the file."""

    data: memoryview
    offset: int


def pack(sections: dict[str, bytes], minor: int = MINOR, major: int = MAJOR) -> bytes:
    """
    Return a PPDF with these sections: the header, the table of sections, and their contents by name.

    Raise ``FormatError`` if it is too large.
    """
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
    """Return the minor version and the sections of a file; raise ``FormatError`` if its frame is invalid."""
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
    """Return the number of sections, the minor version, and the size from the header."""
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


NONE = 0xFFFFFFFF
"""The number that means that there is no string, span or value."""

NO_TEXT = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that no string has: control characters, which terminals interpret, and surrogates."""

_U8, _U16, _U32, _U64 = (struct.Struct(f"<{code}") for code in "BHIQ")

_WIDE_BYTES = 16
"""Size in bytes of a stored number of 64 bits, signed or unsigned."""


class Strings:
    """The numbers of strings, each once, in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Return the number of a string; a new string gets the next number."""
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def all(self) -> tuple[str, ...]:
        """The strings in the order of their numbers."""
        return tuple(self._numbers)


class Writer:
    """A writer of the binary fields of one section of a PPDF, little-endian."""

    def __init__(self, strings: Strings) -> None:
        self.data = bytearray()
        self.all_strings = strings

    def u8(self, value: int) -> None:
        """Write an unsigned number as one byte."""
        self.data += _U8.pack(value)

    def u16(self, value: int) -> None:
        """Write an unsigned number as two bytes, little-endian."""
        self.data += _U16.pack(value)

    def u32(self, value: int) -> None:
        """Write an unsigned number as four bytes, little-endian."""
        self.data += _U32.pack(value)

    def u64(self, value: int) -> None:
        """Write an unsigned number as eight bytes, little-endian."""
        self.data += _U64.pack(value)

    def wide(self, value: int) -> None:
        """Write sixteen bytes in two's complement; raise ``FormatError`` for a magnitude of more than 64 bits."""
        if abs(value) > MAX_VALUE:
            raise FormatError(f"{value:#x} has more than 64 bits")
        self.data += value.to_bytes(_WIDE_BYTES, "little", signed=True)

    def string(self, text: str | None) -> None:
        """Write the number of a string; NONE if ``text`` is None."""
        self.u32(NONE if text is None else self.all_strings.number(text))

    def row(self, forms: str, *values: Any) -> None:
        """Write fields by their forms: ``s`` a string, ``w`` a wide number, ``b`` a block, else as in ``struct``."""
        writes: dict[str, Callable[[Any], None]] = {
            "s": self.string, "w": self.wide, "b": self.block,
            "B": self.u8, "H": self.u16, "I": self.u32, "Q": self.u64,
        }  # fmt: skip
        for form, value in zip(forms, values, strict=True):
            writes[form](value)

    def strings(self, strings: Sequence[str]) -> None:
        """Write the number of strings, then the number of each, in 32 bits."""
        self.u32(len(strings))
        for text in strings:
            self.string(text)

    def numbers(self, values: Sequence[int]) -> None:
        """Write the number of values, then each value in 32 bits."""
        self.u32(len(values))
        self.data += struct.pack(f"<{len(values)}I", *values)

    def block(self, data: bytes) -> None:
        """Write the number of bytes in 32 bits, then the bytes."""
        self.u32(len(data))
        self.data += data


class Reader:
    """
    Reader of the fields of a section that begins at ``base`` in the file. ``what`` is its name in errors.

    Its methods raise ``FormatError`` for fields that are invalid, or beyond the end of the section. Their parameter
    ``what`` is the name of the field in messages.
    """

    def __init__(self, data: memoryview, base: int, what: str, strings: Sequence[str] = ()) -> None:
        self._data = data
        self._base = base
        self._what = what
        self._strings = strings
        self._position = 0

    @property
    def offset(self) -> int:
        """The offset of the next field in the file."""
        return self._base + self._position

    def back(self, offset: int) -> None:
        """Set the position to ``offset`` in the file, before the next read."""
        self._position = offset - self._base

    def fail(self, message: str, offset: int | None = None, hint: str | None = None) -> NoReturn:
        """Raise ``FormatError`` for the byte at ``offset`` in the file; None means the next field."""
        raise FormatError(f"{self._what}: {message}", offset=self.offset if offset is None else offset, hint=hint)

    def take(self, size: int, what: str) -> memoryview:
        """
        Consume and return the next ``size`` bytes; raise ``FormatError`` if the section is shorter.

        ``what`` names the field in messages, here and in the other methods.
        """
        left = len(self._data) - self._position
        if size > left:
            self.fail(f"expected {what} of {size} bytes, found only {left} bytes")
        start = self._position
        self._position += size
        return self._data[start : self._position]

    def u8(self, what: str) -> int:
        """Consume and return an unsigned number of one byte."""
        return self.take(1, what)[0]

    def u16(self, what: str) -> int:
        """Consume and return an unsigned number of two bytes."""
        return int.from_bytes(self.take(2, what), "little")

    def u32(self, what: str) -> int:
        """Consume and return an unsigned number of four bytes."""
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        """Consume and return an unsigned number of eight bytes."""
        return int.from_bytes(self.take(8, what), "little")

    def wide(self, what: str) -> int:
        """Consume and return a signed number of sixteen bytes, whose magnitude has at most 64 bits."""
        at = self.offset
        value = int.from_bytes(self.take(_WIDE_BYTES, what), "little", signed=True)
        if abs(value) > MAX_VALUE:
            self.fail(f"expected {what} of 64 bits, found {value:#x}", at)
        return value

    def flag(self, what: str) -> bool:
        """Consume a byte, and return it as a truth value; raise ``FormatError`` unless it is 0 or 1."""
        at = self.offset
        value = self.u8(what)
        if value > 1:
            self.fail(f"expected 0 or 1 for {what}, found {value}", at)
        return bool(value)

    def below(self, limit: int, what: str) -> int:
        """Consume a number of four bytes, and return it; raise ``FormatError`` unless it is below ``limit``."""
        at = self.offset
        value = self.u32(what)
        if value >= limit:
            self.fail(f"expected {what} below {limit}, found {value}", at)
        return value

    def below_byte(self, limit: int, what: str) -> int:
        """Consume a number of one byte, and return it; raise ``FormatError`` unless it is below ``limit``."""
        at = self.offset
        value = self.u8(what)
        if value >= limit:
            self.fail(f"expected {what} below {limit}, found {value}", at)
        return value

    def below_or_none(self, limit: int, what: str) -> int | None:
        """
        Consume a number of four bytes, and return it, or None for NONE.

        Raise ``FormatError`` unless it is below ``limit`` or NONE.
        """
        at = self.offset
        value = self.u32(what)
        if value != NONE and value >= limit:
            self.fail(f"expected {what} below {limit}, found {value}", at)
        return None if value == NONE else value

    def string(self, what: str) -> str:
        """Consume the number of a string in the table of strings, and return that string."""
        return self._strings[self.below(len(self._strings), f"the number of a string for {what}")]

    def string_or_none(self, what: str) -> str | None:
        """Consume the number of a string in the table of strings, and return that string, or None for NONE."""
        number = self.below_or_none(len(self._strings), f"the number of a string for {what}")
        return None if number is None else self._strings[number]

    def strings(self, what: str) -> tuple[str, ...]:
        """Consume a count and that number of references to the table of strings, and return these strings."""
        return tuple(self.string(what) for _ in range(self.count(4, what)))

    def numbers(self, what: str) -> tuple[int, ...]:
        """Consume a count and that number of 32-bit numbers, and return these numbers."""
        count = self.count(4, what)
        return struct.unpack(f"<{count}I", self.take(4 * count, what))

    def block(self, what: str) -> bytes:
        """Consume a count and that number of bytes, and return these bytes."""
        return bytes(self.take(self.count(1, what), what))

    def text(self, what: str) -> str:
        """Consume a count and that number of bytes in UTF-8, and return the string, which may have several lines."""
        data = self.block(what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            self.fail(f"expected UTF-8 for {what}, found something else", self.offset - len(data) + error.start)

    def count(self, size: int, what: str, limit: int = NONE) -> int:
        """
        Consume and return a 32-bit count of items that have at least ``size`` bytes each.

        Raise ``FormatError`` if it exceeds ``limit``, or if so many items do not fit in the remaining bytes.
        """
        at = self.offset
        value = self.u32(f"the number of {what}")
        most = min(limit, (len(self._data) - self._position) // size)
        if value > most:
            self.fail(f"expected at most {most} {what}, found {value}", at)
        return value

    def end(self) -> None:
        """Raise ``FormatError`` if the section has bytes that were not consumed."""
        left = len(self._data) - self._position
        if left:
            self.fail(f"expected the end, found {left} more bytes")
