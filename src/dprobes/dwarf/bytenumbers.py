"""Numbers of variable length in bytes (LEB128; DWARF 5, 7.6): each function returns the number and where it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dprobes.target.elf.contents import FileBytes

__all__ = ["signed_at", "text_at", "unsigned_at"]

_BITS_MAX = 70
"""Bits of the longest number: ten groups of seven hold 64."""

_TEXT_MAX = 1 << 16
"""Bytes of a name; those of C++ have some thousands."""


def unsigned_at(data: FileBytes, position: int) -> tuple[int, int]:
    """Read an unsigned number; IndexError behind the end, ValueError if it is too long."""
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
    raise ValueError("a number that does not end")


def signed_at(data: FileBytes, position: int) -> tuple[int, int]:
    """Read a signed number; as ``unsigned_at``."""
    value = bits = 0
    while bits < _BITS_MAX:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << bits
        bits += 7
        if byte < 0x80:
            return (value - (1 << bits) if byte & 0x40 else value), position
    raise ValueError("a number that does not end")


def text_at(data: FileBytes, position: int, end: int) -> tuple[str, int]:
    """Read the text up to a NUL before ``end``; ValueError if it does not end."""
    stop = data.find(b"\0", position, min(end, position + _TEXT_MAX))
    if stop < 0 or position < 0:
        raise ValueError("a text that does not end")
    return data[position:stop].decode("utf-8", "surrogateescape"), stop + 1
