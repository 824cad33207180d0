"""
Shapes of entries, which DWARF calls abbreviation declarations (``.debug_abbrev``), and the decoding of entries.

::

    .debug_abbrev   code | tag | u8 has children | (attribute, form [, signed value])* | 0 0     all LEB128; 0 ends

Rules: DWARF 5, 7.5.3 to 7.5.6.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from dprobes.dwarf.dwarf_numbers import At, Form
from dprobes.target.elf.byte_reader import signed_at, text_at, unsigned_at

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from dprobes.arch import ByteOrder
    from dprobes.target.elf.debug_sections import SectionBytes
    from dprobes.target.elf.file_contents import FileBytes

__all__ = [
    "ALTERNATE_REFERENCES",
    "CONSTANTS",
    "INDEXED_ADDRESSES",
    "INDEXED_TEXTS",
    "UNIT_REFERENCES",
    "EntryShape",
    "FormSizes",
    "RawValue",
    "Shapes",
    "read_shapes",
    "read_value",
    "skip_entry",
]

_SHAPES_MAX = 1 << 17
_ATTRIBUTES_MAX = 1 << 10

_LEB = rb"[\x80-\xff]*+[\x00-\x7f]"
_SHAPE = re.compile(
    rb"%b%b.(?:(?!\x00\x00)%b(?:\x21%b|(?!\x21)%b))*+\x00\x00" % (_LEB, _LEB, _LEB, _LEB, _LEB), re.DOTALL
)
"""
Whole abbreviation declaration: code, tag, flag for children, and attributes with their forms.

The form 0x21 is IMPLICIT_CONST, which a signed value follows.
"""

_NUMBER, _TEXT, _BLOCK, _BLOCK1, _BLOCK2, _BLOCK4, _INDIRECT = -1, -2, -3, -4, -5, -6, -7
"""Negative steps, for forms whose size depends on the value. A positive step is a number of bytes to skip."""

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
"""Sizes in bytes of forms that have the same size in all units."""

_OFFSETS = frozenset(
    (Form.STRP, Form.LINE_STRP, Form.STRP_SUP, Form.SEC_OFFSET, Form.GNU_REF_ALT, Form.GNU_STRP_ALT, Form.REF_ADDR)
)
"""Forms that are an offset in a section."""


class FormSizes(NamedTuple):
    """Sizes in bytes, from a unit's header, that the sizes of forms depend on: of an address and of an offset."""

    address: int
    offset: int
    version: int
    order: ByteOrder

    def of(self, form: int) -> int | None:
        """Return the size of a form in bytes, or None if it depends on the value. ValueError for an unknown form."""
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
    """Attribute and its form. ``value`` is used by the form IMPLICIT_CONST."""

    attribute: int
    form: int
    value: int


class EntryShape(NamedTuple):
    """
    Abbreviation declaration: the tag and attributes of all entries with its code.

    ``steps`` skip all attributes. ``sibling`` is the number of bytes before the reference to the next sibling, whose
    form is ``sibling_form``. It is None if there is no such reference, or the number varies.
    """

    tag: int
    has_children: bool
    attributes: tuple[AttributeShape, ...]
    steps: tuple[int, ...]
    sibling: int | None
    sibling_form: int

    def has(self, attribute: int) -> bool:
        """Return whether entries with this abbreviation code have an attribute, a number of ``At``."""
        return any(each.attribute == attribute for each in self.attributes)


class Shapes(dict[int, EntryShape]):
    """
    The abbreviation declarations of a unit by code, parsed on demand: most units have hundreds, and few are used.

    Access raises KeyError for a missing code, IndexError or ValueError for a malformed shape.
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
        """Iterate over the codes and shapes of entries with one of the tags."""
        return ((code, self[code]) for code, (tag, _) in self._places.items() if tag in tags)


def read_shapes(section: SectionBytes, offset: int, sizes: FormSizes) -> Shapes:
    """
    Return the abbreviation declarations at an offset of ``.debug_abbrev`` for a unit with these sizes of forms.

    Raise IndexError or ValueError if the end of one is not found.
    """
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
        raise IndexError("shapes after what is known of the section")
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
    """Return the offset after an entry of this shape, whose attributes begin at ``position``."""
    for step in shape.steps:
        position = position + step if step >= 0 else _looked(data, position, step, sizes)
    return position


def _looked(data: FileBytes, position: int, step: int, sizes: FormSizes) -> int:
    match step:
        case -1:  # a number
            while data[position] >= 0x80:
                position += 1
            return position + 1
        case -2:  # a string
            end = data.find(b"\0", position)
            if end < 0:
                raise IndexError("a text that does not end")
            return end + 1
        case -3:  # a block
            size, position = unsigned_at(data, position)
            return position + size
        case -7:  # a form that is in the entry itself
            form, position = unsigned_at(data, position)
            if form in (Form.INDIRECT, Form.IMPLICIT_CONST):
                raise ValueError(f"an indirect form {form:#x}")
            fixed = sizes.of(form)
            return position + fixed if fixed is not None else _looked(data, position, _LOOKING[form], sizes)
    size = {_BLOCK1: 1, _BLOCK2: 2, _BLOCK4: 4}[step]
    return position + size + int.from_bytes(data[position : position + size], sizes.order)


# Values of attributes, and the classes of forms.


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
"""Raw value of an attribute: a block, a string, or a number whose meaning depends on the form."""


def read_value(
    data: FileBytes, position: int, end: int, sizes: FormSizes, form: int, implicit: int
) -> tuple[int, RawValue, int]:
    """
    Return the form of an attribute at a position, its raw value, and the position after it.

    ``end`` is the end of the unit, ``implicit`` the value of the form IMPLICIT_CONST. Raise IndexError or ValueError if
    the bytes are malformed.
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
