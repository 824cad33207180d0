"""
The types of C: their sizes and layouts in the target's ABI, and the types of its operators (C17 6.2.5, 6.3.1).

Types compare by value, except structures and unions, which compare by identity because they may be declared before they
are defined.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "BOOL",
    "CHAR",
    "INT",
    "LONG_LONG",
    "LONG_RANK",
    "STRING",
    "UNSIGNED",
    "UNSIGNED_CHAR",
    "UNSIGNED_LONG_LONG",
    "UNSIGNED_SHORT",
    "VOID",
    "Array",
    "CType",
    "Enumeration",
    "Floating",
    "Integer",
    "Member",
    "Network",
    "Pointer",
    "Record",
    "Stack",
    "String",
    "Void",
    "alignment_of",
    "common_type",
    "integer_of",
    "is_same_layout",
    "is_scalar",
    "laid_out",
    "promoted",
    "size_of",
    "unsigned_of",
]

_PAIRS_MAX = 1 << 14
"""Maximum number of pairs of structures that are compared; two types that need more count as equal."""

_UNNAMED_MAX = 16
"""Maximum depth of nested unnamed structures that is searched."""


@dataclass(frozen=True, slots=True)
class Void:
    """The C type ``void``."""

    def __str__(self) -> str:
        return "void"


@dataclass(frozen=True, slots=True)
class Integer:
    """Integer type. ``rank`` orders types of one size, such as ``long`` and ``long long`` (C17 6.3.1.1)."""

    name: str
    size: int
    is_signed: bool
    rank: int
    is_bool: bool = False

    @property
    def bits(self) -> int:
        """The width in bits."""
        return 8 * self.size

    @property
    def is_long(self) -> bool:
        """True for ``long`` and ``unsigned long``, which have the size of a word."""
        return self.rank == LONG_RANK and self.size >= INT.size

    @property
    def bits_of_64(self) -> int:
        """The width in bits in 64-bit programs; handlers with the same code for 32 bits suit both word sizes."""
        return UNSIGNED_LONG_LONG.bits if self.is_long else self.bits

    def cut(self, value: int) -> int:
        """Return a number truncated to the width of this type, and sign- or zero-extended; for ``_Bool``, 0 or 1."""
        if self.is_bool:
            return int(value != 0)
        value &= (1 << self.bits) - 1
        return value - (1 << self.bits) if self.is_signed and value >> (self.bits - 1) else value

    def holds(self, value: int) -> bool:
        """Return whether this type can represent a number."""
        return self.cut(value) == value

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Floating:
    """A type with a size but without operations: floating-point numbers, and 128-bit integers."""

    name: str
    size: int

    def __str__(self) -> str:
        return self.name

    @property
    def why_no_number(self) -> str:
        """The error message for an operation on values of the type."""
        if "int128" in self.name:
            return f"there is no arithmetic on more than 64 bits: this is '{self.name}'"
        return f"there is no floating-point arithmetic: this is '{self.name}'"


@dataclass(frozen=True, slots=True)
class Enumeration:
    """Enumerated type: its values by their names. ``base`` is the integer type that stores them."""

    tag: str
    base: Integer
    values: Mapping[str, int] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"enum {self.tag}"


@dataclass(frozen=True, slots=True)
class Pointer:
    """A pointer; ``size`` is the word size of the target in bytes."""

    target: CType
    size: int

    def __str__(self) -> str:
        return f"{self.target} *" if not isinstance(self.target, Pointer) else f"{self.target}*"


@dataclass(frozen=True, slots=True)
class Array:
    """
    Array. ``count`` is None if the type does not state the number of elements.

    For memory whose length is known only at the hit, ``shown`` is the maximum number of bytes to print; otherwise it is
    0.
    """

    element: CType
    count: int | None
    shown: int = 0

    def __str__(self) -> str:
        return f"{self.element} [{'' if self.count is None else self.count}]"


class Member(NamedTuple):
    """
    Member of a structure or union.

    ``offset`` is in bytes. For a bit field, ``bits`` is its width, and ``shift`` the number of lower bits in its unit
    at ``offset``. For any other member, ``bits`` is None. ``unit`` is the type of the unit if a unit of the field's own
    type does not contain all of its bits.
    """

    name: str
    type: CType
    offset: int
    bits: int | None = None
    shift: int = 0
    unit: Integer | None = None


class Record:
    """
    Structure or union. ``members`` is None until ``define`` has been called.

    ``definition`` defines it when its members or size are first needed. ``is_passed_by_address`` is True for a C++
    class with non-trivial objects: functions get the address of a copy.
    """

    __slots__ = ("_alignment", "_definition", "_members", "_size", "is_passed_by_address", "is_union", "tag")

    def __init__(
        self,
        tag: str,
        *,
        is_union: bool = False,
        definition: Callable[[Record], None] | None = None,
        is_passed_by_address: bool = False,
    ) -> None:
        self.tag = tag
        self.is_union = is_union
        self.is_passed_by_address = is_passed_by_address
        self._definition = definition
        self._members: tuple[Member, ...] | None = None
        self._size = 0
        self._alignment = 1

    def define(self, members: Sequence[Member], size: int, alignment: int) -> None:
        """Set the members, and the size and alignment in bytes."""
        self._definition = None
        self._members, self._size, self._alignment = tuple(members), size, alignment

    @property
    def is_defined(self) -> bool:
        """True if the members are known without a call of ``definition``."""
        return self._members is not None

    def _ask(self) -> None:
        definition, self._definition = self._definition, None
        if definition is not None:
            definition(self)

    @property
    def members(self) -> tuple[Member, ...] | None:
        """The members in order, or None if they are not known."""
        self._ask()
        return self._members

    @property
    def size(self) -> int:
        """The size in bytes."""
        self._ask()
        return self._size

    @property
    def alignment(self) -> int:
        """The alignment in bytes."""
        self._ask()
        return self._alignment

    def member(self, name: str, depth: int = 0) -> Member | None:
        """
        Return a member by its name, also of unnamed structures in it (C17 6.7.2.1, 13); None if there is none.

        ``depth`` is the number of unnamed structures around it, for a limit.
        """
        for member in self.members or ():
            if member.name == name:
                return member
            if member.name or not isinstance(member.type, Record) or depth > _UNNAMED_MAX:
                continue
            if (inner := member.type.member(name, depth + 1)) is not None:
                return Member(name, inner.type, member.offset + inner.offset, inner.bits, inner.shift, inner.unit)
        return None

    def member_names(self, depth: int = 0) -> list[str]:
        """Return the names that ``member`` finds, those of unnamed structures in it included."""
        names = []
        for member in self.members or ():
            if member.name:
                names.append(member.name)
            elif isinstance(member.type, Record) and depth <= _UNNAMED_MAX:
                names += member.type.member_names(depth + 1)
        return names

    def __str__(self) -> str:
        return f"{'union' if self.is_union else 'struct'} {self.tag or '<unnamed>'}"


@dataclass(frozen=True, slots=True)
class String:
    """
    The type of ``str(p)`` and ``comm``: a string that can be logged, compared, or used as a key. C has no such type.

    At most ``limit`` bytes are read. With ``marks``, one of them is read only to detect a longer string, which is
    printed without it and marked as truncated.
    """

    limit: int
    marks: bool = False

    @property
    def shown(self) -> int:
        """The maximum number of bytes that are printed."""
        return self.limit - self.marks

    def __str__(self) -> str:
        return "string"


@dataclass(frozen=True, slots=True)
class Stack:
    """The type of ``ustack()`` and ``kstack()``: a call stack that is logged, or a key field."""

    is_kernel: bool
    frames: int | None

    def __str__(self) -> str:
        return "call stack"


@dataclass(frozen=True, slots=True)
class Network:
    """The type of ``ntop(x)``: an IP address that is logged."""

    def __str__(self) -> str:
        return "network address"


CType = Void | Integer | Floating | Enumeration | Pointer | Array | Record | String | Stack | Network

VOID = Void()
LONG_RANK = 4
"""Rank of ``long``, which has the size of a word, as do pointers."""

BOOL = Integer("_Bool", 1, is_signed=False, rank=0, is_bool=True)
CHAR = Integer("char", 1, is_signed=True, rank=1)
INT = Integer("int", 4, is_signed=True, rank=3)
UNSIGNED_CHAR = Integer("unsigned char", 1, is_signed=False, rank=1)
UNSIGNED_SHORT = Integer("unsigned short", 2, is_signed=False, rank=2)
UNSIGNED = Integer("unsigned int", 4, is_signed=False, rank=3)
LONG_LONG = Integer("long long", 8, is_signed=True, rank=5)
UNSIGNED_LONG_LONG = Integer("unsigned long long", 8, is_signed=False, rank=5)
STRING = String(0)

_BY_SIZE = {1: "char", 2: "short", 4: "int", 8: "long"}


def integer_of(size: int, *, is_signed: bool) -> Integer:
    """Return the integer type of 1, 2, 4 or 8 bytes, with its name in 64-bit programs."""
    name = _BY_SIZE[size] if is_signed else f"unsigned {_BY_SIZE[size]}"
    return Integer(name, size, is_signed=is_signed, rank=list(_BY_SIZE).index(size) + 1)


def is_scalar(type_: CType) -> bool:
    """Return whether values of a type can be tested and compared: numbers and pointers."""
    return isinstance(type_, Integer | Enumeration | Pointer)


def promoted(type_: Integer | Enumeration) -> Integer:
    """Return the result type of the integer promotions (C17 6.3.1.1, 2)."""
    integer = type_.base if isinstance(type_, Enumeration) else type_
    return INT if integer.rank < INT.rank else integer


def common_type(left: Integer | Enumeration, right: Integer | Enumeration) -> Integer:
    """Return the result type of the usual arithmetic conversions of two operands (C17 6.3.1.8)."""
    a, b = promoted(left), promoted(right)
    if a.is_signed == b.is_signed:
        return a if (a.rank, a.size) >= (b.rank, b.size) else b
    unsigned, signed = (b, a) if a.is_signed else (a, b)
    if unsigned.rank >= signed.rank:
        return unsigned
    if signed.size > unsigned.size:
        return signed
    return unsigned_of(signed)


def unsigned_of(type_: Integer) -> Integer:
    """Return the unsigned type that corresponds to a signed one."""
    name = type_.name if not type_.is_signed else f"unsigned {type_.name.removeprefix('signed ')}"
    return Integer(name, type_.size, is_signed=False, rank=type_.rank)


def size_of(type_: CType) -> int | None:
    """Return the size of a type in bytes, or None if it has none."""
    match type_:
        case Integer(size=size) | Pointer(size=size) | Floating(size=size):
            return size
        case Enumeration(base=base):
            return base.size
        case Array(element, count) if count is not None and (each := size_of(element)) is not None:
            return each * count
        case Record() if type_.members is not None:
            return type_.size
    return None


def alignment_of(type_: CType, word_size: int) -> int:
    """Return the alignment in bytes of a type as a member (System V ABI for i386 and x86-64, "Scalar Types")."""
    match type_:
        case Integer(size=size) | Floating(size=size):
            return min(size, word_size)  # a long long of i386 is aligned to 4 bytes
        case Enumeration(base=base):
            return base.size
        case Pointer(size=size):
            return size
        case Array(element):
            return alignment_of(element, word_size)
        case Record():
            return type_.alignment
    return 1


def laid_out(record: Record, members: Sequence[tuple[str, CType, int | None]], word_size: int) -> None:
    """
    Define a structure or union by its members: name, type, and the width of a bit field.

    The System V ABI places a bit field in the next unit of its type with room for all of its bits. An unnamed bit field
    of width 0 ends the unit. Units begin where their type may begin, so a 64-bit unit may begin at each word of a
    32-bit program. There, a field whose bits are in one word has that word as its unit, because the memory after it may
    be unmapped.
    """
    placed, position, alignment = [], 0, 1  # in bits
    end = 0
    for name, type_, bits in members:
        size, align = 8 * (size_of(type_) or 0), 8 * alignment_of(type_, word_size)
        if record.is_union:
            position = 0
        if bits is None:
            position = -(-position // align) * align
            placed.append(Member(name, type_, position // 8))
            alignment = max(alignment, align // 8)
            position += size
        elif bits == 0:
            position = -(-position // align) * align
        else:
            if position % align + bits > size:
                position = -(-position // align) * align
            unit = position // align * align
            if name:
                shift = position - unit
                word = UNSIGNED if size > align >= shift + bits else None
                placed.append(Member(name, type_, unit // 8, bits, shift, word))
                alignment = max(alignment, align // 8)
            position += bits
        end = max(end, position)
    record.define(placed, -(-end // (8 * alignment)) * alignment, alignment)


def is_same_layout(one: CType, other: CType) -> bool:
    """Return whether two types have the same layout and names, as far as both are defined."""
    seen: set[tuple[int, int]] = set()
    waiting = [(one, other)]
    while waiting and len(seen) < _PAIRS_MAX:
        left, right = waiting.pop()
        if left is right:
            continue
        match left, right:
            case Record(), Record():
                if left.tag != right.tag or left.is_union != right.is_union:
                    return False
                if (id(left), id(right)) in seen:
                    continue
                seen.add((id(left), id(right)))
                if (a := left.members) is None or (b := right.members) is None:
                    continue
                if left.size != right.size or len(a) != len(b):
                    return False
                for mine, its in zip(a, b, strict=True):
                    if (mine.name, mine.offset, mine.bits, mine.shift) != (its.name, its.offset, its.bits, its.shift):
                        return False
                    waiting.append((mine.type, its.type))
            case Pointer(), Pointer():
                waiting.append((left.target, right.target))
            case Array(), Array():
                if left.count != right.count:
                    return False
                waiting.append((left.element, right.element))
            case Enumeration(), Enumeration():
                if (left.base, dict(left.values)) != (right.base, dict(right.values)):
                    return False
            case ((Integer() | Floating() | Void()), _):
                if left != right:
                    return False
            case _:
                return False
    return True
