"""
What call frame instructions say: at each instruction, where the caller's registers are.

A *row* holds from an address on: the rule for the canonical frame address, which is the caller's stack pointer, and one
for each register that has moved. Rules: DWARF 5, 6.4.2; the GNU operations in GCC's ``dwarf2.def``.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dprobes.errors import TargetError
from dprobes.target.elf.byte_reader import POINTER_SIZES, ByteReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.arch import ByteOrder
    from dprobes.target.elf.elf_file import ElfFile

__all__ = [
    "DEBUG_COMMON",
    "CommonEntry",
    "FrameAddress",
    "FrameImage",
    "RegisterRule",
    "Row",
    "RuleKind",
    "landing_pads",
    "read_debug_description",
    "read_description",
    "rows_of",
]

# The entries of ``.eh_frame``: what the code of one function does with the stack, and what many of them have in common.
#
# ::
#
#     common entry       u32 length | u32 0 | version, augmentation, alignments, return address, augmentation data
#                        | instructions
#     description        u32 length | u32 distance back to the common entry | start, size | augmentation data
#                        | instructions
#
# Rules: Linux Standard Base 5.0, "Exception Frames"; DWARF 5, 6.4.1. What compilers do not write raises ValueError.


DEBUG_COMMON = 0xFFFFFFFF
"""What says in ``.debug_frame`` that an entry is a common one."""

_ENTRY_MAX = 1 << 20
"""Bytes of an entry: the longest ones that compilers write have some thousands."""

_OMITTED = 0xFF
"""The encoding of a pointer that is not there."""


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
    instructions: ByteReader
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
    instructions: ByteReader
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


def _entry(image: FrameImage, address: int) -> tuple[ByteReader, int]:
    """Return the bytes of the entry at an address, from behind its id on, and the id."""
    head = ByteReader(image.read(address, 8), image.byte_order)
    length, kind = head.number(4), head.number(4)
    if not 4 <= length < _ENTRY_MAX:
        raise ValueError("an entry of another format")
    return ByteReader(image.read(address + 8, length - 4), image.byte_order, address + 8), kind


def _common_entry(data: ByteReader, kind: int, word_size: int, expected: int = 0) -> CommonEntry:
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


_ADVANCE, _OFFSET, _RESTORE = 1, 2, 3
"""Operations with an operand in their lower six bits."""

_OPERANDS = {
    0x00: "", 0x01: "a", 0x02: "1", 0x03: "2", 0x04: "4", 0x05: "uu", 0x06: "u", 0x07: "u", 0x08: "u", 0x09: "uu",
    0x0A: "", 0x0B: "", 0x0C: "uu", 0x0D: "u", 0x0E: "u", 0x0F: "b", 0x10: "ub", 0x11: "us", 0x12: "us", 0x13: "s",
    0x14: "uu", 0x15: "us", 0x16: "ub", 0x2D: "", 0x2E: "u", 0x2F: "uu",
}  # fmt: skip
"""The operands of the others: a an address, a size in bytes, u and s LEB128 without and with a sign, b a block."""

_ROWS_MAX, _RULES_MAX, _DEPTH_MAX = 1 << 13, 64, 64
"""Rows of one function, registers with a rule in one of them, and rows that are remembered at once."""


class RuleKind(enum.Enum):
    """Say where the caller's value of a register is."""

    UNDEFINED = enum.auto()
    """Lost; of the return address: nothing called."""
    SAME = enum.auto()
    """In the register still."""
    AT = enum.auto()
    """In memory, at the frame address plus the number."""
    OFFSET = enum.auto()
    """The frame address plus the number."""
    REGISTER = enum.auto()
    """In the register with the number."""
    AT_EXPRESSION = enum.auto()
    """In memory, where the expression says."""
    EXPRESSION = enum.auto()
    """The value of the expression."""


class RegisterRule(NamedTuple):
    """Say where the caller's value of one register is; ``expression`` is of the kinds that have one."""

    kind: RuleKind
    number: int = 0
    expression: bytes = b""


class FrameAddress(NamedTuple):
    """Say that the frame address is a register, by DWARF's number, plus an offset; register None: an expression."""

    register: int | None
    offset: int
    expression: bytes = b""


class Row(NamedTuple):
    """Say what holds from an address on."""

    start: int
    frame: FrameAddress
    rules: Mapping[int, RegisterRule]


_UNDEFINED = RegisterRule(RuleKind.UNDEFINED)
_SAME = RegisterRule(RuleKind.SAME)
_NOWHERE = FrameAddress(None, 0)


def rows_of(description: FrameDescription, word_size: int) -> list[Row]:
    """Return the rows of a function in order; raise ValueError or IndexError for what cannot be understood."""
    machine = _Machine(description, word_size)
    machine.run(description.common.instructions.rest())
    machine.keep_initial()
    machine.run(description.instructions.rest())
    return machine.finished()


class _Machine:
    """Carry out call frame instructions."""

    def __init__(self, description: FrameDescription, word_size: int) -> None:
        self._common = description.common
        self._word_size = word_size
        self._position = description.start
        self._frame = _NOWHERE
        self._rules: dict[int, RegisterRule] = {}
        self._initial: dict[int, RegisterRule] = {}
        self._kept: list[tuple[FrameAddress, dict[int, RegisterRule]]] = []
        self._found: list[Row] = []

    def keep_initial(self) -> None:
        """Remember what the common entry says, which ``restore`` brings back."""
        self._initial = dict(self._rules)

    def run(self, data: ByteReader) -> None:
        """Carry out instructions."""
        while not data.is_at_end:
            operation = data.number(1)
            kind, low = operation >> 6, operation & 0x3F
            match kind:
                case 1:
                    self._advance(low * self._common.code_alignment)
                case 2:
                    self._rules[low] = RegisterRule(RuleKind.AT, data.unsigned() * self._common.data_alignment)
                case 3:
                    self._restore(low)
                case _:
                    self._extended(operation, data)

    def _extended(self, operation: int, data: ByteReader) -> None:
        if operation not in _OPERANDS:
            raise ValueError(f"operation {operation:#x}")
        common, block = self._common, b""
        values = []
        for form in _OPERANDS[operation]:
            if form == "b":
                block = data.take(data.unsigned())
            else:
                values.append(self._operand(data, form))
        match operation, values:
            case 0x01, [address]:
                self._advance(address - self._position)
            case ((0x02 | 0x03 | 0x04), [distance]):
                self._advance(distance * common.code_alignment)
            case ((0x05 | 0x11), [register, offset]):
                self._rules[register] = RegisterRule(RuleKind.AT, offset * common.data_alignment)
            case 0x2F, [register, offset]:
                self._rules[register] = RegisterRule(RuleKind.AT, -offset * common.data_alignment)
            case ((0x14 | 0x15), [register, offset]):
                self._rules[register] = RegisterRule(RuleKind.OFFSET, offset * common.data_alignment)
            case 0x06, [register]:
                self._restore(register)
            case 0x07, [register]:
                self._rules[register] = _UNDEFINED
            case 0x08, [register]:
                self._rules[register] = _SAME
            case 0x09, [register, other]:
                self._rules[register] = RegisterRule(RuleKind.REGISTER, other)
            case 0x10, [register]:
                self._rules[register] = RegisterRule(RuleKind.AT_EXPRESSION, 0, block)
            case 0x16, [register]:
                self._rules[register] = RegisterRule(RuleKind.EXPRESSION, 0, block)
            case 0x0A, _:
                if len(self._kept) >= _DEPTH_MAX:
                    raise ValueError("too many rows to remember")
                self._kept.append((self._frame, dict(self._rules)))
            case 0x0B, _:
                self._frame, self._rules = self._kept.pop()
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
                self._frame = FrameAddress(None, 0, block)

    def _operand(self, data: ByteReader, form: str) -> int:
        match form:
            case "a":
                return data.pointer(self._common.encoding, self._word_size)
            case "u":
                return data.unsigned()
            case "s":
                return data.signed()
            case _:
                return data.number(int(form))

    def _restore(self, register: int) -> None:
        self._rules.pop(register, None)
        if (rule := self._initial.get(register)) is not None:
            self._rules[register] = rule

    def finished(self) -> list[Row]:
        """Return all rows."""
        return [*self._found, Row(self._position, self._frame, self._rules)]

    def _advance(self, distance: int) -> None:
        if len(self._found) >= _ROWS_MAX or len(self._rules) > _RULES_MAX:
            raise ValueError("too many rows")
        self._found.append(Row(self._position, self._frame, dict(self._rules)))
        self._position += distance


# Where exceptions are caught: the landing pads that the tables in ``.gcc_except_table`` name, a table for each
# function.
#
# ::
#
#     encoding, start of the landing pads    (0xff: they count from the function's start)
#     encoding, ULEB128 size of the types    (0xff: none)
#     encoding, ULEB128 size of what follows
#         start, length, landing pad | ULEB128 action     for each range of calls; a landing pad of 0 is none
#
# An unwinder enters the code there: that is a branch that no instruction shows. Bytes that are not as they should be
# count as no table. Rules: Itanium C++ ABI, "Exception Handling Tables" (``parse_lsda_header`` of libsupc++).


_PAD_OMITTED, _ULEB128 = 0xFF, 0x01
_UNREADABLE = (TargetError, struct.error, IndexError, ValueError)


def landing_pads(elf: ElfFile) -> set[int]:
    """Return the link addresses of all landing pads of a file."""
    if elf.sections and not any(section.name == ".gcc_except_table" for section in elf.sections):
        return set()
    found: set[int] = set()
    segments: dict[int, bytes] = {}
    for description in elf.frames.descriptions:
        try:
            function = read_description(elf, description)
            if function.landing_table:
                found.update(_landing_pads(elf, function, segments))
        except _UNREADABLE:
            continue
    return found


def _landing_pads(elf: ElfFile, function: FrameDescription, segments: dict[int, bytes]) -> list[int]:
    data = _bytes_from(elf, function.landing_table, segments)
    base, encoding = function.start, data.number(1)
    if encoding != _PAD_OMITTED:
        base = data.pointer(encoding, elf.word_size)
    if data.number(1) != _PAD_OMITTED:
        data.unsigned()
    encoding = data.number(1)
    end = data.unsigned() + data.position
    found = []
    while data.position < end:
        _, _, pad = (_number(data, encoding, elf.word_size) for _ in range(3))
        data.unsigned()
        if pad:
            found.append(base + pad)
    return found


def _bytes_from(elf: ElfFile, address: int, segments: dict[int, bytes]) -> ByteReader:
    """Return the bytes from an address to the end of its segment, each of which is read once."""
    segment = next((s for s in elf.load_segments if 0 <= address - s.vaddr < s.filesz), None)
    if segment is None:
        raise TargetError(f"'{elf.path}' has no table at address 0x{address:x}")
    if segment.vaddr not in segments:
        segments[segment.vaddr] = elf.read(segment.vaddr, segment.filesz)
    data = ByteReader(segments[segment.vaddr], elf.byte_order, segment.vaddr)
    data.skip(address - segment.vaddr)
    return data


def _number(data: ByteReader, encoding: int, word_size: int) -> int:
    return data.unsigned() if encoding == _ULEB128 else data.pointer(encoding & 0x0F, word_size)
