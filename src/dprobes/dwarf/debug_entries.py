"""
Units of debug information and their entries (DIEs): tags, and attributes by class.

::

    DWARF 4   length | u16 version | offset of shapes | u8 address size | [u64 signature | offset of its type]
    DWARF 5   length | u16 version | u8 kind | u8 address size | offset of shapes | [u64 dwo_id or signature | …]

``length`` is 4 bytes, or 0xffffffff and 8 bytes. In the second case, offsets in sections have 8 bytes, too (DWARF 5,
7.5.1). Attributes are read when they are first used. If bytes are malformed, only ``TargetError`` is raised. Chains of
references are followed up to a limit.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from dprobes.dwarf.dwarf_numbers import At, Form, UnitKind
from dprobes.dwarf.entry_shapes import (
    ALTERNATE_REFERENCES,
    CONSTANTS,
    INDEXED_ADDRESSES,
    INDEXED_TEXTS,
    UNIT_REFERENCES,
    FormSizes,
    read_value,
    skip_entry,
)
from dprobes.target.elf.byte_reader import unsigned_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dprobes.arch import ByteOrder
    from dprobes.dwarf.entry_shapes import EntryShape, RawValue, Shapes
    from dprobes.target.elf.debug_sections import SectionBytes
    from dprobes.target.elf.elf_file import ElfFile

__all__ = ["ORIGINS_MAX", "UNREADABLE", "Entry", "EntryFile", "Unit", "unit_end"]

Read = TypeVar("Read")

UNREADABLE = (IndexError, ValueError, KeyError, OverflowError)
"""Errors that decoding of malformed bytes raises."""

ORIGINS_MAX = 16
"""Maximum number of entries in a chain of origins. Compilers emit three."""

_DEPTH_MAX = 512
"""Maximum depth of nested entries."""


class EntryFile(Protocol):
    """The interface of a file with debug information, as units and entries read it."""

    @property
    def elf(self) -> ElfFile:
        """The file that contains the sections."""

    @property
    def alternate(self) -> EntryFile:
        """File with the entries that several files share (dwz); raise ``TargetError`` if it is missing."""

    def malformed(self, detail: str) -> NoReturn:
        """Raise ``TargetError`` for malformed debug information. ``detail`` is the end of the message."""

    def section(self, name: str) -> SectionBytes:
        """Return a section, decompressed, or an empty one if it is missing."""

    def read_at(self, name: str, offset: int, read: Callable[[SectionBytes], Read]) -> Read:
        """
        Return the result of ``read`` at an offset of a section.

        Decompress only about as much of the section as it reads.
        """

    def shapes_at(self, offset: int, sizes: FormSizes) -> Shapes:
        """
        Return the abbreviation declarations at an offset of ``.debug_abbrev``.

        ``sizes`` are the sizes of forms in the unit.
        """

    def entry_at(self, offset: int) -> Entry:
        """Return the entry at an offset of ``.debug_info``."""

    def type_of_signature(self, signature: int) -> Entry:
        """Return the entry of the type whose type unit has this 64-bit signature (DW_FORM_ref_sig8)."""

    def text_at(self, name: str, offset: int) -> str:
        """Return the NUL-terminated string at an offset of a section."""

    def indexed_text(self, unit: Unit, index: int) -> str:
        """Return a unit's string by its index in ``.debug_str_offsets``."""

    def indexed_address(self, unit: Unit, index: int) -> int:
        """Return a unit's link address by its index in ``.debug_addr``."""


_LONG = 0xFFFFFFFF
_VERSIONS = (2, 3, 4, 5)
_ADDRESS_SIZES = (4, 8)


def unit_end(section: SectionBytes, offset: int, order: ByteOrder) -> int:
    """Return the end of the unit at an offset of a section; raise ValueError if the unit exceeds the section."""
    place = section.start + offset
    length = int.from_bytes(section.data[place : place + 4], order)
    head = 4
    if length == _LONG:
        length, head = int.from_bytes(section.data[place + 4 : place + 12], order), 12
    end = offset + head + length
    if length < 7 or end > section.size:
        raise ValueError(f"a unit at {offset:#x} with {length} bytes")
    return end


class Unit:
    """
    Unit of a file, at ``offset`` of its section ``.debug_info``, or ``.debug_types`` if ``is_types`` is True.

    A split unit, which is in a separate file, has the program's ``skeleton`` unit. ``sizes`` has the sizes of forms.
    ``signature`` is the signature of a unit's type, or the dwo_id that a skeleton and its split unit share.
    """

    def __init__(self, file: EntryFile, section: SectionBytes, offset: int, *, is_types: bool = False) -> None:
        """
        Read the header at ``offset`` of the section ``.debug_types`` (if ``is_types``) or ``.debug_info``.

        Raise IndexError or ValueError if it is malformed.
        """
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
        """The shapes of the unit's entries by their codes."""
        return self.file.shapes_at(self._shapes_offset, self.sizes)

    @cached_property
    def root(self) -> Entry:
        """The root entry, which contains all others."""
        return self.entry(self._first)

    def entry(self, offset: int) -> Entry:
        """Return the entry at an offset of the section; raise ``TargetError`` if there is none."""
        found = self.entry_or_end(offset)
        if found is None:
            self.file.malformed(f"there is no entry at {offset:#x}")
        return found

    def entry_or_end(self, offset: int) -> Entry | None:
        """Return the entry at an offset of the section, or None for the null entry that ends a list of children."""
        if not self._first <= offset < self.end:
            self.file.malformed(f"an entry at {offset:#x} is outside of its unit")
        return Entry.at(self, offset)

    @property
    def is_skeleton(self) -> bool:
        """True for a skeleton unit: DWARF 5 marks it in the header, GNU's extension of DWARF 4 in the root entry."""
        if self.kind != UnitKind.COMPILE or self.sizes.version >= 5:
            return self.kind == UnitKind.SKELETON
        return self.root.has(At.GNU_DWO_NAME)

    @property
    def is_split(self) -> bool:
        """True for a split unit, which is in a separate file."""
        return self.kind in (UnitKind.SPLIT_COMPILE, UnitKind.SPLIT_TYPE)

    @cached_property
    def low_pc(self) -> int:
        """The base address of the unit's ranges and lists."""
        if self.skeleton is not None:
            return self.skeleton.low_pc
        return self.root.address(At.LOW_PC) or 0

    def base(self, attribute: int, gnu_attribute: int | None = None) -> int | None:
        """
        Return the value of a base attribute, the offset in a section where the unit's part begins.

        ``gnu_attribute`` is the attribute of GNU's extension of DWARF 4. Return None if the unit lacks both.
        """
        if self.skeleton is not None and attribute in (At.ADDR_BASE, At.GNU_RANGES_BASE):
            return self.skeleton.base(attribute, gnu_attribute)
        found = self.root.offset_in_section(attribute)
        return found if found is not None or gnu_attribute is None else self.root.offset_in_section(gnu_attribute)


class Entry:
    """
    A debugging information entry (DIE) at ``offset`` of its unit's section.

    Attributes are numbers of ``At``. An attribute that is missing, or is not of the requested class, is None.
    """

    __slots__ = ("_attributes", "_position", "offset", "shape", "unit")

    def __init__(self, unit: Unit, offset: int, shape: EntryShape, position: int) -> None:
        self.unit = unit
        self.offset = offset
        self.shape = shape
        self._position = position
        self._attributes: Mapping[int, tuple[int, RawValue]] | None = None

    @classmethod
    def at(cls, unit: Unit, offset: int) -> Entry | None:
        """
        Return the entry at an offset of the unit's section.

        Return None for a null entry, which ends a list of children.
        """
        try:
            code, position = unsigned_at(unit.section.data, unit.section.start + offset)
            return cls(unit, offset, unit.shapes[code], position) if code else None
        except UNREADABLE:
            unit.file.malformed(f"the entry at {offset:#x} cannot be understood")

    def __repr__(self) -> str:
        return f"Entry({self.unit!r}, {self.offset:#x}, tag {self.tag:#x})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Entry)
            and self.offset == other.offset
            and (self.unit is other.unit or self.unit.section is other.unit.section)
        )

    def __hash__(self) -> int:
        return hash(self.offset)

    @property
    def tag(self) -> int:
        """The tag of the entry, a number of ``Tag``."""
        return self.shape.tag

    # Attributes

    @property
    def attributes(self) -> Mapping[int, tuple[int, RawValue]]:
        """The form and raw value of each attribute."""
        if self._attributes is None:
            unit, position = self.unit, self._position
            data, end = unit.section.data, unit.section.start + unit.end
            found: dict[int, tuple[int, RawValue]] = {}
            try:
                for attribute, form, value in self.shape.attributes:
                    own, raw, position = read_value(data, position, end, unit.sizes, form, value)
                    found.setdefault(attribute, (own, raw))
            except UNREADABLE:
                unit.file.malformed(f"the entry at {self.offset:#x} cannot be understood")
            if position > end:
                unit.file.malformed(f"the entry at {self.offset:#x} ends outside of its unit")
            self._attributes = found
        return self._attributes

    def has(self, attribute: int) -> bool:
        """Return whether the entry has an attribute."""
        return self.shape.has(attribute)

    def number(self, attribute: int) -> int | None:
        """
        Return the value of an attribute of class constant, or None if it is missing or of another class.

        The forms ``data1`` to ``data8`` do not specify a sign, and are read as unsigned.
        """
        form, value = self.attributes.get(attribute, (0, 0))
        return value if form in CONSTANTS and isinstance(value, int) else None

    def signed(self, attribute: int) -> int | None:
        """
        Return the value of an attribute of class constant, or None if it is missing or of another class.

        The forms ``data1`` to ``data8`` are read as signed numbers of their size.
        """
        form, value = self.attributes.get(attribute, (0, 0))
        if form not in CONSTANTS or not isinstance(value, int):
            return None
        if form in (Form.SDATA, Form.UDATA, Form.IMPLICIT_CONST):
            return value
        bits = 8 * (self.unit.sizes.of(form) or 0)
        return value - (1 << bits) if value >> (bits - 1) else value

    def flag(self, attribute: int) -> bool:
        """Return the value of an attribute of class flag, or False if the entry lacks it."""
        form, value = self.attributes.get(attribute, (0, 0))
        return form == Form.FLAG_PRESENT or (form == Form.FLAG and value != 0)

    def block(self, attribute: int) -> bytes | None:
        """Return the bytes of an attribute of class exprloc or block, or None if it is missing or of another class."""
        value = self.attributes.get(attribute, (0, 0))[1]
        return value if isinstance(value, bytes) else None

    def offset_in_section(self, attribute: int) -> int | None:
        """
        Return an offset in another section, or None if the attribute is missing or of another class.

        Before DWARF 4, such an offset is a constant of 4 or 8 bytes.
        """
        form, value = self.attributes.get(attribute, (0, 0))
        is_old = self.unit.sizes.version < 4 and form in (Form.DATA4, Form.DATA8)
        return value if (form == Form.SEC_OFFSET or is_old) and isinstance(value, int) else None

    def index_in_lists(self, attribute: int) -> int | None:
        """Return the index of one of the unit's lists of ranges or locations, or None for another form."""
        form, value = self.attributes.get(attribute, (0, 0))
        return value if form in (Form.RNGLISTX, Form.LOCLISTX) and isinstance(value, int) else None

    def text(self, attribute: int) -> str | None:
        """
        Return the string of an attribute, from the entry or a string section.

        Return None if it is missing or not a string.
        """
        form, value = self.attributes.get(attribute, (0, 0))
        if isinstance(value, str):
            return value
        file = self.unit.file
        if not isinstance(value, int):
            return None
        if form in INDEXED_TEXTS:
            return file.indexed_text(self.unit, value)
        match form:
            case Form.STRP:
                return file.text_at(".debug_str", value)
            case Form.LINE_STRP:
                return file.text_at(".debug_line_str", value)
            case Form.STRP_SUP | Form.GNU_STRP_ALT:
                return file.alternate.text_at(".debug_str", value)
        return None

    def address(self, attribute: int) -> int | None:
        """Return the link address of an attribute of class address, or None if it is missing or of another class."""
        form, value = self.attributes.get(attribute, (0, 0))
        if not isinstance(value, int):
            return None
        if form == Form.ADDR:
            return value
        return self.unit.file.indexed_address(self.unit, value) if form in INDEXED_ADDRESSES else None

    def reference(self, attribute: int) -> Entry | None:
        """Return the entry to which an attribute refers, or None if it is missing or not of class reference."""
        form, value = self.attributes.get(attribute, (0, 0))
        if not isinstance(value, int) or not form:
            return None
        unit = self.unit
        if form in UNIT_REFERENCES:
            return unit.entry(unit.offset + value)
        if form == Form.REF_ADDR:
            return unit.file.entry_at(value)
        if form in ALTERNATE_REFERENCES:
            return unit.file.alternate.entry_at(value)
        return unit.file.type_of_signature(value) if form == Form.REF_SIG8 else None

    # Properties that combine attributes

    @property
    def name(self) -> str | None:
        """Name of the entry, or else of its origin or specification, or None if none has a name."""
        for entry in self.origins():
            if entry.has(At.NAME):
                return entry.text(At.NAME)
        return None

    @property
    def linker_name(self) -> str | None:
        """The symbol's name, mangled in C++ and Rust (DW_AT_linkage_name), or None if debug information has none."""
        for entry in self.origins():
            found = entry.text(At.LINKAGE_NAME) or entry.text(At.MIPS_LINKAGE_NAME)
            if found is not None:
                return found
        return None

    def origins(self) -> Iterator[Entry]:
        """Iterate over the entry and those that complete it: its abstract origin, its specification, and theirs."""
        entry: Entry | None = self
        for _ in range(ORIGINS_MAX):
            if entry is None:
                return
            yield entry
            following = entry.reference(At.ABSTRACT_ORIGIN)
            entry = following if following is not None else entry.reference(At.SPECIFICATION)
        if entry is not None:
            self.unit.file.malformed(f"the origins of the entry at {self.offset:#x} do not end")

    @property
    def origin(self) -> Entry:
        """The last of the origins. Entries with the same last origin describe the same function, variable or type."""
        last = self
        for last in self.origins():  # noqa: B007 - the last one
            pass
        return last

    @property
    def type(self) -> Entry | None:
        """Entry of the type, or else of an origin's type. It is None for ``void``, and if there is no type."""
        for entry in self.origins():
            if entry.has(At.TYPE):
                return entry.reference(At.TYPE)
        return None

    # Children

    @property
    def has_children(self) -> bool:
        """True if a list of children, which may be empty, follows the entry."""
        return self.shape.has_children

    def children(self) -> Iterator[Entry]:
        """Iterate over the children of the entry, without their descendants."""
        if not self.shape.has_children:
            return
        unit = self.unit
        position = self._end()
        while position < unit.end:
            child = unit.entry_or_end(position)
            if child is None:
                return
            yield child
            position = child.following()

    def following(self) -> int:
        """Return the offset after the entry and all its descendants."""
        end = self._end()
        if not self.shape.has_children:
            return end
        if (place := self._sibling()) is not None and end < place <= self.unit.end:
            return place
        return self._behind_children(end)

    def _sibling(self) -> int | None:
        shape, unit = self.shape, self.unit
        if shape.sibling is None or shape.sibling_form not in UNIT_REFERENCES:
            return None
        try:
            place = self._position + shape.sibling
            _, raw, _ = read_value(unit.section.data, place, unit.end, unit.sizes, shape.sibling_form, 0)
        except UNREADABLE:
            return None
        return unit.offset + raw if isinstance(raw, int) else None

    def _end(self) -> int:
        try:
            end = skip_entry(self.unit.section.data, self._position, self.shape, self.unit.sizes)
        except UNREADABLE:
            self.unit.file.malformed(f"the entry at {self.offset:#x} cannot be understood")
        return end - self.unit.section.start

    def _behind_children(self, offset: int) -> int:
        unit = self.unit
        data, start, shapes, sizes = unit.section.data, unit.section.start, unit.shapes, unit.sizes
        position, end, depth = start + offset, start + unit.end, 1
        try:
            while depth:
                code, position = unsigned_at(data, position)
                if not code:
                    depth -= 1
                else:
                    shape = shapes[code]
                    position = skip_entry(data, position, shape, sizes)
                    depth += shape.has_children
                if position >= end or depth > _DEPTH_MAX:
                    break
        except UNREADABLE:
            unit.file.malformed(f"the contents of the entry at {self.offset:#x} cannot be understood")
        if position > end or depth > _DEPTH_MAX:
            unit.file.malformed(f"the contents of the entry at {self.offset:#x} does not end")
        return position - start
