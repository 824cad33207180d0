"""Numbers and strings in DWARF and unwind tables: of fixed size, LEB128 (DWARF 5, 7.6), and NUL-terminated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dprobes.arch import ByteOrder
    from dprobes.target.elf.file_contents import FileBytes

__all__ = ["POINTER_SIZES", "ByteReader", "signed_at", "text_at", "unsigned_at"]

_BITS_MAX = 70
"""Maximum number of bits of a LEB128 number: ten groups of seven bits, for a value of 64 bits."""

_TEXT_MAX = 1 << 16
"""Maximum size of a name in bytes. Names of C++ have some thousands."""

POINTER_SIZES = {0x02: 2, 0x03: 4, 0x04: 8, 0x0A: 2, 0x0B: 4, 0x0C: 8}
"""
Sizes in bytes of encoded pointers (DW_EH_PE_*), by the low four bits of the encoding.

The formats 0 and 8 are words.
"""
_WORDS = (0x00, 0x08)
_SIGNED = 0x08


def unsigned_at(data: FileBytes, position: int) -> tuple[int, int]:
    """
    Return an unsigned LEB128 number and the position after it.

    Raise IndexError at the end of the data, and ValueError if the number has too many bytes.
    """
    byte = data[position]
    if byte < 0x80:
        return byte, position + 1
    value, bits = byte & 0x7F, 7
    while bits < _BITS_MAX:
        position += 1
        byte = data[position]
        value |= (byte & 0x7F) << bits
        bits += 7
        if byte < 0x80:
            return value, position + 1
    raise ValueError("a number does not end")


def signed_at(data: FileBytes, position: int) -> tuple[int, int]:
    """Return a signed LEB128 number and the position after it. Errors are those of ``unsigned_at``."""
    value = bits = 0
    while bits < _BITS_MAX:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << bits
        bits += 7
        if byte < 0x80:
            return (value - (1 << bits) if byte & 0x40 else value), position
    raise ValueError("a number does not end")


def text_at(data: FileBytes, position: int, end: int) -> tuple[str, int]:
    """
    Return the string that ends with a NUL before ``end``, and the position after the NUL.

    Raise ValueError if there is no NUL.
    """
    stop = data.find(b"\0", position, min(end, position + _TEXT_MAX))
    if stop < 0 or position < 0:
        raise ValueError("a text that does not end")
    return data[position:stop].decode("utf-8", "surrogateescape"), stop + 1


class ByteReader:
    """
    Sequential reader of bytes, which raises IndexError at their end.

    The first byte is at ``address``, to which encoded pointers may be relative.
    """

    __slots__ = ("_data", "_order", "address", "position")

    def __init__(self, data: bytes, order: ByteOrder, address: int = 0) -> None:
        self._data = data
        self._order = order
        self.position = 0
        self.address = address

    @property
    def is_at_end(self) -> bool:
        """True if no bytes are left."""
        return self.position >= len(self._data)

    def move(self, distance: int) -> None:
        """Move by a distance in bytes, forward or back; raise ValueError if the new position is outside."""
        self.position += distance
        if not 0 <= self.position <= len(self._data):
            raise ValueError("a jump out of an expression")

    def skip(self, size: int) -> None:
        """Skip ``size`` bytes; raise IndexError if fewer remain."""
        self.position += size
        if self.position > len(self._data):
            raise IndexError("it ends too early")

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes, and move after them."""
        start = self.position
        self.skip(size)
        return self._data[start : self.position]

    def number(self, size: int, *, is_signed: bool = False) -> int:
        """Read and return a number of ``size`` bytes in the file's byte order."""
        return int.from_bytes(self.take(size), self._order, signed=is_signed)

    def unsigned(self) -> int:
        """Read and return an unsigned LEB128 number."""
        value, self.position = unsigned_at(self._data, self.position)
        return value

    def signed(self) -> int:
        """Read and return a signed LEB128 number."""
        value, self.position = signed_at(self._data, self.position)
        return value

    def text(self) -> bytes:
        """Return the bytes up to a NUL, and move after the NUL."""
        start = self.position
        end = self._data.index(b"\0", start)
        self.position = end + 1
        return self._data[start:end]

    def pointer(self, encoding: int, word_size: int) -> int:
        """
        Return an encoded pointer; ValueError for an encoding that compilers do not emit.

        ::

             7   6 5 4   3 2 1 0
            +---+-------+---------+
            | I | count | format  |    I: indirect; count: from 0, from the pointer itself (pcrel), …
            +---+-------+---------+
        """
        place, kind = self.address + self.position, encoding & 0x0F
        size = word_size if kind in _WORDS else POINTER_SIZES.get(kind)
        if size is None or encoding & 0xF0 not in (0x00, 0x10):
            raise ValueError(f"a pointer encoded by {encoding:#x}")
        value = self.number(size, is_signed=bool(encoding & _SIGNED))
        return value + (place if encoding & 0x10 else 0) & (1 << 8 * word_size) - 1

    def rest(self) -> ByteReader:
        """Return a new reader of the bytes after the current position."""
        return ByteReader(self._data[self.position :], self._order, self.address + self.position)
