"""
Units: the parts of debug information that are made of one source file, or shared by several.

::

    DWARF 4   length | u16 version | offset of shapes | u8 address size | [u64 signature | offset of its type]
    DWARF 5   length | u16 version | u8 kind | u8 address size | offset of shapes | [u64 dwo_id or signature | …]

``length`` is 4 bytes, or 0xffffffff and 8 bytes; then offsets in sections have 8, too (DWARF 5, 7.5.1).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.dwarf.abbreviations import FormSizes
from dprobes.dwarf.entries import Entry
from dprobes.dwarf.numbers import At, UnitKind

if TYPE_CHECKING:
    from dprobes.arch import ByteOrder
    from dprobes.dwarf.abbreviations import Shapes
    from dprobes.dwarf.entries import EntryFile
    from dprobes.dwarf.sections import SectionBytes

__all__ = ["Unit", "is_skeleton", "unit_end"]

_LONG = 0xFFFFFFFF
_VERSIONS = (2, 3, 4, 5)
_ADDRESS_SIZES = (4, 8)


def unit_end(section: SectionBytes, offset: int, order: ByteOrder) -> int:
    """Return where the unit at an offset of a section ends; ValueError if that is not in it."""
    place = section.start + offset
    length = int.from_bytes(section.data[place : place + 4], order)
    head = 4
    if length == _LONG:
        length, head = int.from_bytes(section.data[place + 4 : place + 12], order), 12
    end = offset + head + length
    if length < 7 or end > section.size:
        raise ValueError(f"a unit at {offset:#x} with {length} bytes")
    return end


def is_skeleton(unit: Unit) -> bool:
    """Return whether the entries of a unit are elsewhere: DWARF 5 says so in its header, GNU's DWARF 4 in its entry."""
    if unit.kind != UnitKind.COMPILE or unit.sizes.version >= 5:
        return unit.kind == UnitKind.SKELETON
    return unit.root.has(At.GNU_DWO_NAME)


class Unit:
    """
    A unit of a file, at ``offset`` of its section ``.debug_info``, or ``.debug_types`` if ``is_types``.

    ``skeleton`` is the unit in the program of a unit in a file of its own. ``sizes`` are those of forms. ``signature``
    is that of its type, or for a part of split debug information the number that both parts have.
    """

    def __init__(self, file: EntryFile, section: SectionBytes, offset: int, *, is_types: bool = False) -> None:
        """Read the header; IndexError or ValueError if it cannot be understood."""
        self.file = file
        self.section = section
        self.offset = offset
        self.is_types = is_types
        self.skeleton: Unit | None = None
        self.order = file.elf.byte_order
        self.end = unit_end(section, offset, self.order)
        position = section.start + offset
        offset_size = 8 if int.from_bytes(section.data[position : position + 4], self.order) == _LONG else 4
        position += 12 if offset_size == 8 else 4
        version = self._number(position, 2)
        if version not in _VERSIONS:
            raise ValueError(f"a unit of version {version}")
        position += 2
        self.kind: int = UnitKind.TYPE if is_types else UnitKind.COMPILE
        if version >= 5:
            self.kind = self._number(position, 1)
            address_size = self._number(position + 1, 1)
            self._shapes_offset = self._number(position + 2, offset_size)
            position += 2 + offset_size
        else:
            self._shapes_offset = self._number(position, offset_size)
            address_size = self._number(position + offset_size, 1)
            position += offset_size + 1
        if address_size not in _ADDRESS_SIZES:
            raise ValueError(f"a unit with addresses of {address_size} bytes")
        self.signature: int | None = None
        self.type_offset = 0
        if self.kind in (UnitKind.TYPE, UnitKind.SPLIT_TYPE):
            self.signature = self._number(position, 8)
            self.type_offset = self._number(position + 8, offset_size)
            position += 8 + offset_size
        elif self.kind in (UnitKind.SKELETON, UnitKind.SPLIT_COMPILE):
            self.signature = self._number(position, 8)
            position += 8
        self.sizes = FormSizes(address_size, offset_size, version, self.order)
        self._first = position - section.start

    def __repr__(self) -> str:
        return f"Unit({str(self.file.elf.path)!r}, {self.offset:#x})"

    def _number(self, position: int, size: int) -> int:
        return int.from_bytes(self.section.data[position : position + size], self.order)

    @cached_property
    def shapes(self) -> Shapes:
        """The shapes of its entries by their codes."""
        return self.file.shapes_at(self._shapes_offset, self.sizes)

    @cached_property
    def root(self) -> Entry:
        """The entry that all others are in."""
        return self.entry(self._first)

    def entry(self, offset: int) -> Entry:
        """Return the entry at an offset of the section; raise ``TargetError`` if there is none."""
        found = self.entry_or_end(offset)
        if found is None:
            self.file.malformed(f"there is no entry at {offset:#x}")
        return found

    def entry_or_end(self, offset: int) -> Entry | None:
        """Return the entry at an offset of the section; None if the end of the children of one is there."""
        if not self._first <= offset < self.end:
            self.file.malformed(f"an entry at {offset:#x} is outside of its unit")
        return Entry.at(self, offset)

    @property
    def is_split(self) -> bool:
        """Whether it is the part of split debug information that is in a file of its own."""
        return self.kind in (UnitKind.SPLIT_COMPILE, UnitKind.SPLIT_TYPE)

    @cached_property
    def low_pc(self) -> int:
        """What the addresses of its ranges and lists count from."""
        if self.skeleton is not None:
            return self.skeleton.low_pc
        return self.root.address(At.LOW_PC) or 0

    def base(self, attribute: int, gnu_attribute: int | None = None) -> int | None:
        """Return where the unit's part of a section begins."""
        if self.skeleton is not None and attribute in (At.ADDR_BASE, At.GNU_RANGES_BASE):
            return self.skeleton.base(attribute, gnu_attribute)
        found = self.root.offset_in_section(attribute)
        return found if found is not None or gnu_attribute is None else self.root.offset_in_section(gnu_attribute)
