"""The types of a kernel's BTF as types of C; structures are read when somebody asks for their members."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.dpc.modules.debugtypes import plain_name
from dprobes.dpc.types.ctype import (
    BOOL,
    CHAR,
    INT,
    VOID,
    Array,
    Enumeration,
    Floating,
    Integer,
    Member,
    Pointer,
    Record,
    Void,
    is_same_layout,
    size_of,
)
from dprobes.errors import FormatError, TargetError
from dprobes.target.btf import COMPOSITES, WRAPPERS, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from dprobes.dpc.types.ctype import CType
    from dprobes.target.btf import Btf

__all__ = ["BtfTypes", "damage_reported"]

_CHAIN_MAX = 64
_WORD = 8
_COUNT_MAX = 1 << 40
_TAGGED = {"struct": (Kind.STRUCT,), "union": (Kind.UNION,), "enum": (Kind.ENUM, Kind.ENUM64)}


@contextlib.contextmanager
def damage_reported() -> Iterator[None]:
    """Raise ``TargetError`` where what is read of BTF makes no sense."""
    try:
        yield
    except (IndexError, ValueError, FormatError, RecursionError) as error:
        raise TargetError(f"the kernel's type information is damaged: {error}") from None


class BtfTypes:
    """
    Types of a kernel.

    ``declared`` knows the structures that the program itself defines, by ``struct`` or ``union`` and their tag.
    """

    def __init__(self, btf: Btf, declared: Callable[[str, str], Record | None]) -> None:
        self._btf = btf
        self.declared = declared
        self._types: dict[int, CType] = {}

    # By names

    def named(self, name: str, near: Collection[int] = ()) -> CType | None:
        """Return the type that ``typedef`` gives a name; of several that of a number in ``near``."""
        return self._found(name, (Kind.TYPEDEF, Kind.INT), near, name)

    def tagged(self, kind: str, tag: str, near: Collection[int] = ()) -> CType | None:
        """Return a structure, union or enumeration by its tag; of several that of a number in ``near``."""
        return self._found(tag, _TAGGED[kind], near, f"{kind} {tag}")

    def enumerator(self, name: str) -> int | None:
        """Return the value of an enumerator."""
        with damage_reported():
            return self._btf.enumerator(name)

    def _found(self, name: str, kinds: tuple[Kind, ...], near: Collection[int], written: str) -> CType | None:
        with damage_reported():
            numbers = [number for kind in kinds for number in self._btf.all_of(kind, name)]
            if len(numbers) > 1:
                numbers = [number for number in numbers if number in near] or numbers
            different: list[CType] = []
            for type_ in map(self.of, numbers):
                if not any(is_same_layout(type_, known) for known in different):
                    different.append(type_)
        if len(different) > 1:
            sizes = ", ".join(str(size_of(type_) or 0) for type_ in different)
            raise TargetError(
                f"the kernel has {len(different)} types '{written}', of {sizes} bytes",
                hint="a parameter or member of it means its own; or declare the one that is meant",
            )
        return different[0] if different else None

    def reached_from(self, numbers: Iterable[int]) -> frozenset[int]:
        """Return the numbers of the types that others lead to, by pointers, qualifiers and names."""
        found: set[int] = set()
        with damage_reported():
            for number in numbers:
                each = number
                for _ in range(_CHAIN_MAX):
                    if not each or each in found:
                        break
                    found.add(each)
                    if self._btf.kind(each) not in (*WRAPPERS, Kind.PTR):
                        break
                    each = self._btf.target(each)
        return frozenset(found)

    # By numbers

    def of(self, number: int) -> CType:
        """Return the type with a number; 0 is ``void``. Raise ``TargetError`` where BTF is damaged."""
        with damage_reported():
            return self._of(number, 0)

    def _of(self, number: int, depth: int) -> CType:
        if not number:
            return VOID
        if depth > _CHAIN_MAX:
            raise ValueError(f"type {number} does not end")
        if (known := self._types.get(number)) is None:
            known = self._types[number] = self._made(number, depth)
        return known

    def _made(self, number: int, depth: int) -> CType:
        btf, kind = self._btf, self._btf.kind(number)
        if kind in WRAPPERS:
            return self._of(btf.target(number), depth + 1)
        if kind in COMPOSITES:
            return self._record(number, kind)
        match kind:
            case Kind.PTR:
                return Pointer(self._of(btf.target(number), depth + 1), _WORD)
            case Kind.INT:
                return self._integer(number)
            case Kind.FLOAT:
                return Floating(btf.name(number), btf.target(number))
            case Kind.ENUM | Kind.ENUM64:
                return self._enumeration(number)
            case Kind.ARRAY:
                element, count = btf.array(number)
                type_ = self._of(element, depth + 1)
                if isinstance(type_, Void):
                    raise ValueError(f"array {number} has elements without a type")  # noqa: TRY004 - of the kernel
                return Array(type_, count if 0 < count <= _COUNT_MAX else None)  # 0: as many as there are
            case Kind.FWD:
                return self._forward(number)
        return VOID  # functions

    def _integer(self, number: int) -> CType:
        value, name = self._btf.value_type(number), plain_name(self._btf.name(number))
        if name in ("_Bool", "bool") and value.size == 1:
            return BOOL
        if name == "char" and value.size == 1:
            return CHAR
        if value.size not in (1, 2, 4, 8):
            return Floating(name, value.size)  # as __int128: its bytes are there, and no arithmetic
        if value.size == _WORD:
            rank = 5 if "long long" in name else 4
        else:
            rank = INT.rank if value.size == INT.size else value.size
        return Integer(name, value.size, is_signed=value.is_signed, rank=rank)

    def _enumeration(self, number: int) -> Enumeration:
        value = self._btf.value_type(number)
        size = value.size if value.size in (1, 2, 4, 8) else INT.size
        rank = 4 if size == _WORD else INT.rank if size == INT.size else size
        base = Integer("int" if value.is_signed else "unsigned int", size, is_signed=value.is_signed, rank=rank)
        values = {name: base.cut(each) for name, each in self._btf.enumerators(number)}
        return Enumeration(self._btf.name(number), base, values)

    # Structures

    def _record(self, number: int, kind: Kind) -> Record:
        tag, is_union = self._btf.name(number), kind is Kind.UNION
        if tag and (declared := self.declared("union" if is_union else "struct", tag)) is not None:
            return declared
        return Record(tag, is_union=is_union, definition=lambda record: self._define(record, number))

    def _forward(self, number: int) -> Record:
        """Return a structure that is only declared in one place, as it is defined in another."""
        tag = self._btf.name(number)
        if (declared := self.declared("struct", tag)) is not None:
            return declared

        def define(record: Record) -> None:
            for kind in ("struct", "union"):
                found = self.tagged(kind, tag)
                if isinstance(found, Record) and (members := found.members) is not None:
                    record.define(members, found.size, found.alignment)
                    return

        return Record(tag, definition=define)

    def _define(self, record: Record, number: int) -> None:
        with damage_reported():
            members = [self._member(*each) for each in self._btf.members(number)]
            record.define([each for each in members if each is not None], self._btf.target(number), 1)

    def _member(self, name: str, type_number: int, first: int, width: int) -> Member | None:
        """Return a member that begins at a bit; a bit field has a ``width``."""
        type_ = self._of(type_number, 0)
        if not width and first % 8 == 0:
            return Member(name, type_, first // 8)
        size = size_of(type_) or 0
        if not 0 < width <= 8 * size:
            return None
        for start, unit in ((first // (8 * size) * size, size), (first // 8, size), (first // 8, _WORD)):
            shift = first - 8 * start
            if shift + width <= 8 * unit:
                wider = Integer("unit", unit, is_signed=False, rank=4) if unit != size else None
                return Member(name, type_, start, width, shift, wider)
        return None
