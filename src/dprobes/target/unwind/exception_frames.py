"""
Call frame instructions, which describe the locations of the caller's registers at each instruction.

A *row* applies from an address on. It has the rule for the canonical frame address (CFA), which is the caller's stack
pointer, and a rule for each saved register. The code of one function has a *description* (FDE). Several descriptions
share a *common entry* (CIE)::

    common entry       u32 length | u32 0 | version, augmentation, alignments, return address, augmentation data
                       | instructions
    description        u32 length | u32 distance back to the common entry | start, size | augmentation data
                       | instructions

Rules: Linux Standard Base 5.0, "Exception Frames"; DWARF 5, 6.4; the GNU operations in GCC's ``dwarf2.def``. Forms that
compilers do not emit raise ValueError.
"""

from __future__ import annotations

import enum
import sys
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dprobes.target.elf.byte_reader import POINTER_SIZES, ByteReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.arch import ByteOrder

__all__ = [
    "DEBUG_COMMON",
    "CommonEntry",
    "FrameAddress",
    "FrameImage",
    "RegisterRule",
    "Row",
    "RuleKind",
    "common_entry",
    "read_description",
    "rows_of",
    "search_table",
]


DEBUG_COMMON = 0xFFFFFFFF
"""Id of a common entry in ``.debug_frame``."""

_ENTRY_MAX = 1 << 20
"""Maximum size of an entry in bytes. The longest entries of compilers have some thousands."""

_TABLE_MAX = 1 << 22
"""Maximum number of functions in a table. The largest programs have a million."""

_UDATA4, _DATAREL_SDATA4 = 0x03, 0x3B
_OMITTED = 0xFF
"""Encoding of an omitted pointer."""


class FrameImage(Protocol):
    """Memory, or a file, with unwind tables."""

    @property
    def word_size(self) -> int:
        """Size of an address in bytes."""

    @property
    def byte_order(self) -> ByteOrder:
        """Byte order of numbers."""

    def read(self, address: int, n: int, /) -> bytes:
        """Return ``n`` bytes at an address; raise ``TargetError`` if some are missing."""


class CommonEntry(NamedTuple):
    """
    Common information entry (CIE): the common part of the descriptions of several functions.

    ``return_register`` is the DWARF number of the column of the return address. ``encoding`` is the encoding of
    pointers. In a signal frame, the return address is the address of the interrupted instruction, not of the one after
    a call. If ``table_encoding`` is not None, descriptions refer to tables of landing pads.
    """

    code_alignment: int
    data_alignment: int
    return_register: int
    encoding: int
    has_augmentation: bool
    is_signal_frame: bool
    instructions: ByteReader
    table_encoding: int | None = None


class FrameDescription(NamedTuple):
    """
    A frame description entry (FDE): the stack frames of the code from ``start`` to ``end`` (excluded).

    ``landing_table`` is the address of the function's table of landing pads, 0 without one.
    """

    start: int
    end: int
    common: CommonEntry
    instructions: ByteReader
    landing_table: int = 0


def read_description(image: FrameImage, address: int, *, is_debug: bool = False) -> FrameDescription:
    """
    Return the description at an address, or at an offset of ``.debug_frame``, which begins at 0 of ``image``.

    Raise ``TargetError``, ValueError or IndexError if there is none.
    """
    own, distance = _entry(image, address)
    data, kind = _entry(image, distance if is_debug else address + 4 - distance)
    if kind != (DEBUG_COMMON if is_debug else 0):
        raise ValueError("no common entry")
    common = common_entry(data, image.word_size)
    if is_debug:
        start, size = own.pointer(0, image.word_size), own.pointer(0, image.word_size)
        return FrameDescription(start, start + size, common, own.rest())
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


def _entry(image: FrameImage, address: int) -> tuple[ByteReader, int]:
    """Return a reader of the entry at an address, which begins after the entry's id, and the id."""
    head = ByteReader(image.read(address, 8), image.byte_order)
    length, kind = head.number(4), head.number(4)
    if not 4 <= length < _ENTRY_MAX:
        raise ValueError("an entry of another format")
    return ByteReader(image.read(address + 8, length - 4), image.byte_order, address + 8), kind


def common_entry(data: ByteReader, word_size: int) -> CommonEntry:
    """Parse a common entry from its version on; raise ValueError or IndexError if it is malformed."""
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
    numbers = code_alignment, data_alignment, return_register, encoding
    return CommonEntry(*numbers, bool(augmentation), is_signal_frame, data.rest(), table_encoding)


def search_table(image: FrameImage, address: int) -> array[int]:
    """
    Return the table of ``.eh_frame_hdr``: starts and descriptions of functions, relative to ``address``.

    ::

        u8 version 1 | u8 encodings of: the pointer, the count, the table | pointer to .eh_frame
        | u32 count | rows of s32 start, s32 description, both from the header on, sorted

    Raise ValueError if it has an encoding that linkers do not write, or too many rows. Raise ``TargetError`` if it is
    missing.
    """
    version, pointer, *encodings = image.read(address, 4)
    size = image.word_size if pointer & 0x0F == 0 else POINTER_SIZES.get(pointer & 0x0F)
    if version != 1 or encodings != [_UDATA4, _DATAREL_SDATA4] or size is None:
        raise ValueError("a table of another form")
    count = int.from_bytes(image.read(address + 4 + size, 4), image.byte_order)
    if count > _TABLE_MAX:
        raise ValueError("a table that is too large")
    numbers = array("i", image.read(address + 8 + size, 8 * count))
    if sys.byteorder != image.byte_order:
        numbers.byteswap()
    return numbers


_ROWS_MAX, _RULES_MAX, _DEPTH_MAX = 1 << 13, 64, 64
"""Maximum numbers of rows of a function, of registers with a rule in a row, and of rows remembered at once."""


class RuleKind(enum.Enum):
    """The kinds of rules for the caller's value of a register."""

    UNDEFINED = enum.auto()
    """The value is lost. For the return address, this means that there is no caller."""
    SAME = enum.auto()
    """The value is unchanged in the register."""
    AT = enum.auto()
    """The value is in memory, at the frame address plus the number."""
    OFFSET = enum.auto()
    """The value is the frame address plus the number."""
    REGISTER = enum.auto()
    """The value is in the register with the number."""
    AT_EXPRESSION = enum.auto()
    """The value is in memory, at the address that the expression computes."""
    EXPRESSION = enum.auto()
    """The expression computes the value."""


class RegisterRule(NamedTuple):
    """Rule for one register of the caller. ``expression`` is empty for kinds that have none."""

    kind: RuleKind
    number: int = 0
    expression: bytes = b""


class FrameAddress(NamedTuple):
    """Rule for the frame address: a register, by its DWARF number, plus an offset, or an expression."""

    register: int | None
    offset: int
    expression: bytes = b""


class Row(NamedTuple):
    """The unwind rules of the code from the address ``start`` to the next row."""

    start: int
    frame: FrameAddress
    rules: Mapping[int, RegisterRule]


_INSTRUCTIONS: Mapping[int, tuple[str | RuleKind, str]] = {
    0x00: ("nop", ""), 0x2D: ("nop", ""), 0x2E: ("nop", "u"),
    0x01: ("go", "a"), 0x02: ("advance", "1"), 0x03: ("advance", "2"), 0x04: ("advance", "4"),
    0x05: (RuleKind.AT, "ud"), 0x11: (RuleKind.AT, "uD"), 0x2F: (RuleKind.AT, "un"),
    0x14: (RuleKind.OFFSET, "ud"), 0x15: (RuleKind.OFFSET, "uD"), 0x09: (RuleKind.REGISTER, "uu"),
    0x07: (RuleKind.UNDEFINED, "u"), 0x08: (RuleKind.SAME, "u"), 0x06: ("restore", "u"),
    0x10: (RuleKind.AT_EXPRESSION, "ub"), 0x16: (RuleKind.EXPRESSION, "ub"),
    0x0A: ("remember", ""), 0x0B: ("recall", ""),
    0x0C: ("frame", "uu"), 0x12: ("frame", "uD"), 0x0D: ("frame register", "u"), 0x0E: ("frame offset", "u"),
    0x13: ("frame offset", "D"), 0x0F: ("frame expression", "b"),
}  # fmt: skip
"""
Call frame instructions by opcode: the action, or the kind of rule that is set for a register, and the operands.

``a`` is an address, a digit is a size in bytes, ``u`` is LEB128, ``b`` a block. ``d``, ``D`` and ``n`` are LEB128 times
the data alignment: unsigned, signed, and negated.
"""

_NOWHERE = FrameAddress(None, 0)


def rows_of(description: FrameDescription, word_size: int) -> list[Row]:
    """Return the rows of a function in order; raise ValueError or IndexError if instructions are malformed."""
    machine = _Machine(description, word_size)
    machine.run(description.common.instructions.rest())
    machine.keep_initial()
    machine.run(description.instructions.rest())
    return machine.finished()


class _Machine:
    """An interpreter of call frame instructions (DWARF 5, 6.4.2), which collects the rows of unwind rules."""

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
        """Save the present register rules, which are those of the common entry, for DW_CFA_restore."""
        self._initial = dict(self._rules)

    def run(self, data: ByteReader) -> None:
        """Execute the call frame instructions in ``data`` up to its end."""
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
        if operation not in _INSTRUCTIONS:
            raise ValueError(f"operation {operation:#x}")
        action, forms = _INSTRUCTIONS[operation]
        match action, [self._operand(data, form) for form in forms]:
            case RuleKind() as kind, [register, bytes(expression)]:
                self._rules[register] = RegisterRule(kind, 0, expression)
            case RuleKind() as kind, [register, *numbers]:
                self._rules[register] = RegisterRule(kind, *numbers)
            case "go", [address]:
                self._advance(address - self._position)
            case "advance", [distance]:
                self._advance(distance * self._common.code_alignment)
            case "restore", [register]:
                self._restore(register)
            case "remember", _:
                if len(self._kept) >= _DEPTH_MAX:
                    raise ValueError("too many rows to remember")
                self._kept.append((self._frame, dict(self._rules)))
            case "recall", _:
                self._frame, self._rules = self._kept.pop()
            case "frame", [register, offset]:
                self._frame = FrameAddress(register, offset)
            case "frame register", [register]:
                self._frame = self._frame._replace(register=register, expression=b"")
            case "frame offset", [offset]:
                self._frame = self._frame._replace(offset=offset, expression=b"")
            case "frame expression", [expression]:
                self._frame = FrameAddress(None, 0, expression)

    def _operand(self, data: ByteReader, form: str) -> Any:
        match form:
            case "a":
                return data.pointer(self._common.encoding, self._word_size)
            case "u":
                return data.unsigned()
            case "b":
                return data.take(data.unsigned())
            case "d":
                return data.unsigned() * self._common.data_alignment
            case "D":
                return data.signed() * self._common.data_alignment
            case "n":
                return -data.unsigned() * self._common.data_alignment
            case _:
                return data.number(int(form))

    def _restore(self, register: int) -> None:
        self._rules.pop(register, None)
        if (rule := self._initial.get(register)) is not None:
            self._rules[register] = rule

    def finished(self) -> list[Row]:
        """Return all rows, the last one included, by ascending address."""
        return [*self._found, Row(self._position, self._frame, self._rules)]

    def _advance(self, distance: int) -> None:
        if len(self._found) >= _ROWS_MAX or len(self._rules) > _RULES_MAX:
            raise ValueError("too many rows")
        self._found.append(Row(self._position, self._frame, dict(self._rules)))
        self._position += distance
