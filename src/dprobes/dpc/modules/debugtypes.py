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
from dprobes.dwarf.search import entries_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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

_RECORDS = {Tag.STRUCTURE_TYPE: "struct", Tag.CLASS_TYPE: "struct", Tag.UNION_TYPE: "union"}
_QUALIFIERS = frozenset((Tag.CONST_TYPE, Tag.VOLATILE_TYPE, Tag.RESTRICT_TYPE, Tag.ATOMIC_TYPE, Tag.IMMUTABLE_TYPE))
_POINTERS = frozenset((Tag.POINTER_TYPE, Tag.REFERENCE_TYPE, Tag.RVALUE_REFERENCE_TYPE))
_SIGNED = frozenset((Encoding.SIGNED, Encoding.SIGNED_CHAR))
_FLOATS = frozenset((Encoding.FLOAT, Encoding.COMPLEX_FLOAT))

_TAGS = {
    "struct": (Tag.STRUCTURE_TYPE, Tag.CLASS_TYPE),
    "union": (Tag.UNION_TYPE,),
    "enum": (Tag.ENUMERATION_TYPE,),
}
_NAMED = (Tag.TYPEDEF, Tag.STRUCTURE_TYPE, Tag.CLASS_TYPE, Tag.UNION_TYPE, Tag.ENUMERATION_TYPE, Tag.BASE_TYPE)


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

    # By names

    def named(self, name: str) -> CType | None:
        """Return the type that ``typedef`` gives a name, or in C++ a class."""
        found = self._best(name, _NAMED)
        return None if found is None else self.of(found)

    def tagged(self, kind: str, tag: str) -> CType | None:
        """Return a structure, union or enumeration by its tag."""
        found = self._best(tag, _TAGS[kind])
        return None if found is None else self.of(found)

    def enumerator(self, name: str) -> int | None:
        """Return the value of an enumerator."""
        found = next(self._search(name, (Tag.ENUMERATOR,)), None)
        return None if found is None else found.number(At.CONST_VALUE)

    def _best(self, name: str, tags: tuple[int, ...]) -> Entry | None:
        """Return the first definition of a name."""
        found = self._search(name, tags, declarations=False)
        return next((entry for entry in found if not entry.flag(At.DECLARATION)), None)

    def _search(self, name: str, tags: tuple[int, ...], *, declarations: bool = True) -> Iterator[Entry]:
        for file in self._file.all_files():
            yield from entries_named(file, name, tags, declarations=declarations)

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
        return Record(tag, is_union=kind == "union", definition=lambda record: self._define(record, entry))

    def _define(self, record: Record, entry: Entry) -> None:
        whole: Entry | None = entry
        if entry.has(At.SIGNATURE):
            whole = entry.reference(At.SIGNATURE)
        elif entry.flag(At.DECLARATION):
            whole = self._best(record.tag, (entry.tag,)) if record.tag else None
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
                return None  # a virtual base
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


def plain_name(name: str) -> str:
    """Return the name of a type of C as it is usually written: ``unsigned long`` for ``long unsigned int``."""
    words = name.split()
    if "unsigned" in words:
        words = ["unsigned", *(word for word in words if word != "unsigned")]
    if len(words) > 1 and words[-1] == "int" and words[-2] in ("long", "short"):
        words.pop()
    return " ".join(words)
