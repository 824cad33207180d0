"""
The types of a module's debug information as types of C.

Structures are read when somebody asks for their members: what a pointer leads to may be half of the program. What a
program declares comes first: a structure of the module that it has declared is the program's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.types.ctype import (
    BOOL,
    CHAR,
    INT,
    LONG_LONG,
    VOID,
    Array,
    Enumeration,
    Floating,
    Integer,
    Member,
    Pointer,
    Record,
    Void,
    size_of,
)
from dprobes.dwarf.numbers import At, Encoding, Tag

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.dpc.types.ctype import CType
    from dprobes.dwarf.debugfile import DebugFile
    from dprobes.dwarf.entries import Entry

__all__ = ["DebugTypes", "plain_name"]

_CHAIN_MAX = 64
"""Types that lead to each other without a structure: pointers to arrays of pointers …"""

_MEMBERS_MAX = 1 << 16
_COUNT_MAX = 1 << 40
_NO_ELEMENTS = (-1, (1 << 32) - 1, (1 << 64) - 1)
"""Upper bounds of arrays without elements, in the forms that compilers write."""

_PLUS_CONSTANT = 0x23

_PASS_BY_REFERENCE = 4
_CPP_LANGUAGES = frozenset((0x04, 0x1A, 0x21, 0x2B, 0x3A))
_NESTED_MAX = 64
"""Members in members that are looked at."""

_RECORDS = {Tag.STRUCTURE_TYPE: "struct", Tag.CLASS_TYPE: "struct", Tag.UNION_TYPE: "union"}
_QUALIFIERS = frozenset((Tag.CONST_TYPE, Tag.VOLATILE_TYPE, Tag.RESTRICT_TYPE, Tag.ATOMIC_TYPE, Tag.IMMUTABLE_TYPE))
_POINTERS = frozenset((Tag.POINTER_TYPE, Tag.REFERENCE_TYPE, Tag.RVALUE_REFERENCE_TYPE))
_SIGNED = frozenset((Encoding.SIGNED, Encoding.SIGNED_CHAR))
_FLOATS = frozenset((Encoding.FLOAT, Encoding.COMPLEX_FLOAT))


class DebugTypes:
    """
    Types of a module.

    ``declared`` knows the structures that the program itself defines, by ``struct`` or ``union`` and their tag.
    """

    def __init__(
        self, file: DebugFile, word_size: int, declared: Callable[[str, str], Record | None] = lambda _kind, _tag: None
    ) -> None:
        self._file = file
        self._word_size = word_size
        self.declared = declared
        self._types: dict[Entry, CType] = {}
        self._records: dict[Entry, Record] = {}

    # By entries

    def of(self, entry: Entry | None) -> CType:
        """Return the type that an entry describes; None is ``void``."""
        return self._of(entry, 0)

    def of_variable(self, entry: Entry) -> CType:
        """Return the type of a variable, parameter, or what a function returns."""
        return self.of(entry.type)

    def _of(self, entry: Entry | None, depth: int) -> CType:
        if entry is None:
            return VOID
        if depth > _CHAIN_MAX:
            entry.unit.file.malformed(f"the type at {entry.offset:#x} does not end")
        if (known := self._types.get(entry)) is None:
            known = self._types[entry] = self._made(entry, depth)
        return known

    def _made(self, entry: Entry, depth: int) -> CType:
        if entry.has(At.SIGNATURE) and (whole := entry.reference(At.SIGNATURE)) is not None:
            return self._of(whole, depth + 1)  # it has a unit of its own
        tag = entry.tag
        if tag in _QUALIFIERS or tag == Tag.TYPEDEF:
            return self._of(entry.type, depth + 1)
        if tag in _POINTERS:
            return Pointer(self._of(entry.type, depth + 1), self._word_size)
        if tag in _RECORDS:
            return self._record(entry)
        match tag:
            case Tag.BASE_TYPE:
                return self._base(entry)
            case Tag.ENUMERATION_TYPE:
                return self._enumeration(entry, depth)
            case Tag.ARRAY_TYPE:
                return self._array(entry, depth)
            case Tag.PTR_TO_MEMBER_TYPE:
                return self._word()
        return VOID  # functions, and what has no type

    def _word(self) -> Integer:
        return Integer("unsigned long", self._word_size, is_signed=False, rank=4)

    def _base(self, entry: Entry) -> CType:
        size, encoding = entry.number(At.BYTE_SIZE) or 0, entry.number(At.ENCODING)
        name = plain_name(entry.name or "")
        if encoding in _FLOATS:
            return Floating(name, size)
        if encoding == Encoding.BOOLEAN and size == 1:
            return BOOL
        is_signed = encoding in _SIGNED
        if name == "char" and is_signed and size == 1:
            return CHAR
        if size not in (1, 2, 4, 8):
            return Floating(name, size)  # as __int128: its bytes are there, and no arithmetic
        return Integer(name, size, is_signed=is_signed, rank=self._rank(name, size))

    def _rank(self, name: str, size: int) -> int:
        if size == 8:
            return LONG_LONG.rank if "long long" in name or self._word_size < 8 else 4
        if size == 4:
            return 4 if "long" in name else INT.rank
        return size  # 1 of characters, 2 of short

    def _enumeration(self, entry: Entry, depth: int) -> CType:
        values: dict[str, int] = {}
        for child in entry.children():
            if child.tag == Tag.ENUMERATOR and (value := child.number(At.CONST_VALUE)) is not None:
                values[child.text(At.NAME) or ""] = value
        size = entry.number(At.BYTE_SIZE)
        base = self._of(entry.type, depth + 1) if entry.has(At.TYPE) else VOID
        if not isinstance(base, Integer) or (size is not None and size != base.size):
            size = size if size in (1, 2, 4, 8) else 4
            is_signed = any(value < 0 for value in values.values())
            base = Integer(
                f"{'' if is_signed else 'unsigned '}int", size, is_signed=is_signed, rank=self._rank("", size)
            )
        return Enumeration(entry.name or "", base, {name: base.cut(value) for name, value in values.items()})

    def _array(self, entry: Entry, depth: int) -> CType:
        counts = [_count(child) for child in entry.children() if child.tag == Tag.SUBRANGE_TYPE]
        type_ = self._of(entry.type, depth + 1)
        if isinstance(type_, Void):
            entry.unit.file.malformed(f"the array at {entry.offset:#x} has elements without a type")
        for count in reversed(counts[:_CHAIN_MAX] or [None]):
            type_ = Array(type_, count)
        return type_

    # Structures

    def _record(self, entry: Entry) -> Record:
        kind, tag = _RECORDS[entry.tag], entry.text(At.NAME) or ""
        if tag and (declared := self.declared(kind, tag)) is not None:
            return declared
        return Record(
            tag,
            is_union=kind == "union",
            definition=lambda record: self._define(record, entry),
            is_passed_by_address=_is_passed_by_address(entry, 0),
        )

    def _define(self, record: Record, entry: Entry) -> None:
        whole: Entry | None = entry
        if entry.flag(At.DECLARATION):
            from dprobes.dpc.modules.debugscope import definition_of

            whole = definition_of(entry, self._file, self.of)
        if whole is None:
            return
        members: list[Member] = []
        for child in whole.children():
            if child.tag in (Tag.MEMBER, Tag.INHERITANCE) and (member := self._member(child)) is not None:
                members.append(member)
                if len(members) > _MEMBERS_MAX:
                    whole.unit.file.malformed(f"the structure at {whole.offset:#x} has too many members")
        record.define(members, whole.number(At.BYTE_SIZE) or 0, 1)

    def _member(self, entry: Entry) -> Member | None:
        if entry.flag(At.EXTERNAL) or entry.flag(At.DECLARATION):
            return None  # of a class, not of each of its objects
        type_ = self.of_variable(entry)
        name = (entry.text(At.NAME) or "") if entry.tag == Tag.MEMBER else ""
        offset = entry.number(At.DATA_MEMBER_LOCATION) or 0
        if (expression := entry.block(At.DATA_MEMBER_LOCATION)) is not None:
            if expression[:1] != bytes([_PLUS_CONSTANT]):
                # A virtual base: where it is, each object says in its table. Its members are not known here.
                return Member("", Record(type_.tag), 0) if isinstance(type_, Record) else None
            from dprobes.dwarf.bytenumbers import unsigned_at

            try:
                offset, _ = unsigned_at(expression, 1)
            except (IndexError, ValueError):
                entry.unit.file.malformed(f"the member at {entry.offset:#x} is nowhere")
        bits = entry.number(At.BIT_SIZE)
        if bits is None:
            return Member(name, type_, offset)
        return self._bit_field(entry, name, type_, offset, bits)

    def _bit_field(self, entry: Entry, name: str, type_: CType, offset: int, bits: int) -> Member | None:
        size = size_of(type_) or 0
        if not 0 < bits <= 8 * size:
            return None
        first = entry.number(At.DATA_BIT_OFFSET)
        if first is None:
            # Before DWARF 4: how many bits are above it in its unit, which the byte order says more about.
            unit = entry.number(At.BYTE_SIZE) or size
            above = entry.number(At.BIT_OFFSET) or 0
            first = 8 * offset + (8 * unit - above - bits if entry.unit.sizes.order == "little" else above)
        if first < 0:
            return None
        for start, unit in ((first // (8 * size) * size, size), (first // 8, size), (first // 8, self._word_size)):
            shift = first - 8 * start
            if shift + bits <= 8 * unit:
                if entry.unit.sizes.order == "big":
                    shift = 8 * unit - shift - bits
                wider = Integer("unit", unit, is_signed=False, rank=4) if unit != size else None
                return Member(name, type_, start, bits, shift, wider)
        return None


def _count(subrange: Entry) -> int | None:
    """Return how many elements a dimension has; None if it does not say so, or only at run time."""
    count = subrange.number(At.COUNT)
    if count is None:
        upper = subrange.number(At.UPPER_BOUND)
        if upper is None:
            return None
        count = 0 if upper in _NO_ELEMENTS else upper + 1 - (subrange.number(At.LOWER_BOUND) or 0)
    return count if 0 <= count <= _COUNT_MAX else None


def _is_passed_by_address(entry: Entry, depth: int) -> bool:
    """
    Return whether functions of C++ get the address of an object of a class, and not its bytes.

    Some compilers say so. Else it is a class with a destructor, a copy constructor or a virtual function of its own, or
    with a base or member of such a class (Itanium C++ ABI, 1.1, "non-trivial for the purposes of calls").
    """
    whole = entry.reference(At.SIGNATURE) if entry.has(At.SIGNATURE) else entry
    if whole is None or depth > _NESTED_MAX:
        return False
    if (convention := whole.number(At.CALLING_CONVENTION)) is not None:
        return convention == _PASS_BY_REFERENCE
    if whole.unit.root.number(At.LANGUAGE) not in _CPP_LANGUAGES:
        return False
    name = (whole.text(At.NAME) or "").partition("<")[0]
    for child in whole.children():
        if child.tag == Tag.SUBPROGRAM and _makes_non_trivial(child, name, whole):
            return True
        if child.tag in (Tag.MEMBER, Tag.INHERITANCE) and not (child.flag(At.EXTERNAL) or child.flag(At.DECLARATION)):
            type_ = child.type
            while type_ is not None and type_.tag in (*_QUALIFIERS, Tag.TYPEDEF, Tag.ARRAY_TYPE):
                type_, depth = type_.type, depth + 1
                if depth > _CHAIN_MAX:
                    return False
            if child.number(At.VIRTUALITY) or (
                type_ is not None and type_.tag in _RECORDS and _is_passed_by_address(type_, depth + 1)
            ):
                return True
    return False


def _makes_non_trivial(function: Entry, name: str, whole: Entry) -> bool:
    """Return whether a function of a class is a destructor, copies or moves an object, or is virtual."""
    if function.number(At.VIRTUALITY):
        return True
    own = function.text(At.NAME) or ""
    if own == f"~{name}":
        return not function.flag(At.ARTIFICIAL)
    if own != name:
        return False
    parameters = [child for child in function.children() if child.tag == Tag.FORMAL_PARAMETER]
    if len(parameters) < 2 or function.flag(At.ARTIFICIAL):  # the first is the object
        return False
    type_ = parameters[1].type
    if type_ is None or type_.tag not in (Tag.REFERENCE_TYPE, Tag.RVALUE_REFERENCE_TYPE):
        return False
    target = type_.type
    while target is not None and target.tag in _QUALIFIERS:
        target = target.type
    return target == whole


def plain_name(name: str) -> str:
    """Return the name of a type of C as it is usually written: ``unsigned long`` for ``long unsigned int``."""
    words = name.split()
    if "unsigned" in words:
        words = ["unsigned", *(word for word in words if word != "unsigned")]
    if len(words) > 1 and words[-1] == "int" and words[-2] in ("long", "short"):
        words.pop()
    return " ".join(words)
