"""Values of attributes, as their forms encode them (DWARF 5, 7.5.5, 7.5.6), and the classes that forms belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dwarf.bytenumbers import signed_at, text_at, unsigned_at
from dprobes.dwarf.numbers import Form

if TYPE_CHECKING:
    from dprobes.dwarf.abbreviations import FormSizes
    from dprobes.target.elf.contents import FileBytes

__all__ = [
    "ALTERNATE_REFERENCES",
    "CONSTANTS",
    "INDEXED_ADDRESSES",
    "INDEXED_TEXTS",
    "UNIT_REFERENCES",
    "RawValue",
    "read_value",
]

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
