"""Numbers as unwind tables have them, one behind the other: fixed sizes, LEB128, encoded pointers."""

from __future__ import annotations

import struct

__all__ = ["POINTER_SIZES", "FrameBytes"]

_FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q"}
_SIGNED = 0x08

POINTER_SIZES = {0x02: 2, 0x03: 4, 0x04: 8, 0x0A: 2, 0x0B: 4, 0x0C: 8}
"""The sizes of encoded pointers by the low half of the encoding; 0 is an address, whatever its size."""

_LEB128_MAX = 70
"""Bits of the longest number: ten groups of seven hold 64."""


class FrameBytes:
    """
    Read numbers from bytes one after the other; raise IndexError behind their end.

    The first byte is at ``address``, from which encoded pointers may count.
    """

    __slots__ = ("_data", "_order", "_position", "address")

    def __init__(self, data: bytes, order: str, address: int = 0) -> None:
        self._data = data
        self._order = order
        self._position = 0
        self.address = address

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left."""
        return self._position >= len(self._data)

    @property
    def position(self) -> int:
        """How many bytes were read."""
        return self._position

    def skip(self, size: int) -> None:
        """Go on behind bytes."""
        self._position += size
        if self._position > len(self._data):
            raise IndexError

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        start = self._position
        self.skip(size)
        return self._data[start : self._position]

    def number(self, size: int, *, is_signed: bool = False) -> int:
        """Return a number of 1, 2, 4 or 8 bytes."""
        start = self._position
        self.skip(size)
        letter = _FORMATS[size]
        (value,) = struct.unpack_from(self._order + (letter.lower() if is_signed else letter), self._data, start)
        return int(value)

    def unsigned(self) -> int:
        """Return an unsigned LEB128 number."""
        return self._leb128()[0]

    def signed(self) -> int:
        """Return a signed LEB128 number."""
        value, bits, is_negative = self._leb128()
        return value - (1 << bits) if is_negative else value

    def _leb128(self) -> tuple[int, int, bool]:
        """Return a number, the number of its bits, and whether the highest one is set."""
        value = bits = 0
        while bits < _LEB128_MAX:
            byte = self._data[self._position]
            self._position += 1
            value |= (byte & 0x7F) << bits
            bits += 7
            if not byte & 0x80:
                return value, bits, bool(byte & 0x40)
        raise ValueError("a number that does not end")

    def text(self) -> bytes:
        """Return the bytes up to a NUL, and go on behind that."""
        end = self._data.index(b"\0", self._position)
        start, self._position = self._position, end + 1
        return self._data[start:end]

    def pointer(self, encoding: int, word_size: int) -> int:
        """
        Return an encoded pointer; raise ValueError for an encoding that compilers do not write.

        ::

             7   6 5 4   3 2 1 0
            +---+-------+---------+
            | I | count | format  |    I: indirect; count: from 0, from the pointer itself (pcrel), …
            +---+-------+---------+
        """
        place = self.address + self._position
        kind = encoding & 0x0F
        value = self.number(POINTER_SIZES.get(kind, 0) or _word(kind, word_size), is_signed=bool(encoding & _SIGNED))
        match encoding & 0xF0:
            case 0x00:
                pass
            case 0x10:
                value += place
            case _:
                raise ValueError(f"a pointer encoded by {encoding:#x}")
        return value & ((1 << 8 * word_size) - 1)

    def rest(self) -> FrameBytes:
        """Return what is left, to be read on its own."""
        return FrameBytes(self._data[self._position :], self._order, self.address + self._position)


def _word(kind: int, word_size: int) -> int:
    if kind not in (0x00, _SIGNED):
        raise ValueError(f"a pointer encoded by {kind:#x}")
    return word_size
