"""
Symbol table of an ELF file, read in bulk: a lookup takes microseconds, and symbols are decoded on demand.

Rules: System V ABI, chapter 4, "Symbol Table". GNU symbol versions: ``.gnu.version`` in the Linux Standard Base, and
``name@VERSION`` or ``name@@VERSION`` (the default), which the linker writes into ``.symtab``.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from dprobes.target.elf.elf_headers import SHT_DYNSYM, SHT_SYMTAB, symbol_layout, symbol_rows
from dprobes.target.module_symbols import Symbol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.elf.elf_headers import Section

__all__ = ["ElfSymbols", "FunctionDescriptors", "elf_symbols", "gnu_hash"]

_DESCRIPTORS = ".opd"
_WORD = 8


class FunctionDescriptors(NamedTuple):
    """
    Function descriptors of a file: the bytes of their section, and its link address.

    In the older calling convention of 64-bit PowerPC (ELFv1), the value of a function's symbol, and the entry of a
    program, are addresses of a function descriptor. It has three words: the address of the code, the address of the
    table of contents (TOC), and the environment pointer of other languages. Source: 64-bit PowerPC ELF ABI Supplement
    1.9, section 3.2.5.
    """

    address: int
    data: bytes

    @classmethod
    def of(cls, elf: ElfFile) -> FunctionDescriptors | None:
        """Return the function descriptors of a file, or None if it has none."""
        if elf.machine != "ppc64" or elf.byte_order != "big" or elf.type == "rel" or elf.is_debug_only:
            return None
        section = elf.section(_DESCRIPTORS)
        if section is None:
            return None
        return cls(section.address, bytes(elf.bytes_at(section.offset, section.size, "the function descriptors")))

    def code_of(self, address: int) -> int:
        """Return the address of a function's code. An address that is not a descriptor's is returned unchanged."""
        at = address - self.address
        if 0 <= at <= len(self.data) - _WORD and at % _WORD == 0:
            return int.from_bytes(self.data[at : at + _WORD], "big")
        return address


# The hash tables over ``.dynsym``: lookup by name without a scan, and the number of symbols without section headers.
# Rules: System V ABI chapter 5, "Hash Table"; ``DT_GNU_HASH`` as binutils writes it and glibc's ``dl-lookup.c`` reads.


def gnu_hash(name: bytes) -> int:
    """Return the 32-bit hash of a symbol's name that ``.gnu.hash`` uses."""
    value = 5381
    for byte in name:
        value = value * 33 + byte & 0xFFFFFFFF
    return value


def sysv_hash_count(elf: ElfFile, offset: int) -> int:
    """Return the number of symbols that the ``DT_HASH`` table at a file offset covers."""
    _, chains = struct.unpack(f"{elf.struct_prefix}2I", elf.bytes_at(offset, 8, "the symbol hash table"))
    return int(chains)


class GnuHash:
    """The hash table ``.gnu.hash`` of a file's dynamic symbols, at a file offset."""

    def __init__(self, elf: ElfFile, offset: int) -> None:
        self._elf = elf
        what = "the symbol hash table"
        prefix = elf.struct_prefix
        header = elf.bytes_at(offset, 16, what)
        self._buckets, self._first, bloom_words, self._shift = struct.unpack(f"{prefix}4I", header)
        self._bloom_bits = 8 * elf.word_size
        bloom_size = bloom_words * elf.word_size
        self._bloom = elf.bytes_at(offset + 16, bloom_size, what)
        self._bloom_words = bloom_words
        start = offset + 16 + bloom_size
        self._heads = elf.bytes_at(start, 4 * self._buckets, what)
        self._chains = start + 4 * self._buckets
        self._word = struct.Struct(f"{prefix}I")

    def candidates(self, name: bytes) -> Iterator[int]:
        """Iterate over the indices of the symbols whose hash is that of ``name``."""
        wanted = gnu_hash(name)
        if not self._buckets or not self._may_hold(wanted):
            return
        (index,) = self._word.unpack_from(self._heads, 4 * (wanted % self._buckets))
        for i, value in self._chain(index):
            if value | 1 == wanted | 1:
                yield i

    def count(self) -> int:
        """Return the number of symbols in ``.dynsym``, which is one more than the last index in the hash table."""
        last = max((head for (head,) in self._word.iter_unpack(self._heads)), default=0)
        end = self._first
        for i, _ in self._chain(last):
            end = i + 1
        return int(end)

    def _chain(self, index: int) -> Iterator[tuple[int, int]]:
        """
        Iterate over index and hash of the symbols of one chain.

        In the last one, the lowest bit of the hash is set.
        """
        if index < self._first:
            return
        data = self._elf.data
        while (offset := self._chains + 4 * (index - self._first)) + 4 <= len(data):
            (value,) = self._word.unpack(data[offset : offset + 4])
            yield index, value
            if value & 1:
                return
            index += 1

    def _may_hold(self, value: int) -> bool:
        """Return whether a hash passes the Bloom filter, which excludes most absent names."""
        if not self._bloom_words:
            return True
        size = self._elf.word_size
        at = value // self._bloom_bits % self._bloom_words * size
        word = int.from_bytes(self._bloom[at : at + size], self._elf.byte_order)
        return bool(word >> value % self._bloom_bits & word >> (value >> self._shift) % self._bloom_bits & 1)


_KINDS = {0: "notype", 1: "object", 2: "func", 5: "common", 6: "tls", 10: "ifunc"}  # not: section, file
_BINDINGS = {0: "local", 2: "weak"}  # everything else acts as global: GNU unique, processor-specific
_NOTYPE, _FUNC, _FILE, _IFUNC = 0, 2, 4, 10
_UNDEFINED = 0
_HIDDEN_VERSION = 0x8000
_SYMBOLS_MAX = 1 << 23
"""Maximum number of symbols of a table. The largest programs have three million."""
_NAME_MAX = 1 << 20
"""Maximum size of a symbol's name in bytes. A longer name counts as missing."""
_MANY_SEARCHES = 64
"""Number of searches after which an index of all names is faster than another scan."""
_MANY_OFFSETS = 64  # number of strings from which on one scan of all symbols is faster than a search for each
_SHT_GNU_VERSYM, _SHT_GNU_HASH = 0x6FFFFFFF, 0x6FFFFFF6
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_GNU_HASH, _DT_VERSYM = 4, 5, 6, 10, 0x6FFFFEF5, 0x6FFFFFF0


def elf_symbols(elf: ElfFile) -> list[ElfSymbols]:
    """
    Return the symbol tables of a file: ``.symtab`` if present, and ``.dynsym``.

    A file without section headers has a ``.dynsym``, too.
    """
    tables = []
    for section in elf.sections:
        if section.type in (SHT_SYMTAB, SHT_DYNSYM):
            if section.link >= len(elf.sections):
                elf.malformed(f"section '{section.name}' has no string table")
            strings = elf.sections[section.link]
            dynamic = section.type == SHT_DYNSYM
            tables.append(
                ElfSymbols(
                    elf,
                    (section.offset, section.size),
                    (strings.offset, strings.size if strings.in_file else 0),
                    complete=not dynamic,
                    versions=_offset_of(elf, _SHT_GNU_VERSYM) if dynamic else None,
                    gnu_hash=_offset_of(elf, _SHT_GNU_HASH) if dynamic else None,
                )
            )
    if not elf.sections and (table := _without_sections(elf)) is not None:
        tables.append(table)
    return tables


def _offset_of(elf: ElfFile, section_type: int) -> int | None:
    found: Section | None = next((s for s in elf.sections if s.type == section_type), None)
    return found.offset if found is not None else None


def _without_sections(elf: ElfFile) -> ElfSymbols | None:
    """Return ``.dynsym`` from the dynamic segment, or None if it is missing or no hash table gives its length."""
    places = {tag: elf.file_offset(address) for tag, address in elf.dynamic.values.items()}
    symbols, strings = places.get(_DT_SYMTAB), places.get(_DT_STRTAB)
    if symbols is None or strings is None:
        return None
    gnu_hash = places.get(_DT_GNU_HASH)
    if gnu_hash is not None:
        count = GnuHash(elf, gnu_hash).count()
    elif (sysv_hash := places.get(_DT_HASH)) is not None:
        count = sysv_hash_count(elf, sysv_hash)
    else:
        return None
    size = count * symbol_layout("=", elf.word_size).size
    string_size = min(elf.dynamic.values.get(_DT_STRSZ, 0), len(elf.data) - strings)
    versions = places.get(_DT_VERSYM)
    return ElfSymbols(
        elf, (symbols, size), (strings, string_size), complete=False, versions=versions, gnu_hash=gnu_hash
    )


class ElfSymbols:
    """
    Symbol table of a file; ``table`` and ``strings`` are pairs of file offset and size.

    ``versions`` and ``gnu_hash`` are the file offsets of ``.gnu.version`` and ``.gnu.hash``, which belong to
    ``.dynsym``.
    """

    def __init__(
        self,
        elf: ElfFile,
        table: tuple[int, int],
        strings: tuple[int, int],
        *,
        complete: bool,
        versions: int | None = None,
        gnu_hash: int | None = None,
    ) -> None:
        self._elf = elf
        self.complete = complete
        """True for ``.symtab``."""
        prefix = elf.struct_prefix
        self._wide = elf.word_size == 8
        self._entry = symbol_layout(prefix, elf.word_size)
        offset, size = table
        self._count = size // self._entry.size
        if self._count > _SYMBOLS_MAX:
            elf.malformed(f"a table of {self._count} symbols is larger than the {_SYMBOLS_MAX} that are read")
        self._table = memoryview(elf.bytes_at(offset, self._count * self._entry.size, "a symbol table"))
        self._strings, string_size = strings
        self._strings_end = self._strings + string_size
        if self._strings_end > len(elf.data):
            elf.malformed("a string table lies outside the file")
        # The st_name fields alone, in the file's byte order: searches by name scan them.
        self._names = self._table.cast("I")[:: self._entry.size // 4].tobytes()
        self._name = struct.Struct(f"{prefix}I")
        self._versions = (
            elf.bytes_at(versions, 2 * self._count, "the table of symbol versions") if versions is not None else None
        )
        self._searches = 0
        self._by_name: dict[bytes, list[int]] | None = None
        self._files: list[int] | None = None
        self._hash = GnuHash(elf, gnu_hash) if gnu_hash is not None else None
        self._descriptors = FunctionDescriptors.of(elf)

    def find(self, name: str) -> list[Symbol]:
        """Return the defined symbols called ``name``, all versions."""
        raw = name.encode("utf-8", "surrogateescape")
        if not raw or b"\0" in raw:
            return []
        if self._hash is not None:
            indices = [i for i in self._hash.candidates(raw) if i < self._count and self._raw_name(i) == raw]
        else:
            indices = self._indices(raw)
        return [symbol for i in indices if (symbol := self._defined(i)) is not None]

    def in_files(self, name: str) -> list[tuple[str, Symbol]]:
        """Return the local symbols called ``name`` with their source files: the last file symbol before each."""
        raw = name.encode("utf-8", "surrogateescape")
        if not self.complete or not raw or b"\0" in raw:
            return []
        if self._files is None:
            self._files = [i for i, (_, info, *_) in enumerate(self._rows()) if info & 15 == _FILE]
        found = []
        for i in self._indices(raw):
            symbol, before = self._defined(i), bisect_left(self._files, i) - 1
            if symbol is None or symbol.binding != "local" or before < 0:
                continue
            # The linker writes a file symbol without a name before symbols of no source file.
            if file := self._raw_name(self._files[before]).decode("utf-8", "surrogateescape"):
                found.append((file, symbol))
        return found

    def imports(self, name: str) -> bool:
        """Return whether ``name`` is in the table, and only as undefined."""
        raw = name.encode("utf-8", "surrogateescape")
        sections = [self._row(i)[3] for i in self._indices(raw)] if raw and b"\0" not in raw else []
        return bool(sections) and not any(sections)

    def beginning(self, start: str) -> list[Symbol]:
        """Return the defined symbols whose names begin with ``start``."""
        indices = self._at(list(self._string_offsets(start.encode("utf-8", "surrogateescape"))))
        return [symbol for i in indices if (symbol := self._defined(i)) is not None]

    def names(self) -> Iterator[str]:
        """Iterate over the names of all defined symbols, without versions."""
        for i in range(self._count):
            symbol = self._defined(i)
            if symbol is not None and symbol.name:
                yield symbol.name

    def code(self) -> list[tuple[int, int, int]]:
        """Return link address, size and index of each function, and of each label without a type in code."""
        sections = self._elf.sections
        executable = {i for i, section in enumerate(sections) if section.executable}
        data, strings, limit = self._elf.data, self._strings, self._strings_end
        rows = []
        for i, (name, info, _, section, value, size) in enumerate(self._rows()):
            kind = info & 15
            if section == _UNDEFINED:
                continue
            if kind == _NOTYPE:
                # '$' starts the mapping symbols of ARM and others, which mark ranges of code and data and are no names.
                if section not in executable or strings + name >= limit or data[strings + name] in b"\0$":
                    continue
            elif kind not in (_FUNC, _IFUNC):
                continue
            rows.append((self._address(value, section), size, i))
        return rows

    def symbol(self, index: int) -> Symbol:
        """Return the symbol with an index from ``code``."""
        symbol = self._defined(index)
        assert symbol is not None
        return symbol

    def starting(self, address: int) -> list[Symbol]:
        """Return the defined symbols with a link address."""
        if self._elf.type == "rel" or self._descriptors is not None:  # it has section offsets or descriptors
            at = [i for i, row in enumerate(self._rows()) if row[3] and self._address(row[4], row[3]) == address]
            return [symbol for i in at if (symbol := self._defined(i)) is not None and symbol.name]
        needle = address.to_bytes(self._elf.word_size, self._elf.byte_order)
        table, value = self._table.tobytes(), 8 if self._wide else 4
        found = []
        position = table.find(needle)
        while position >= 0:
            index, place = divmod(position, self._entry.size)
            if place == value and (symbol := self._defined(index)) is not None and symbol.address == address:
                found.append(symbol)
            position = table.find(needle, position + 1)
        return found

    def _rows(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Iterate over name offset, info, other, section, value and size of every symbol."""
        return symbol_rows(self._table, self._elf.struct_prefix, self._elf.word_size)

    def _row(self, index: int) -> tuple[int, int, int, int, int, int]:
        row = self._entry.unpack_from(self._table, index * self._entry.size)
        if self._wide:
            return row
        name, value, size, info, other, section = row
        return name, info, other, section, value, size

    def _raw_name(self, index: int) -> bytes:
        start = self._strings + self._row(index)[0]
        limit = min(self._strings_end, start + _NAME_MAX)
        end = self._elf.data.find(b"\0", start, limit) if start < limit else -1
        return self._elf.data[start:end] if end >= 0 else b""

    def _address(self, value: int, section: int) -> int:
        sections = self._elf.sections
        if self._elf.type == "rel" and section < len(sections):
            return value + sections[section].address
        return value if self._descriptors is None else self._descriptors.code_of(value)

    def _defined(self, index: int) -> Symbol | None:
        _, info, _, section, value, size = self._row(index)
        kind = _KINDS.get(info & 15)
        if section == _UNDEFINED or kind is None:
            return None
        name, at, version = self._raw_name(index).decode("utf-8", "surrogateescape").partition("@")
        default = not at or version.startswith("@")
        if self._versions is not None:
            (number,) = struct.unpack_from(f"{self._elf.struct_prefix}H", self._versions, 2 * index)
            default = not number & _HIDDEN_VERSION
        return Symbol(name, self._address(value, section), size, kind, _BINDINGS.get(info >> 4, "global"), default)

    def _indices(self, raw: bytes) -> list[int]:
        """Return the indices of the symbols with the name ``raw``, with or without ``@`` and a version."""
        self._searches += 1
        if self._searches > _MANY_SEARCHES and b"@" not in raw:
            if self._by_name is None:
                self._by_name = self._indexed()
            return self._by_name.get(raw, [])
        return self._at([*self._string_offsets(raw + b"\0"), *self._string_offsets(raw + b"@")])

    def _at(self, offsets: Sequence[int]) -> list[int]:
        """Return the indices of the symbols whose names begin at one of these offsets of the string table."""
        if len(offsets) > _MANY_OFFSETS:
            wanted = set(offsets)
            return [i for i, (offset,) in enumerate(self._name.iter_unpack(self._names)) if offset in wanted]
        found = []
        for offset in offsets:
            needle = self._name.pack(offset)
            position = self._names.find(needle)
            while position >= 0:
                if position % 4 == 0:
                    found.append(position // 4)
                position = self._names.find(needle, position + 1)
        return sorted(found)

    def _indexed(self) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for i in range(self._count):
            found.setdefault(self._raw_name(i).partition(b"@")[0], []).append(i)
        return found

    def _string_offsets(self, text: bytes) -> Iterator[int]:
        """
        Iterate over the offsets of ``text`` in the string table.

        Linkers share the tails of strings, so the ends of longer names are included.
        """
        data, end = self._elf.data, self._strings_end
        position = data.find(text, self._strings, end)
        while position >= 0:
            yield position - self._strings
            position = data.find(text, position + 1, end)
