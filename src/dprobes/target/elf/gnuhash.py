"""
The hash tables over ``.dynsym``: names without a scan, and the number of symbols where section headers are gone.

Knows symbol indices and nothing else about symbols. Rules: System V ABI chapter 5, "Hash Table"; ``DT_GNU_HASH`` as
binutils writes it and glibc's ``dl-lookup.c`` reads it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.target.elf.file import ElfFile

__all__ = ["GnuHash", "gnu_hash", "sysv_hash_count"]


def gnu_hash(name: bytes) -> int:
    """Return the 32-bit hash of a symbol's name."""
    value = 5381
    for byte in name:
        value = value * 33 + byte & 0xFFFFFFFF
    return value


def sysv_hash_count(elf: ElfFile, offset: int) -> int:
    """Return the number of symbols that the ``DT_HASH`` table at a file offset covers."""
    _, chains = struct.unpack(f"{elf.struct_prefix}2I", elf.bytes_at(offset, 8, "the symbol hash table"))
    return int(chains)


class GnuHash:
    """Read the ``.gnu.hash`` table of ``elf`` at a file offset."""

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
        """Give the indices of the symbols whose hash is that of ``name``."""
        wanted = gnu_hash(name)
        if not self._buckets or not self._may_hold(wanted):
            return
        (index,) = self._word.unpack_from(self._heads, 4 * (wanted % self._buckets))
        for i, value in self._chain(index):
            if value | 1 == wanted | 1:
                yield i

    def count(self) -> int:
        """Return the number of symbols up to the last one in the table."""
        last = max((head for (head,) in self._word.iter_unpack(self._heads)), default=0)
        end = self._first
        for i, _ in self._chain(last):
            end = i + 1
        return int(end)

    def _chain(self, index: int) -> Iterator[tuple[int, int]]:
        """Give index and hash of the symbols of one chain; the lowest bit of its last hash is set."""
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
        """Ask the Bloom filter, which rules most absent names out."""
        if not self._bloom_words:
            return True
        size = self._elf.word_size
        at = value // self._bloom_bits % self._bloom_words * size
        word = int.from_bytes(self._bloom[at : at + size], self._elf.byte_order)
        return bool(word >> value % self._bloom_bits & word >> (value >> self._shift) % self._bloom_bits & 1)
