"""
BTF, the kernel's compact type information: lookup of type ids and member offsets, and a small encoder.

The format is that of ``Documentation/bpf/btf.rst`` and ``include/uapi/linux/btf.h``::

    header    u16 magic, u8 version, u8 flags, u32 header length, u32 start and length of the types, of the strings
    types     numbered from 1; each u32 name, u32 info, u32 size or type, and the data of its kind
    info      bits 0-15 vlen, 24-28 kind, 31 kind flag
    strings   terminated by zeros; the first one is empty

A kernel has more than 100 000 types. A run needs about ten of them, and most of these are among the first tenth. So one
pass records the start of each type, only as far as needed; a complete pass takes some 20 ms. Names are found by a
search in the bytes.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import FormatError, TargetError, reason_of

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["COMPOSITES", "KERNEL_BTF", "WRAPPERS", "Btf", "Kind", "ModuleBtf", "encode_functions", "types_in"]

KERNEL_BTF = "/sys/kernel/btf/vmlinux"
"""File with the types of a running kernel with CONFIG_DEBUG_INFO_BTF."""

_HEADER = struct.Struct("<HBBIIIII")
_MAGIC = 0xEB9F
_VERSION = 1


class Kind(IntEnum):
    """The kinds of type (BTF_KIND_*)."""

    INT = 1
    PTR = 2
    ARRAY = 3
    STRUCT = 4
    UNION = 5
    ENUM = 6
    FWD = 7
    TYPEDEF = 8
    VOLATILE = 9
    CONST = 10
    RESTRICT = 11
    FUNC = 12
    FUNC_PROTO = 13
    VAR = 14
    DATASEC = 15
    FLOAT = 16
    DECL_TAG = 17
    TYPE_TAG = 18
    ENUM64 = 19


_HEAD_WORDS = 3
_WORDS_EACH = {Kind.STRUCT: 3, Kind.UNION: 3, Kind.ENUM: 2, Kind.FUNC_PROTO: 2, Kind.DATASEC: 3, Kind.ENUM64: 3}
"""Number of words for each of the vlen members of a type, by its kind."""
_WORDS_MORE = {Kind.INT: 1, Kind.ARRAY: 3, Kind.VAR: 1, Kind.DECL_TAG: 1}
"""Number of additional words of a type, by its kind."""

COMPOSITES = (Kind.STRUCT, Kind.UNION)
"""Kinds of types that have members."""
WRAPPERS = (Kind.TYPEDEF, Kind.VOLATILE, Kind.CONST, Kind.RESTRICT, Kind.TYPE_TAG)
"""Kinds of types that only rename or qualify another type (typedefs, qualifiers, tags)."""


_CHAIN_MAX = 64
"""Maximum length of a chain of types: through qualifiers and names, pointers, or members without a name."""
_NAME_MAX = 1 << 10
"""Maximum size of a name in bytes. The kernel's own names are shorter than 512 (KSYM_NAME_LEN)."""
_NAMESAKES_MAX = 64
"""Maximum number of equal strings that are searched. Compilers and linkers write one or two."""
_SIGNED_INT = 1 << 24  # BTF_INT_SIGNED, in the word after an INT
_WORD_BITS = 64


class ValueType(NamedTuple):
    """
    Type of a value, without typedefs and qualifiers; ``size`` is in bytes.

    ``kind`` is INT for all numbers, otherwise PTR, ARRAY, STRUCT and so on. For a pointer, ``target`` is the id of the
    type to which it points.
    """

    kind: Kind
    size: int
    is_signed: bool
    target: int


class Member(NamedTuple):
    """
    Member of a structure: the id of its type and its offset in bits.

    ``width`` is the width of a bit field in bits, or 0 for any other member.
    """

    type: int
    bits: int
    width: int


class Signature(NamedTuple):
    """The number of words of a function's arguments, and whether it returns a word (a number or a pointer)."""

    words: int
    has_result: bool


def _steps() -> list[int]:
    """
    Return the size of a type in words, indexed by the upper byte of its info word, with 0 for an unknown kind.

    For a kind with members, the item is the negated size of one member in words.
    """
    steps = [0] * 256
    for kind in Kind:
        step = -_WORDS_EACH[kind] if kind in _WORDS_EACH else _HEAD_WORDS + _WORDS_MORE.get(kind, 0)
        steps[kind] = steps[kind | 0x80] = step
    return steps


class Btf:
    """
    Types in BTF, such as the contents of ``/sys/kernel/btf/vmlinux``.

    The bytes may come from another user. If they are malformed, the constructor and all methods raise ``FormatError``.
    ``close`` releases them.
    """

    def __init__(self, data: bytes | mmap.mmap) -> None:
        if len(data) < _HEADER.size:
            raise FormatError(f"BTF has a header of {_HEADER.size} bytes, here are {len(data)}")
        magic, version, _, length, types, types_size, strings, strings_size = _HEADER.unpack_from(data)
        if (magic, version) != (_MAGIC, _VERSION):
            raise FormatError(f"BTF begins with {_MAGIC:#06x} and version 1, not {magic:#06x} and {version}", offset=0)
        self._data = data
        self._types = length + types
        self._types_end = self._types + types_size
        self._strings = length + strings
        self._strings_end = self._strings + strings_size
        if self._types % 4 or types_size % 4 or max(self._types_end, self._strings_end) > len(data):
            raise FormatError("the sections of BTF are outside its data")
        with memoryview(data) as whole:
            self._words = whole[self._types : self._types_end].cast("I")
        self._starts: list[int] = []
        """Index of the first word of each type that the pass has reached. The pass continues at word ``_next``."""
        self._next = 0
        self._steps = _steps()

    def close(self) -> None:
        """Release the data; other methods must not be called afterwards."""
        self._words.release()

    def find(self, kind: Kind, name: str) -> int:
        """Return the id of the first type of a kind with a name; raise ``TargetError`` if there is none."""
        for number in self.all_of(kind, name):
            return number
        raise TargetError(f"the kernel's type information has no {kind.name} '{name}'")

    def all_of(self, kind: Kind, name: str) -> Iterator[int]:
        """Iterate over the ids of all types of a kind with a name. Source files may define several."""
        for place in self._places_of_name(name):
            if (number := self._type_at(place)) and self.kind(number) is kind:
                yield number

    def member_offset(self, composite: str, path: str) -> int:
        """
        Return the offset of a member in a structure, in bytes.

        ``path`` may be a path to a nested member, separated by dots; pointers are not followed. Members of unnamed
        structures and unions are found as in C. Raise ``TargetError`` if the member does not exist, or is a bit field.
        """
        number = self.find(Kind.STRUCT, composite)
        offset = 0
        for name in path.split("."):
            found = self.member(number, name)
            if found is None:
                raise TargetError(f"the kernel's 'struct {composite}' has no member '{path}'")
            number = found.type
            offset += found.bits
        if offset % 8:
            raise TargetError(f"the member '{path}' of the kernel's 'struct {composite}' is a bit field")
        return offset // 8

    def signature(self, function: str) -> Signature | None:
        """
        Return how many words a function's arguments take, and whether it returns a word.

        Return None if it has variable arguments, or one of unknown size. Raise ``TargetError`` if the function does not
        exist.
        """
        words = 0
        for _, number in self.parameters(function):
            value = self.value_type(number)
            if not value.size:
                return None  # "...", or a type without a size
            words += -(-value.size // (_WORD_BITS // 8))
        prototype = self._prototype(function)
        result = self.value_type(self._words[prototype + 2])
        return Signature(words, result.kind in (Kind.INT, Kind.PTR))

    def parameters(self, function: str) -> list[tuple[str, int]]:
        """
        Return the parameters of a function as (name, type id).

        Raise ``TargetError`` if the function does not exist.
        """
        prototype = self._prototype(function)
        count = self._words[prototype + 1] & 0xFFFF
        places = range(prototype + _HEAD_WORDS, prototype + _HEAD_WORDS + 2 * count, 2)
        return [(self._string(self._words[at]), self._words[at + 1]) for at in places]

    def result(self, function: str) -> int:
        """
        Return the id of a function's result type, 0 for void.

        Raise ``TargetError`` if the function does not exist.
        """
        return self._words[self._prototype(function) + 2]

    def _prototype(self, function: str) -> int:
        """Return the index of the first word of the BTF_KIND_FUNC_PROTO of a function, by the function's name."""
        number = self.target(self.find(Kind.FUNC, function))
        if self.kind(number) is not Kind.FUNC_PROTO:
            raise FormatError(f"the type {number} of the function '{function}' is a {self.kind(number).name}")
        return self._begin(number)

    def name(self, number: int) -> str:
        """Return the name of the type with the id ``number``, "" for a type without one."""
        return self._string(self._words[self._begin(number)])

    def target(self, number: int) -> int:
        """
        Return the third word of a type: the id of the type that it points to or wraps.

        For a structure, union, enumeration or number the word is the size in bytes.
        """
        return self._words[self._begin(number) + 2]

    def array(self, number: int) -> tuple[int, int]:
        """Return the type id of an array's elements, and the number of elements."""
        at = self._begin(number) + _HEAD_WORDS
        return self._words[at], self._words[at + 2]

    def enumerators(self, number: int) -> Iterator[tuple[str, int]]:
        """Iterate over the (name, value) pairs of the enumeration with the type id ``number``."""
        start = self._begin(number)
        info, is_wide = self._words[start + 1], self.kind(number) is Kind.ENUM64
        size = _WORDS_EACH[self.kind(number)]
        for at in range(start + _HEAD_WORDS, start + _HEAD_WORDS + size * (info & 0xFFFF), size):
            value = self._words[at + 1] | (self._words[at + 2] << 32 if is_wide else 0)
            bits = 64 if is_wide else 32
            if info >> 31 and value >> (bits - 1):
                value -= 1 << bits
            yield self._string(self._words[at]), value

    def enumerator(self, name: str) -> int | None:
        """Return the value of an enumerator, whatever its enumeration, or None if it does not exist."""
        for place in self._places_of_name(name):
            number = bisect_right(self._starts_to(place // 4), place // 4)
            if number and self.kind(number) in (Kind.ENUM, Kind.ENUM64):
                for found, value in self.enumerators(number):
                    if found == name:
                        return value
        return None

    def _places_of_name(self, name: str) -> Iterator[int]:
        """
        Iterate over the byte offsets of words in the type section that equal a string offset of the name.

        Some words match by chance.
        """
        text = b"\0" + name.encode() + b"\0"
        place = self._data.find(text, self._strings, self._strings_end)
        for _ in range(_NAMESAKES_MAX):  # compilers may write a string several times
            if place < 0:
                return
            pattern = struct.pack("<I", place + 1 - self._strings)
            at = self._data.find(pattern, self._types, self._types_end)
            while at >= 0:
                yield at - self._types
                at = self._data.find(pattern, at + 1, self._types_end)
            place = self._data.find(text, place + 1, self._strings_end)

    def value_type(self, number: int) -> ValueType:
        """Return kind, size and signedness of the type with the id ``number``, after its typedefs and qualifiers."""
        number = self._unwrapped(number)
        if not number:
            return ValueType(Kind.FWD, 0, False, 0)
        kind, start = self.kind(number), self._begin(number)
        word = self._words[start + 2]
        match kind:
            case Kind.PTR:
                return ValueType(kind, _WORD_BITS // 8, False, word)
            case Kind.INT:
                return ValueType(Kind.INT, word, bool(self._words[start + _HEAD_WORDS] & _SIGNED_INT), 0)
            case Kind.ENUM | Kind.ENUM64:
                return ValueType(Kind.INT, word, bool(self._words[start + 1] >> 31), 0)
        return ValueType(kind, word if kind in COMPOSITES else 0, False, 0)

    def member(self, number: int, name: str) -> Member | None:
        """Return a member of the structure or union with the type id ``number``, or None if there is none."""
        return self._member(number, name, set(), 0)

    def type_name(self, number: int, depth: int = 0) -> str:
        """Return the C spelling of a type. ``depth`` is the number of types in the chain that led to it."""
        _check_end(number, depth)
        if not number:
            return "void"
        kind, start = self.kind(number), self._begin(number)
        name, target = self._string(self._words[start]), self._words[start + 2]
        match kind:
            case Kind.PTR:
                pointed = self.type_name(target, depth + 1)
                return f"{pointed}*" if pointed.endswith("*") else f"{pointed} *"
            case Kind.CONST | Kind.VOLATILE:
                return f"{kind.name.lower()} {self.type_name(target, depth + 1)}"
            case Kind.RESTRICT | Kind.TYPE_TAG:
                return self.type_name(target, depth + 1)
            case Kind.ARRAY:
                element, _, count = self._words[start + _HEAD_WORDS : start + _HEAD_WORDS + 3]
                return f"{self.type_name(element, depth + 1)}[{count}]"
            case Kind.STRUCT | Kind.UNION | Kind.ENUM | Kind.FWD:
                word = "struct" if kind is Kind.FWD else kind.name.lower()
                return f"{word} {name}".rstrip()
            case Kind.FUNC_PROTO:
                return "function"
        return name or kind.name.lower()

    def _unwrapped(self, number: int) -> int:
        depth = 0
        while number and self.kind(number) in WRAPPERS:
            _check_end(number, depth := depth + 1)
            number = self._words[self._begin(number) + 2]
        return number

    def _member(self, number: int, name: str, searched: set[int], depth: int) -> Member | None:
        """
        Return a member, which may be in an unnamed nested structure or union.

        ``searched`` has the types that are known not to contain the name. Without it, a malicious file could make the
        search take exponential time.
        """
        _check_end(number, depth)
        if number in searched:
            return None
        searched.add(number)
        for found, type_number, bits, width in self.members(number):
            if found == name:
                return Member(type_number, bits, width)
            if not found and (inner := self._member(type_number, name, searched, depth + 1)) is not None:
                return inner._replace(bits=bits + inner.bits)
        return None

    def members(self, number: int) -> Iterator[tuple[str, int, int, int]]:
        """Iterate over the members of a structure or union: name, type id, first bit, and width of a bit field or 0."""
        number = self._unwrapped(number)
        if not number or self.kind(number) not in COMPOSITES:
            return
        start = self._begin(number)
        info = self._words[start + 1]
        # With the kind flag the upper byte of an offset is the width of a bit field.
        has_widths = info >> 31
        mask = 0xFF_FFFF if has_widths else 0xFFFF_FFFF
        for at in range(start + _HEAD_WORDS, start + _HEAD_WORDS + 3 * (info & 0xFFFF), 3):
            name, type_number, offset = self._words[at : at + 3]
            yield self._string(name), type_number, offset & mask, offset >> 24 if has_widths else 0

    def _string(self, offset: int) -> str:
        start = self._strings + offset
        end = self._data.find(b"\0", start, min(start + _NAME_MAX, self._strings_end))
        if end < 0:
            raise FormatError(f"a name of BTF does not end within {_NAME_MAX} bytes", offset=start)
        return self._data[start:end].decode("utf-8", "replace")

    def kind(self, number: int) -> Kind:
        """Return the kind of the type with the id ``number``."""
        return Kind(self._words[self._begin(number) + 1] >> 24 & 0x1F)

    def _begin(self, number: int) -> int:
        starts = self._starts
        while (missing := number - len(starts)) > 0 and self._next < len(self._words):
            self._starts_to(self._next + _HEAD_WORDS * (missing - 1))
        if not 0 < number <= len(starts):
            raise FormatError(f"BTF has {len(starts)} types, and none with the number {number}")
        return starts[number - 1]

    def _type_at(self, offset: int) -> int:
        """Return the id of the type that begins at an offset of the types in bytes, or 0 if none begins there."""
        starts = self._starts_to(offset // 4)
        index = bisect_left(starts, offset // 4)
        return index + 1 if offset % 4 == 0 and index < len(starts) and starts[index] == offset // 4 else 0

    def _starts_to(self, word: int) -> list[int]:
        """Return the index of the first word of each type, at least of the types that begin up to index ``word``."""
        words, steps, starts = self._words, self._steps, self._starts
        append = starts.append
        at, last = self._next, len(words) - _HEAD_WORDS
        end = min(word + 1, len(words))
        while at < end:
            if at > last:
                break
            info = words[at + 1]
            step = steps[info >> 24]
            if not step:
                place = self._types + 4 * at
                raise FormatError(f"a type of BTF has the kind {info >> 24}, which is unknown", offset=place)
            following = at + (step if step > 0 else _HEAD_WORDS - step * (info & 0xFFFF))
            if following > len(words):
                break
            append(at)
            self._next = at = following
        if at < end:
            raise FormatError("a type of BTF ends after the other types", offset=self._types + 4 * at)
        return starts


def _check_end(number: int, depth: int) -> None:
    """
    Raise ``FormatError`` if ``depth``, the length of a chain of types, exceeds the limit.

    ``number`` is the last id.
    """
    if depth > _CHAIN_MAX:
        raise FormatError(f"type {number} of BTF is one of a row that does not end")


_LINKAGE_STATIC, _LINKAGE_GLOBAL = 0, 1


def encode_functions(names: Sequence[str], called: Sequence[int] = ()) -> tuple[bytes, tuple[int, ...]]:
    """
    Return BTF with a function ``static unsigned long long NAME(void)`` for each name, and the ids of these functions.

    The kernel requires such BTF for a program with callback functions. The functions whose indices are in ``called``
    are global instead, and take two arguments of the same type. The kernel verifies a global function once, and not for
    each call.
    """
    strings = bytearray(b"\0")

    def string(text: str) -> int:
        place = len(strings)
        strings.extend(text.encode() + b"\0")
        return place

    types = bytearray()

    def add(name: int, kind: Kind, type_or_size: int, *more: int, length: int = 0) -> None:
        words = (name, kind << 24 | length, type_or_size, *more)
        types.extend(struct.pack(f"<{len(words)}I", *words))

    integer, prototype, of_two = 1, 2, 3
    first = of_two + 1 if called else of_two
    add(string("unsigned long long"), Kind.INT, 8, 64)  # encoding 0, offset 0, 64 bits
    add(0, Kind.FUNC_PROTO, integer)
    if called:
        add(0, Kind.FUNC_PROTO, integer, string("first"), integer, string("second"), integer, length=2)
    for number, name in enumerate(names):
        if number in called:
            add(string(name), Kind.FUNC, of_two, length=_LINKAGE_GLOBAL)
        else:
            add(string(name), Kind.FUNC, prototype, length=_LINKAGE_STATIC)
    header = _HEADER.pack(_MAGIC, _VERSION, 0, _HEADER.size, 0, len(types), len(types), len(strings))
    return header + types + strings, tuple(range(first, first + len(names)))


class ModuleBtf(Btf):
    """
    Types of a kernel module and of the kernel, from the BTF of both.

    Type ids and string offsets of the module continue those of the kernel (Documentation/bpf/btf.rst, "split BTF"). So
    the concatenated types and strings of both form one BTF. The constructor raises ``FormatError`` if one of them is
    malformed.
    """

    def __init__(self, kernel: bytes, module: bytes) -> None:
        Btf(kernel).close()  # check that each of them is well-formed
        Btf(module).close()
        magic, version, flags, *_ = _HEADER.unpack_from(kernel)
        parts = _parts(kernel), _parts(module)
        types, strings = (b"".join(each) for each in zip(*parts, strict=True))
        self._kernel_size = len(parts[0][0])
        header = _HEADER.pack(magic, version, flags, _HEADER.size, 0, len(types), len(types), len(strings))
        super().__init__(header + types + strings)

    def find(self, kind: Kind, name: str) -> int:
        """
        Return the id of the first type of a kind and name, preferably the module's.

        Raise ``TargetError`` if there is none.
        """
        for number in self.all_of(kind, name):
            return number
        raise TargetError(f"the type information of the module and of the kernel has no {kind.name} '{name}'")

    def all_of(self, kind: Kind, name: str) -> Iterator[int]:
        """Iterate over the ids of the types of a kind with a name: those of the module, or else those of the kernel."""
        found = [
            (place, number)
            for place in self._places_of_name(name)
            if (number := self._type_at(place)) and self.kind(number) is kind
        ]
        own = [number for place, number in found if place >= self._kernel_size]
        yield from own or [number for _, number in found]


def _parts(data: bytes) -> tuple[bytes, bytes]:
    """Return the type section and the string section of BTF."""
    *_, length, types, types_size, strings, strings_size = _HEADER.unpack_from(data)
    start, end = length + types, length + strings
    return data[start : start + types_size], data[end : end + strings_size]


_SECTION = ".BTF"
_ELF_MAGIC = b"\x7fELF"
_HINT = "name a vmlinux that was made with CONFIG_DEBUG_INFO_BTF, or a copy of that kernel's /sys/kernel/btf/vmlinux"


def types_in(path: Path) -> Btf:
    """Return the types in a vmlinux or a file of plain BTF; raise ``TargetError`` if it has none."""
    try:
        with path.open("rb") as file:
            is_elf = file.read(len(_ELF_MAGIC)) == _ELF_MAGIC
        return Btf(_section_of(path) if is_elf else path.read_bytes())
    except OSError as error:
        raise TargetError(f"'{path}' cannot be read: {reason_of(error)}") from None
    except FormatError as error:
        raise TargetError(f"'{path}' has no types of a kernel: {error.message}", hint=_HINT) from None


def _section_of(path: Path) -> bytes:
    from dprobes.target.elf.elf_file import ElfFile

    elf = ElfFile.open(path)
    if (section := elf.section(_SECTION)) is not None:
        return elf.bytes_at(section.offset, section.size, f"the section {_SECTION}")
    raise TargetError(f"'{path}' has no section {_SECTION}, which has the types of a kernel", hint=_HINT)
