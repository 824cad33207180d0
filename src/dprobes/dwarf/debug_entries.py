"""
Entries of debug information (DIEs): what they are, their attributes by class, and the entries in them.

An attribute is read when it is asked for. Whatever the bytes are, nothing but ``TargetError`` comes out, and no chain
of references is followed without end.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, TypeVar

from dprobes.dwarf.dwarf_numbers import At, Form
from dprobes.target.elf.byte_reader import signed_at, text_at, unsigned_at

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from dprobes.arch import ByteOrder
    from dprobes.dwarf.debug_sections import SectionBytes
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.elf.file_contents import FileBytes

__all__ = [
    "ORIGINS_MAX",
    "UNREADABLE",
    "Entry",
    "EntryFile",
    "EntryShape",
    "EntryUnit",
    "FormSizes",
    "Shapes",
    "read_shapes",
]

# The shapes of entries (``.debug_abbrev``), and how to get behind an entry of a shape without reading it.
#
# ::
#
#     .debug_abbrev   code | tag | u8 has children | (attribute, form [, signed value])* | 0 0     all LEB128; 0 ends
#
# Rules: DWARF 5, 7.5.3 to 7.5.6.


_SHAPES_MAX = 1 << 17
_ATTRIBUTES_MAX = 1 << 10

_LEB = rb"[\x80-\xff]*+[\x00-\x7f]"
_SHAPE = re.compile(
    rb"%b%b.(?:(?!\x00\x00)%b(?:\x21%b|(?!\x21)%b))*+\x00\x00" % (_LEB, _LEB, _LEB, _LEB, _LEB), re.DOTALL
)
"""A whole shape: code, tag, whether there are children, attributes with their forms; 0x21 is IMPLICIT_CONST."""

_NUMBER, _TEXT, _BLOCK, _BLOCK1, _BLOCK2, _BLOCK4, _INDIRECT = -1, -2, -3, -4, -5, -6, -7
"""Steps that have to look at the bytes; a positive one says how many there are."""

_LOOKING = {
    Form.SDATA: _NUMBER, Form.UDATA: _NUMBER, Form.REF_UDATA: _NUMBER, Form.STRX: _NUMBER, Form.ADDRX: _NUMBER,
    Form.LOCLISTX: _NUMBER, Form.RNGLISTX: _NUMBER, Form.GNU_ADDR_INDEX: _NUMBER, Form.GNU_STR_INDEX: _NUMBER,
    Form.STRING: _TEXT, Form.BLOCK: _BLOCK, Form.EXPRLOC: _BLOCK, Form.BLOCK1: _BLOCK1, Form.BLOCK2: _BLOCK2,
    Form.BLOCK4: _BLOCK4, Form.INDIRECT: _INDIRECT,
}  # fmt: skip

_FIXED_SIZES = {
    Form.DATA1: 1, Form.DATA2: 2, Form.DATA4: 4, Form.DATA8: 8, Form.DATA16: 16, Form.FLAG: 1, Form.FLAG_PRESENT: 0,
    Form.IMPLICIT_CONST: 0, Form.REF1: 1, Form.REF2: 2, Form.REF4: 4, Form.REF8: 8, Form.REF_SIG8: 8,
    Form.REF_SUP4: 4, Form.REF_SUP8: 8, Form.STRX1: 1, Form.STRX2: 2, Form.STRX3: 3, Form.STRX4: 4,
    Form.ADDRX1: 1, Form.ADDRX2: 2, Form.ADDRX3: 3, Form.ADDRX4: 4,
}  # fmt: skip
"""The sizes in bytes of forms that have the same in all units."""

_OFFSETS = frozenset(
    (Form.STRP, Form.LINE_STRP, Form.STRP_SUP, Form.SEC_OFFSET, Form.GNU_REF_ALT, Form.GNU_STRP_ALT, Form.REF_ADDR)
)
"""Forms that are the offset of something in a section."""


class FormSizes(NamedTuple):
    """What the header of a unit says of sizes: in bytes of an address, and of an offset in a section (4 or 8)."""

    address: int
    offset: int
    version: int
    order: ByteOrder

    def of(self, form: int) -> int | None:
        """Return how many bytes a form has; None if they say it themselves. ValueError for an unknown form."""
        if (fixed := _FIXED_SIZES.get(form)) is not None:
            return fixed
        if form in _OFFSETS:
            return self.address if form == Form.REF_ADDR and self.version == 2 else self.offset
        if form == Form.ADDR:
            return self.address
        if form in _LOOKING:
            return None
        raise ValueError(f"a form {form:#x}")


class AttributeShape(NamedTuple):
    """An attribute and its form; ``value`` is that of a form whose value is here."""

    attribute: int
    form: int
    value: int


class EntryShape(NamedTuple):
    """
    The shape of entries.

    ``steps`` lead behind all attributes; ``sibling`` is how many bytes are before the reference to the next sibling,
    whose form is ``sibling_form``, and None if there is none, or if they are not always as many.
    """

    tag: int
    has_children: bool
    attributes: tuple[AttributeShape, ...]
    steps: tuple[int, ...]
    sibling: int | None
    sibling_form: int

    def has(self, attribute: int) -> bool:
        """Return whether entries have an attribute."""
        return any(each.attribute == attribute for each in self.attributes)


class Shapes(dict[int, EntryShape]):
    """
    The shapes of a unit by their codes, each understood when it is asked for: most units have hundreds, and few are.

    KeyError for a code that there is not, IndexError or ValueError for a shape that cannot be understood.
    """

    def __init__(self, data: FileBytes, places: Mapping[int, tuple[int, int]], sizes: FormSizes) -> None:
        super().__init__()
        self._data = data
        self._places = places
        self._sizes = sizes

    def __missing__(self, code: int) -> EntryShape:
        tag, position = self._places[code]
        found = self[code] = _shape_at(self._data, tag, position, self._sizes)
        return found

    def with_tags(self, tags: Collection[int]) -> Iterator[tuple[int, EntryShape]]:
        """Give the codes and shapes of entries with one of the tags."""
        return ((code, self[code]) for code, (tag, _) in self._places.items() if tag in tags)


def read_shapes(section: SectionBytes, offset: int, sizes: FormSizes) -> Shapes:
    """Return the shapes of a unit; IndexError or ValueError if nobody can tell where one ends."""
    data, position, end = section.data, section.start + offset, section.end
    if not section.start <= position < end:
        raise IndexError("shapes outside the section")
    places: dict[int, tuple[int, int]] = {}
    match = _SHAPE.match
    while data[position] and len(places) < _SHAPES_MAX:
        found = match(data, position, end)
        if found is None:
            raise IndexError("a shape that does not end")
        code, behind = unsigned_at(data, position)
        tag, behind = unsigned_at(data, behind)
        places[code] = tag, behind
        position = found.end()
        if position >= end:
            break
    if position >= end and not section.is_whole:
        raise IndexError("shapes behind what is known of the section")
    return Shapes(data, places, sizes)


def _shape_at(data: FileBytes, tag: int, position: int, sizes: FormSizes) -> EntryShape:
    """Return the shape whose attributes are described from ``position`` on."""
    has_children = data[position] == 1
    position += 1
    attributes: list[AttributeShape] = []
    while True:
        attribute, position = unsigned_at(data, position)
        form, position = unsigned_at(data, position)
        if not attribute and not form:
            break
        value = 0
        if form == Form.IMPLICIT_CONST:
            value, position = signed_at(data, position)
        attributes.append(AttributeShape(attribute, form, value))
        if len(attributes) > _ATTRIBUTES_MAX:
            raise ValueError("an entry with too many attributes")
    return _shape(tag, has_children, attributes, sizes)


def _shape(tag: int, has_children: bool, attributes: list[AttributeShape], sizes: FormSizes) -> EntryShape:
    steps: list[int] = []
    sibling: int | None = None
    sibling_form = 0
    for attribute, form, _ in attributes:
        size = sizes.of(form)
        if attribute == At.SIBLING and len(steps) <= 1 and (not steps or steps[0] >= 0):
            sibling, sibling_form = sum(steps), form
        if size is None:
            steps.append(_LOOKING[form])
        elif steps and steps[-1] >= 0:
            steps[-1] += size
        else:
            steps.append(size)
    return EntryShape(tag, has_children, tuple(attributes), tuple(steps), sibling, sibling_form)


def skip_entry(data: FileBytes, position: int, shape: EntryShape, sizes: FormSizes) -> int:
    """Return where an entry ends whose attributes begin at ``position``."""
    for step in shape.steps:
        position = position + step if step >= 0 else _looked(data, position, step, sizes)
    return position


def _looked(data: FileBytes, position: int, step: int, sizes: FormSizes) -> int:
    match step:
        case -1:  # a number
            while data[position] >= 0x80:
                position += 1
            return position + 1
        case -2:  # a text
            end = data.find(b"\0", position)
            if end < 0:
                raise IndexError("a text that does not end")
            return end + 1
        case -3:  # a block
            size, position = unsigned_at(data, position)
            return position + size
        case -7:  # a form that is written here
            form, position = unsigned_at(data, position)
            if form in (Form.INDIRECT, Form.IMPLICIT_CONST):
                raise ValueError(f"an indirect form {form:#x}")
            fixed = sizes.of(form)
            return position + fixed if fixed is not None else _looked(data, position, _LOOKING[form], sizes)
    size = {_BLOCK1: 1, _BLOCK2: 2, _BLOCK4: 4}[step]
    return position + size + int.from_bytes(data[position : position + size], sizes.order)


# Values of attributes, as their forms encode them (DWARF 5, 7.5.5, 7.5.6), and the classes that forms belong to.


UNIT_REFERENCES = frozenset((Form.REF1, Form.REF2, Form.REF4, Form.REF8, Form.REF_UDATA))
ALTERNATE_REFERENCES = frozenset((Form.GNU_REF_ALT, Form.REF_SUP4, Form.REF_SUP8))
INDEXED_TEXTS = frozenset((Form.STRX, Form.STRX1, Form.STRX2, Form.STRX3, Form.STRX4, Form.GNU_STR_INDEX))
INDEXED_ADDRESSES = frozenset((Form.ADDRX, Form.ADDRX1, Form.ADDRX2, Form.ADDRX3, Form.ADDRX4, Form.GNU_ADDR_INDEX))
CONSTANTS = frozenset((Form.DATA1, Form.DATA2, Form.DATA4, Form.DATA8, Form.SDATA, Form.UDATA, Form.IMPLICIT_CONST))
_NUMBERS = frozenset(
    (Form.UDATA, Form.REF_UDATA, Form.STRX, Form.ADDRX, Form.LOCLISTX, Form.RNGLISTX, Form.GNU_ADDR_INDEX,
     Form.GNU_STR_INDEX)
)  # fmt: skip
_BLOCK_SIZES = {Form.BLOCK1: 1, Form.BLOCK2: 2, Form.BLOCK4: 4}

RawValue = int | bytes | str
"""What the bytes of an attribute are: a number that its form gives a meaning, or a block, or a text."""


def read_value(
    data: FileBytes, position: int, end: int, sizes: FormSizes, form: int, implicit: int
) -> tuple[int, RawValue, int]:
    """
    Return the form of an attribute at a position, what its bytes say, and where they end.

    ``end`` is that of the unit, ``implicit`` the value of a form whose value is in the shape. IndexError or ValueError
    if the bytes cannot be understood.
    """
    size = sizes.of(form)
    if size is not None:
        if not size:
            return form, implicit if form == Form.IMPLICIT_CONST else 1, position
        behind = position + size
        if form == Form.DATA16:
            return form, bytes(data[position:behind]), behind
        return form, int.from_bytes(data[position:behind], sizes.order), behind
    if form in _NUMBERS:
        found, position = unsigned_at(data, position)
        return form, found, position
    if form == Form.SDATA:
        found, position = signed_at(data, position)
        return form, found, position
    if form == Form.STRING:
        text, position = text_at(data, position, end)
        return form, text, position
    if form == Form.INDIRECT:
        form, position = unsigned_at(data, position)
        if form in (Form.INDIRECT, Form.IMPLICIT_CONST):
            raise ValueError("a form of a form")
        return read_value(data, position, end, sizes, form, 0)
    if (head := _BLOCK_SIZES.get(form)) is not None:
        length = int.from_bytes(data[position : position + head], sizes.order)
        position += head
    else:
        length, position = unsigned_at(data, position)
    behind = position + length
    if behind > end:
        raise ValueError("a block outside of the unit")
    return form, bytes(data[position:behind]), behind


Read = TypeVar("Read")

UNREADABLE = (IndexError, ValueError, KeyError, OverflowError)
"""What reading bytes that are not as they should be raises."""

ORIGINS_MAX = 16
"""Entries of a chain of origins; compilers make three."""

_DEPTH_MAX = 512
"""How deep entries are in each other."""


class EntryFile(Protocol):
    """What entries ask of their file."""

    @property
    def elf(self) -> ElfFile:
        """The file that the sections are in."""

    @property
    def alternate(self) -> EntryFile:
        """The file of entries that several files share (dwz); raise ``TargetError`` if it is not there."""

    def malformed(self, detail: str) -> NoReturn:
        """Raise the error that says that the debug information is not well-formed."""

    def section(self, name: str) -> SectionBytes:
        """Return a section, decompressed; an empty one if there is none."""

    def read_at(self, name: str, offset: int, read: Callable[[SectionBytes], Read]) -> Read:
        """Return what is read at an offset of a section, of which not much more is decompressed than that takes."""

    def shapes_at(self, offset: int, sizes: FormSizes) -> Shapes:
        """Return the shapes of entries at an offset of their section."""

    def entry_at(self, offset: int) -> Entry:
        """Return the entry at an offset of ``.debug_info``."""

    def type_of_signature(self, signature: int) -> Entry:
        """Return the type that has a unit of its own."""

    def text_at(self, name: str, offset: int) -> str:
        """Return a text of a section."""

    def indexed_text(self, unit: EntryUnit, index: int) -> str:
        """Return a text of a unit by its number."""

    def indexed_address(self, unit: EntryUnit, index: int) -> int:
        """Return a link address of a unit by its number."""


class EntryUnit(Protocol):
    """What entries, and those who read them, ask of their unit; ``end`` is the offset behind it in its section."""

    file: EntryFile
    section: SectionBytes
    offset: int
    end: int
    sizes: FormSizes

    @property
    def skeleton(self) -> EntryUnit | None:
        """The unit in the program of a unit in a file of its own."""

    @property
    def shapes(self) -> Shapes:
        """The shapes of its entries by their codes."""

    @property
    def root(self) -> Entry:
        """The entry that all others are in."""

    @property
    def is_split(self) -> bool:
        """Whether it is the part of split debug information that is in a file of its own."""

    @property
    def low_pc(self) -> int:
        """What the addresses of its ranges and lists count from."""

    def entry(self, offset: int) -> Entry:
        """Return the entry at an offset of the section; raise ``TargetError`` if there is none."""

    def entry_or_end(self, offset: int) -> Entry | None:
        """Return the entry at an offset of the section; None if the end of the children of one is there."""

    def base(self, attribute: int, gnu_attribute: int | None = None) -> int | None:
        """Return where the unit's part of a section begins."""


class Entry:
    """
    An entry at ``offset`` of the section of its unit; ``tag`` is what it is.

    Attributes are numbers of ``At``. One that is missing, or of another class than the one that is asked for, is None.
    """

    __slots__ = ("_attributes", "_position", "offset", "shape", "unit")

    def __init__(self, unit: EntryUnit, offset: int, shape: EntryShape, position: int) -> None:
        self.unit = unit
        self.offset = offset
        self.shape = shape
        self._position = position
        self._attributes: Mapping[int, tuple[int, RawValue]] | None = None

    @classmethod
    def at(cls, unit: EntryUnit, offset: int) -> Entry | None:
        """Return the entry at an offset; None if the end of the children of one is there."""
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
        """What the entry is: a number of ``Tag``."""
        return self.shape.tag

    # Attributes

    @property
    def attributes(self) -> Mapping[int, tuple[int, RawValue]]:
        """Form and value of each attribute as they are in the bytes."""
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
        """Return a constant; of the forms ``data1`` to ``data8``, which have no sign, an unsigned one."""
        form, value = self.attributes.get(attribute, (0, 0))
        return value if form in CONSTANTS and isinstance(value, int) else None

    def signed(self, attribute: int) -> int | None:
        """Return a constant; of forms that have no sign as a signed number of their size."""
        form, value = self.attributes.get(attribute, (0, 0))
        if form not in CONSTANTS or not isinstance(value, int):
            return None
        if form in (Form.SDATA, Form.UDATA, Form.IMPLICIT_CONST):
            return value
        bits = 8 * (self.unit.sizes.of(form) or 0)
        return value - (1 << bits) if value >> (bits - 1) else value

    def flag(self, attribute: int) -> bool:
        """Return whether a flag is set."""
        form, value = self.attributes.get(attribute, (0, 0))
        return form == Form.FLAG_PRESENT or (form == Form.FLAG and value != 0)

    def block(self, attribute: int) -> bytes | None:
        """Return an expression, or another block of bytes."""
        value = self.attributes.get(attribute, (0, 0))[1]
        return value if isinstance(value, bytes) else None

    def offset_in_section(self, attribute: int) -> int | None:
        """Return a place in another section; before DWARF 4 it is a constant of 4 or 8 bytes."""
        form, value = self.attributes.get(attribute, (0, 0))
        is_old = self.unit.sizes.version < 4 and form in (Form.DATA4, Form.DATA8)
        return value if (form == Form.SEC_OFFSET or is_old) and isinstance(value, int) else None

    def index_in_lists(self, attribute: int) -> int | None:
        """Return the number of a list of ranges or locations of the unit."""
        form, value = self.attributes.get(attribute, (0, 0))
        return value if form in (Form.RNGLISTX, Form.LOCLISTX) and isinstance(value, int) else None

    def text(self, attribute: int) -> str | None:
        """Return a text."""
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
        """Return a link address."""
        form, value = self.attributes.get(attribute, (0, 0))
        if not isinstance(value, int):
            return None
        if form == Form.ADDR:
            return value
        return self.unit.file.indexed_address(self.unit, value) if form in INDEXED_ADDRESSES else None

    def reference(self, attribute: int) -> Entry | None:
        """Return another entry."""
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

    # What several attributes say together

    @property
    def name(self) -> str | None:
        """Its name; that of its origin or specification if it has none itself."""
        for entry in self.origins():
            if entry.has(At.NAME):
                return entry.text(At.NAME)
        return None

    @property
    def linker_name(self) -> str | None:
        """The name of its symbol, where that is not its name: of C++ and Rust."""
        for entry in self.origins():
            found = entry.text(At.LINKAGE_NAME) or entry.text(At.MIPS_LINKAGE_NAME)
            if found is not None:
                return found
        return None

    def origins(self) -> Iterator[Entry]:
        """Give the entry, and those that complete it: its abstract origin, its specification, and theirs."""
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
        """The last of its origins: two entries with the same one are about the same thing."""
        last = self
        for last in self.origins():  # noqa: B007 - the last one
            pass
        return last

    @property
    def type(self) -> Entry | None:
        """Its type; that of its origin if it has none itself; None for void, or if it has none."""
        for entry in self.origins():
            if entry.has(At.TYPE):
                return entry.reference(At.TYPE)
        return None

    # Entries in it

    @property
    def has_children(self) -> bool:
        """Whether there may be entries in it."""
        return self.shape.has_children

    def children(self) -> Iterator[Entry]:
        """Give the entries in it."""
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
        """Return the offset behind the entry and all entries in it."""
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
            unit.file.malformed(f"what is in the entry at {self.offset:#x} cannot be understood")
        if position > end or depth > _DEPTH_MAX:
            unit.file.malformed(f"what is in the entry at {self.offset:#x} does not end")
        return position - start
