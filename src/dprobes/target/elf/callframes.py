"""
How deep the stack is at an instruction, from the unwind table (``.eh_frame``).

Of each description only what one question needs is read: where the canonical frame address is. So a machine on which
programs are only inserted needs no library for DWARF. Bytes that are not as they should be count as no answer.
Rules: Linux Standard Base 5.0, "Exception Frames"; DWARF 5, 6.4; the GNU operations in GCC's ``dwarf2.def``.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import TargetError
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from dprobes.target.elf.file import ElfFile

__all__ = ["CallFrames", "FrameAddress"]

_STACK_POINTER = {"i386": 4, "x86_64": 7}  # DWARF's numbers, in the ABI supplements of the two processors

_POINTER_SIZES = {0x02: 2, 0x03: 4, 0x04: 8, 0x0A: 2, 0x0B: 4, 0x0C: 8}
"""The sizes of encoded pointers by the low half of the encoding; 0 is an address, whatever its size."""

_ADVANCE, _OFFSET = 1, 2
"""Operations with an operand in their lower six bits; the third one, restore, has nothing behind it."""

_OPERANDS = {
    0x00: "", 0x02: "1", 0x03: "2", 0x04: "4", 0x05: "uu", 0x06: "u", 0x07: "u", 0x08: "u", 0x09: "uu", 0x0A: "",
    0x0B: "", 0x0C: "uu", 0x0D: "u", 0x0E: "u", 0x0F: "b", 0x10: "ub", 0x11: "us", 0x12: "us", 0x13: "s", 0x14: "uu",
    0x15: "us", 0x16: "ub", 0x2D: "", 0x2E: "u", 0x2F: "uu",
}  # fmt: skip
"""The operands of the other operations: a size in bytes, u and s LEB128 without and with a sign, b a block."""


class FrameAddress(NamedTuple):
    """Say that the canonical frame address is a register, by DWARF's number, plus an offset; None: an expression."""

    register: int | None
    offset: int


class _Row(NamedTuple):
    """Say where the canonical frame address is from a link address on."""

    start: int
    frame: FrameAddress


class CallFrames:
    """Answer questions about the call frames of one file."""

    def __init__(self, elf: ElfFile) -> None:
        self._elf = elf
        self._tables: dict[int, list[_Row] | None] = {}

    def is_at_entry(self, address: int) -> bool | None:
        """
        Return whether the return address is on top of the stack at ``address``, as it is when a function begins.

        None if the file does not say.
        """
        frame = self.frame_address(address)
        if frame is None or frame.register is None:
            return None
        return frame.register == _STACK_POINTER.get(self._elf.machine) and frame.offset == self._elf.word_size

    def frame_address(self, address: int) -> FrameAddress | None:
        """Return where the canonical frame address is at a link address; None if the file does not say."""
        frames, elf = self._elf.frames, self._elf
        description, extent = frames.description_of(elf, address), frames.extent(elf, address)
        if description is None or extent is None:
            return None
        if description not in self._tables:
            self._tables[description] = _rows(elf, description, extent[0])
        rows = self._tables[description]
        return None if rows is None else next((row.frame for row in reversed(rows) if row.start <= address), None)


def _rows(elf: ElfFile, description: int, start: int) -> list[_Row] | None:
    """Return the rows of the function at ``start``, in order; None if its description cannot be read."""
    try:
        own, distance = _entry(elf, description)
        common_address = description + 4 - distance
        common = _Common.read(_entry(elf, common_address)[0], elf.word_size)
        own.skip(2 * common.pointer_size)  # where the function starts, and how long it is
        if common.has_augmentation:
            own.skip(own.unsigned())
        machine = _Machine(common, start)
        machine.run(common.instructions)
        machine.run(own.rest())
        return machine.finished()
    except (TargetError, struct.error, IndexError, ValueError):
        return None


class _Bytes:
    """Read numbers from bytes one after the other; raise IndexError behind their end."""

    def __init__(self, data: bytes, byte_order: str) -> None:
        self._data = data
        self._order = "<" if byte_order == "little" else ">"
        self._position = 0

    @property
    def is_at_end(self) -> bool:
        return self._position >= len(self._data)

    def skip(self, size: int) -> None:
        self._position += size
        if self._position > len(self._data):
            raise IndexError

    def number(self, size: int) -> int:
        start = self._position
        self.skip(size)
        (value,) = struct.unpack_from(self._order + {1: "B", 2: "H", 4: "I", 8: "Q"}[size], self._data, start)
        return int(value)

    def unsigned(self) -> int:
        return self._leb128()[0]

    def signed(self) -> int:
        value, bits, is_negative = self._leb128()
        return value - (1 << bits) if is_negative else value

    def _leb128(self) -> tuple[int, int, bool]:
        """Return a number, the number of its bits, and whether the highest one is set."""
        value = bits = 0
        while True:
            byte = self._data[self._position]
            self._position += 1
            value |= (byte & 0x7F) << bits
            bits += 7
            if not byte & 0x80:
                return value, bits, bool(byte & 0x40)

    def text(self) -> bytes:
        end = self._data.index(b"\0", self._position)
        start, self._position = self._position, end + 1
        return self._data[start:end]

    def rest(self) -> _Bytes:
        return _Bytes(self._data[self._position :], "little" if self._order == "<" else "big")


def _entry(elf: ElfFile, address: int) -> tuple[_Bytes, int]:
    """Return the bytes of the entry at a link address, from behind its id on, and the id."""
    length, kind = struct.unpack(f"{elf.struct_prefix}II", elf.read(address, 8))
    if not 4 <= length < 0xFFFFFFF0:
        raise ValueError("an entry of another format")
    return _Bytes(elf.read(address + 8, length - 4), elf.byte_order), kind


@dataclass(frozen=True, slots=True)
class _Common:
    """Hold what the descriptions of several functions have in common."""

    code_alignment: int
    data_alignment: int
    has_augmentation: bool
    pointer_size: int
    instructions: _Bytes

    @classmethod
    def read(cls, data: _Bytes, word_size: int) -> _Common:
        version = data.number(1)
        augmentation = data.text()
        if version not in (1, 3, 4):
            raise ValueError("another version")
        if version == 4:
            data.skip(2)  # sizes of addresses and segment selectors
        code_alignment, data_alignment = data.unsigned(), data.signed()
        if version == 1:
            data.skip(1)  # the register of the return address
        else:
            data.unsigned()
        if augmentation[:1] not in (b"", b"z"):
            raise ValueError("another augmentation")
        pointer_size = word_size
        if augmentation:
            own = _augmentation(data)
            for letter in augmentation[1:].decode("latin-1"):
                if letter == "R":
                    pointer_size = _POINTER_SIZES.get(own.number(1) & 0x0F, word_size)
                elif letter == "P":
                    own.skip(_POINTER_SIZES.get(own.number(1) & 0x0F, word_size))
                elif letter == "L":
                    own.skip(1)
                elif letter not in "SB":
                    break
        return cls(code_alignment, data_alignment, bool(augmentation), pointer_size, data.rest())


def _augmentation(data: _Bytes) -> _Bytes:
    """Return the augmentation data, which is skipped."""
    size = data.unsigned()
    own = data.rest()
    data.skip(size)
    return own


class _Machine:
    """Carry out call frame instructions as far as they move the canonical frame address."""

    def __init__(self, common: _Common, start: int) -> None:
        self._common = common
        self._position = start
        self._frame = FrameAddress(None, 0)
        self._kept: list[FrameAddress] = []
        self._found: list[_Row] = []

    def run(self, data: _Bytes) -> None:
        """Carry out instructions; raise ValueError for one that is unknown."""
        common = self._common
        while not data.is_at_end:
            operation = data.number(1)
            kind, low = operation >> 6, operation & 0x3F
            if kind == _ADVANCE:
                self._advance(low)
                continue
            if kind:
                if kind == _OFFSET:
                    data.unsigned()
                continue
            values = [_operand(data, form) for form in _operands_of(operation)]
            match operation, values:
                case ((0x02 | 0x03 | 0x04), [distance]):
                    self._advance(distance)
                case 0x0A, _:
                    self._kept.append(self._frame)
                case 0x0B, _:
                    self._frame = self._kept.pop()
                case 0x0C, [register, offset]:
                    self._frame = FrameAddress(register, offset)
                case 0x12, [register, offset]:
                    self._frame = FrameAddress(register, offset * common.data_alignment)
                case 0x0D, [register]:
                    self._frame = FrameAddress(register, self._frame.offset)
                case 0x0E, [offset]:
                    self._frame = FrameAddress(self._frame.register, offset)
                case 0x13, [offset]:
                    self._frame = FrameAddress(self._frame.register, offset * common.data_alignment)
                case 0x0F, _:
                    self._frame = FrameAddress(None, 0)

    def finished(self) -> list[_Row]:
        """Return all rows."""
        return [*self._found, _Row(self._position, self._frame)]

    def _advance(self, distance: int) -> None:
        self._found.append(_Row(self._position, self._frame))
        self._position += distance * self._common.code_alignment


def _operands_of(operation: int) -> str:
    if operation not in _OPERANDS:
        raise ValueError(f"operation {operation:#x}")
    return _OPERANDS[operation]


def _operand(data: _Bytes, form: str) -> int:
    match form:
        case "u":
            return data.unsigned()
        case "s":
            return data.signed()
        case "b":
            data.skip(data.unsigned())
            return 0
        case _:
            return data.number(int(form))
