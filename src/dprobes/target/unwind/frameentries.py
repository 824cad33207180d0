"""
The entries of ``.eh_frame``: what the code of one function does with the stack, and what many of them have in common.

::

    common entry       u32 length | u32 0 | version, augmentation, alignments, return address, augmentation data
                       | instructions
    description        u32 length | u32 distance back to the common entry | start, size | augmentation data
                       | instructions

Rules: Linux Standard Base 5.0, "Exception Frames"; DWARF 5, 6.4.1. What compilers do not write raises ValueError.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Protocol

from dprobes.lazydataclass import dataclass
from dprobes.target.unwind.framebytes import POINTER_SIZES, FrameBytes

if TYPE_CHECKING:
    from dprobes.arch import ByteOrder

__all__ = [
    "DEBUG_COMMON",
    "CommonEntry",
    "FrameDescription",
    "FrameImage",
    "read_debug_description",
    "read_description",
]

DEBUG_COMMON = 0xFFFFFFFF
"""What says in ``.debug_frame`` that an entry is a common one."""

_ENTRY_MAX = 1 << 20
"""Bytes of an entry: the longest ones that compilers write have some thousands."""

_OMITTED = 0xFF
"""The encoding of a pointer that is not there."""

_EXTENDED = 0xFFFFFFF0
"""Lengths from here on stand for other formats, which are in no file below 4 GiB."""


class FrameImage(Protocol):
    """Memory, or a file, that holds unwind tables."""

    @property
    def word_size(self) -> int:
        """How many bytes an address has."""

    @property
    def byte_order(self) -> ByteOrder:
        """The order of the bytes of a number."""

    def read(self, address: int, n: int, /) -> bytes:
        """Return ``n`` bytes at an address; raise ``TargetError`` if they are not all there."""


@dataclass(frozen=True, slots=True)
class CommonEntry:
    """
    What the descriptions of several functions have in common.

    ``return_register`` is the column of the return address, by DWARF's number. ``encoding`` is that of pointers. In a
    signal frame the return address is that of the interrupted instruction, not of the one behind a call. Descriptions
    name tables of landing pads if there is an encoding for that.
    """

    code_alignment: int
    data_alignment: int
    return_register: int
    encoding: int
    has_augmentation: bool
    is_signal_frame: bool
    instructions: FrameBytes
    table_encoding: int | None = None


@dataclass(frozen=True, slots=True)
class FrameDescription:
    """
    How the code from ``start`` up to ``end`` uses the stack.

    ``landing_table`` is the address of what says where exceptions are caught, 0 if they are not.
    """

    start: int
    end: int
    common: CommonEntry
    instructions: FrameBytes
    landing_table: int = 0


def read_description(image: FrameImage, address: int) -> FrameDescription:
    """Return the description at an address; raise ``TargetError``, ValueError or IndexError if there is none."""
    own, distance = _entry(image, address)
    common = _common_entry(*_entry(image, address + 4 - distance), image.word_size)
    start = own.pointer(common.encoding, image.word_size)
    size = own.pointer(common.encoding & 0x0F, image.word_size)
    table = 0
    if common.has_augmentation:
        length = own.unsigned()
        if common.table_encoding is None:
            own.skip(length)
        else:
            augmentation = own.rest()
            if any(own.take(length)):
                table = augmentation.pointer(common.table_encoding, image.word_size)
    return FrameDescription(start, start + size, common, own.rest(), table)


def read_debug_description(image: FrameImage, address: int) -> FrameDescription:
    """Return the description at a place of ``.debug_frame``, which ``image`` has from 0 on; raises as the other."""
    own, place = _entry(image, address)
    common = _common_entry(*_entry(image, place), image.word_size, DEBUG_COMMON)
    start, size = own.pointer(0, image.word_size), own.pointer(0, image.word_size)
    return FrameDescription(start, start + size, common, own.rest())


def _entry(image: FrameImage, address: int) -> tuple[FrameBytes, int]:
    """Return the bytes of the entry at an address, from behind its id on, and the id."""
    order = "<" if image.byte_order == "little" else ">"
    length, kind = struct.unpack(f"{order}II", image.read(address, 8))
    if not 4 <= length < min(_EXTENDED, _ENTRY_MAX):
        raise ValueError("an entry of another format")
    return FrameBytes(image.read(address + 8, length - 4), order, address + 8), kind


def _common_entry(data: FrameBytes, kind: int, word_size: int, expected: int = 0) -> CommonEntry:
    if kind != expected:
        raise ValueError("no common entry")
    version = data.number(1)
    augmentation = data.text()
    if version not in (1, 3, 4):
        raise ValueError("another version")
    if version == 4:
        data.skip(2)  # sizes of addresses and segment selectors
    code_alignment, data_alignment = data.unsigned(), data.signed()
    return_register = data.number(1) if version == 1 else data.unsigned()
    if augmentation[:1] not in (b"", b"z"):
        raise ValueError("another augmentation")
    encoding, is_signal_frame = 0, False
    table_encoding = None
    if augmentation:
        size = data.unsigned()
        own = data.rest()
        data.skip(size)
        for letter in augmentation[1:].decode("latin-1"):
            match letter:
                case "R":
                    encoding = own.number(1)
                case "P":
                    own.skip(POINTER_SIZES.get(own.number(1) & 0x0F, word_size))
                case "L":
                    table_encoding = own.number(1)
                    table_encoding = None if table_encoding == _OMITTED else table_encoding
                case "S":
                    is_signal_frame = True
                case "B":
                    pass
                case _:
                    break
    return CommonEntry(
        code_alignment,
        data_alignment,
        return_register,
        encoding,
        bool(augmentation),
        is_signal_frame,
        data.rest(),
        table_encoding,
    )
