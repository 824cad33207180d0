"""
The few things of protobuf's encoding that writing takes (protobuf.dev/programming-guides/encoding).

A message is its fields, one behind the other. A field is a key, its number shifted left by 3 with the wire type below,
and a varint (wire type 0), eight bytes (wire type 1) or, behind their length, bytes (wire type 2): a string, or a
message.
"""

from __future__ import annotations

import struct
from functools import lru_cache

__all__ = ["double_field", "length_field", "text_field", "varint", "varint_field"]

_MASK = (1 << 64) - 1


@lru_cache(maxsize=1 << 14)
def varint(value: int) -> bytes:
    """Return a number in groups of 7 bits, the lowest first; a negative one is that of 64 bits."""
    value &= _MASK
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def varint_field(number: int, value: int) -> bytes:
    """Return a field that is a number."""
    return varint(number << 3) + varint(value)


def double_field(number: int, value: float) -> bytes:
    """Return a field that is a floating-point number."""
    return varint(number << 3 | 1) + struct.pack("<d", value)


def length_field(number: int, data: bytes) -> bytes:
    """Return a field that is bytes, or a message."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def text_field(number: int, text: str) -> bytes:
    """Return a field that is a string."""
    return length_field(number, text.encode("utf-8", "backslashreplace"))
