"""
Symbols of a Linux kernel from the compressed tables in its memory (kernel/kallsyms.c, scripts/kallsyms.c).

A name is a sequence of tokens: bytes that each encode one or more characters. The first character is the type of the
symbol. The tables are consecutive, each at a multiple of 8::

    up to v6.4:  offsets │ relative_base │ num_syms │ names │ markers │ … │ token_table │ token_index
    since then:  num_syms │ names │ markers │ token_table │ token_index │ offsets │ relative_base │ …

``names`` has the length and the tokens of each name. ``markers`` has the position of every 256th name. ``token_table``
has 256 strings, and ``token_index`` their positions. Some kernels also have the order of the names (``seqs_of_names``).

The address of a symbol is ``relative_base`` plus its offset. If the table has negative offsets
(CONFIG_KALLSYMS_ABSOLUTE_PERCPU), a negative one counts back from the base, and any other is itself an address, of a
CPU's own data.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.gdb.machine.machine_target import Paging, Region, regions, translate
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.engines.gdb.machine.machine_target import MachineTarget
    from dprobes.engines.gdb.stub_registers import Registers

__all__ = ["SearchEffort", "end_of", "find_image", "find_tables", "listed_symbols", "symbols_in_memory"]

_TOKENS = 256
_DIGITS = b"".join(b"%d\0" % digit for digit in range(10))
"""The strings of the tokens of digits, which are the digits themselves; the search for the token table begins there."""
_FIRST_DIGIT = ord("0")
_MARKED = 256
"""Number of symbols per marker."""
_NAME_MAX = 512
_SYMBOLS_MAX = 1 << 21
_LISTING_MAX = 1 << 27
"""Maximum size of the listing in bytes. A distribution's kernel has about 10 MB."""
_EFFORT = 1 << 24
"""Maximum number of names and places to examine in the search for the tables, in seconds. A kernel needs 1 % of it."""
_CANDIDATE = 1 << 9
"""Effort for one candidate for the token table."""
_GRAPHIC = re.compile(rb"[A-Za-z?][!-~]+")
"""Kind and name of a symbol, as in a line of ``/proc/kallsyms``."""
_ALIGNMENT = 8
_WORD, _LONG, _SHORT = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<H")
_TWO_BYTES = 0x80
"""
Flag of a length that continues in a second byte, since Linux kernel commit 73bbb94466fd ("kallsyms: support "big"
kernel symbols") (in v6.1).
"""
_BASE_MIN = 0xFFFF_FFFF_8000_0000
_UPPER_HALF = b"\xff\xff\xff\xff"
"""Upper half of the addresses in the kernel's image."""
_PAGES = b"\0\0"
"""Lowest bytes of the address at which the image begins, a multiple of 2 MiB."""


@dataclass(frozen=True, slots=True)
class SymbolTables:
    """Positions of the tables in the bytes that were read, and the number of symbols."""

    count: int
    names: int
    tokens: int
    index: int


class SearchEffort:
    """Budget for a search in memory, whose contents may be malicious and prolong the search."""

    def __init__(self) -> None:
        self._left = _EFFORT

    def take(self, count: int) -> bool:
        """Charge ``count`` to the budget; return False if less is left."""
        self._left -= count
        return self._left >= 0


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def find_tables(data: bytes | bytearray, start: int = 0, effort: SearchEffort | None = None) -> SymbolTables | None:
    """Return the tables whose tokens are after ``start``, or None if there are none, or if ``data`` ends before."""
    effort = effort or SearchEffort()
    at = data.find(_DIGITS, start)
    while at >= 0 and effort.take(_CANDIDATE):
        found = _tables_at(data, at, effort)
        if found is not None:
            return found
        at = data.find(_DIGITS, at + 1)
    return None


def _tables_at(data: bytes | bytearray, digits: int, effort: SearchEffort) -> SymbolTables | None:
    begin = digits
    for _ in range(_FIRST_DIGIT):
        begin = data.rfind(b"\0", 0, begin - 1) + 1
        if begin <= 0:
            return None
    # Anything in front of the first token is padding: its place is a multiple of 8.
    starts, at = [], begin
    for _ in range(_TOKENS):
        starts.append(at - begin)
        at = data.find(b"\0", at) + 1
        if not at:
            return None
    for index in range(at, at + _ALIGNMENT):
        if data[index : index + 2 * _TOKENS] == struct.pack(f"<{_TOKENS}H", *starts):
            found = _before_markers(data, begin, effort) or _after_base(data, begin, effort)
            return None if found is None else SymbolTables(*found, begin, index)
    return None


def _after_base(data: bytes | bytearray, tokens: int, effort: SearchEffort) -> tuple[int, int] | None:
    """Return number and position of the names, if they follow an address in the image (older order), else None."""
    base = data.rfind(_UPPER_HALF, 0, tokens)
    while base >= _LONG.size and effort.take(1):
        count_place = base + len(_UPPER_HALF)
        is_aligned = (tokens - count_place) % _ALIGNMENT == 0
        if is_aligned and data[base - _WORD.size : base - _WORD.size + len(_PAGES)] == _PAGES:
            count, names = _WORD.unpack_from(data, count_place)[0], count_place + _ALIGNMENT
            room = tokens - names
            if _MARKED < count < min(room, _SYMBOLS_MAX) and _is_marked(data, names, count, tokens, effort):
                return count, names
        base = data.rfind(_UPPER_HALF, 0, base)
    return None


def _is_marked(data: bytes | bytearray, names: int, count: int, tokens: int, effort: SearchEffort) -> bool:
    """Return whether ``count`` names are followed by their markers."""
    second = _skip(data, names, _MARKED, tokens, effort)
    if second < 0:
        return False
    end = _skip(data, second, count - _MARKED, tokens, effort)
    markers = tokens - (tokens - end) // _ALIGNMENT * _ALIGNMENT
    return end >= 0 and data[markers : markers + 2 * _WORD.size] == struct.pack("<II", 0, second - names)


def _before_markers(data: bytes | bytearray, tokens: int, effort: SearchEffort) -> tuple[int, int] | None:
    """
    Return number and position of the names, or None if no markers precede the tokens (newer order of the tables).

    Markers increase from 0.
    """
    place = tokens - _WORD.size
    if _WORD.unpack_from(data, place)[0] == 0:
        place -= _WORD.size
    last, markers = 1 << 32, 0
    while place >= 0 and markers <= _SYMBOLS_MAX and (value := _WORD.unpack_from(data, place)[0]) < last:
        last, markers = value, markers + 1
        if not value:
            break
        place -= _WORD.size
    if place < _ALIGNMENT or not 2 <= markers <= _SYMBOLS_MAX // _MARKED or not effort.take(markers):
        return None
    last_marker = _WORD.unpack_from(data, place + (markers - 1) * _WORD.size)[0]
    second = _WORD.unpack_from(data, place + _WORD.size)[0]
    highest = place - last_marker
    first = tokens - _aligned(tokens - highest)
    for names in range(first, max(highest - _MARKED * _NAME_MAX, _ALIGNMENT), -_ALIGNMENT):
        count = _WORD.unpack_from(data, names - _ALIGNMENT)[0]
        if -(-count // _MARKED) == markers and _skip(data, names, _MARKED, tokens, effort) == names + second:
            return count, names
    return None


def _skip(data: bytes | bytearray, at: int, count: int, end: int, effort: SearchEffort) -> int:
    """Return the end of ``count`` names, -1 if that is after ``end`` or the effort is used up."""
    if not effort.take(count):
        return -1
    for _ in range(count):
        if at + 1 >= end:
            return -1
        length, at = _length(data, at)
        at += length
    return at


def _length(data: bytes | bytearray, at: int) -> tuple[int, int]:
    length = data[at]
    if length & _TWO_BYTES:
        return length & ~_TWO_BYTES | data[at + 1] << 7, at + 2
    return length, at + 1


def end_of(tables: SymbolTables) -> int:
    """Return the number of bytes needed to contain the tables, in either order."""
    return _aligned(tables.index + 2 * _TOKENS) + _aligned(_WORD.size * tables.count) + _LONG.size


def listed_symbols(data: bytes | bytearray, tables: SymbolTables) -> bytes | None:
    """
    Return the symbols as ``/proc/kallsyms`` lists them.

    Return None if their addresses are not in the expected place, names are invalid, or the listing would be too long.
    """
    addresses = _addresses(data, tables)
    if addresses is None:
        return None
    lines, size, at = [], 0, tables.names
    strings = _token_strings(data, tables)
    for address in addresses:
        if address >> 64 or at + 1 >= tables.tokens:
            return None
        length, at = _length(data, at)
        if length > _NAME_MAX:
            return None
        name = b"".join([strings[byte] for byte in data[at : at + length]])
        at += length
        if len(name) > _NAME_MAX or not _GRAPHIC.fullmatch(name):
            return None
        lines.append(b"%016x %c %b\n" % (address, name[0], name[1:]))
        size += len(lines[-1])
        if size > _LISTING_MAX:
            return None
    return b"".join(lines)


def _addresses(data: bytes | bytearray, tables: SymbolTables) -> Sequence[int] | None:
    size = _aligned(_WORD.size * tables.count)
    before = tables.names - _ALIGNMENT - _LONG.size
    after = tables.tokens + _aligned(tables.index + 2 * _TOKENS - tables.tokens)
    for base_place, place in ((before, before - size), (after + size, after)):
        if place < 0 or base_place + _LONG.size > len(data):
            continue
        base = _LONG.unpack_from(data, base_place)[0]
        if base < _BASE_MIN:
            continue
        offsets = struct.unpack_from(f"<{tables.count}i", data, place)
        if min(offsets) < 0:
            return [offset if offset >= 0 else base - 1 - offset for offset in offsets]
        return [base + offset for offset in offsets]
    return None


def _token_strings(data: bytes | bytearray, tables: SymbolTables) -> list[bytes]:
    """Return the strings of the tokens, cut where they would be too long for a name."""
    starts = struct.unpack_from(f"<{_TOKENS}H", data, tables.index)
    strings = []
    for start in starts:
        begin = tables.tokens + start
        strings.append(bytes(data[begin : data.index(b"\0", begin)][: _NAME_MAX + 1]))
    return strings


# A kernel of x86-64 is at a random address in a fixed range (KASLR). Nothing else is mapped there, so its page tables
# show where it begins, and which part of it is read-only data, which contains the symbols.


_IMAGES_START, _IMAGES_END = 0xFFFFFFFF80000000, 0xFFFFFFFFC0000000
"""Range of the kernel's image, below all modules (Documentation/arch/x86/x86_64/mm.rst)."""
_STEP = 1 << 21
"""Alignment of the kernel's beginning in bytes (CONFIG_PHYSICAL_ALIGN)."""
_USER_TABLES = 1 << 12
"""Bit of cr3 that distinguishes the page tables for programs from those for the kernel (PTI_USER_PGTABLE_BIT)."""
_PIECE = 1 << 18
"""Bytes that are read at once."""
_TABLES_MAX = 1 << 24


class KernelImage(NamedTuple):
    """Page tables that map the whole kernel, and the first address of its image."""

    root: int
    paging: Paging
    start: int


def find_image(target: MachineTarget, registers: Registers) -> KernelImage:
    """
    Find the kernel in the page tables of the running process; raise ``EngineError`` if there is none.

    While a program runs, its processor may use tables that map only the kernel's entries (page table isolation).
    """
    name = target.stub.name
    if not target.can_walk:
        raise EngineError(
            f"the stub {name} shows neither page tables nor physical memory",
            hint="a kernel can be probed behind QEMU's stub (-gdb tcp::1234), on x86-64",
        )
    paging = target.paging(registers)
    if paging in (Paging.FOUR_LEVELS, Paging.FIVE_LEVELS):
        for root in (registers["cr3"] & ~_USER_TABLES, registers["cr3"]):
            for address in range(_IMAGES_START, _IMAGES_END, _STEP):
                if translate(target.entry_at, root, paging, address) is not None:
                    return KernelImage(root, paging, address)
    raise EngineError(
        f"no kernel of Linux is in the memory behind the stub {name}",
        hint="wait until it has booted; a machine without one has addresses only: write 'name = machine'",
    )


def symbols_in_memory(target: MachineTarget, image: KernelImage) -> bytes:
    """Return the kernel's symbols as ``/proc/kallsyms`` lists them; raise ``EngineError`` if it has no such list."""
    root, paging, start = image
    parts = list(regions(target.entry_at, root, paging, start, _IMAGES_END, _STEP))
    constant = [region for region in parts if not region.is_writable and not region.is_executable]
    effort = SearchEffort()
    for region in (*constant, *(region for region in parts if region not in constant)):
        if (found := _symbols(lambda *place: target.read_large(root, paging, *place), region, effort)) is not None:
            return found
    raise EngineError(
        f"the kernel behind the stub {target.stub.name} has no readable list of symbols",
        hint="a kernel of Linux 4.6 or later with CONFIG_KALLSYMS is needed",
    )


def _symbols(read: Callable[[int, int], bytes], region: Region, effort: SearchEffort) -> bytes | None:
    """Read a region until it contains complete tables; return the listing of their symbols, None if there is none."""
    data = bytearray()
    tables = None
    while region.start + len(data) < region.end and len(data) < _TABLES_MAX:
        piece = read(region.start + len(data), min(_PIECE, region.end - region.start - len(data)))
        if not piece:
            break
        searched = max(0, len(data) - _PIECE)
        data += piece
        if tables is None:
            tables = find_tables(data, searched, effort)
        if tables is not None and len(data) >= min(end_of(tables), region.end - region.start):
            return listed_symbols(data, tables)
    return None
