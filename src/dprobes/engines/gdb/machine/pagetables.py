"""
Page tables of x86: where a linear address is in physical memory, and what may be done there.

A walk starts at cr3, and takes 9 bits of the address at each level (AMD64 APM, volume 2, chapter 5)::

    47..39      38..30      29..21      20..12      11..0
    PML4E   ─►  PDPE    ─►  PDE     ─►  PTE     ─►  byte of a page of 4 KiB
                  └ PS: 1 GiB  └ PS: 2 MiB

    entry: bit 0 present, 1 writable, 2 user, 7 page size (PS), 12-51 physical address, 63 not executable

With cr4.LA57 there is one level more in front. Without paging, addresses are physical ones. Other forms of paging,
those of 32 bits, are not known here.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Paging", "Region", "Translation", "paging_of", "regions", "translate"]

_PAGING, _LONG_MODE_ACTIVE, _FIVE_LEVELS = 1 << 31, 1 << 10, 1 << 12
"""cr0.PG, EFER.LMA and cr4.LA57."""
_PRESENT, _WRITABLE, _USER, _LARGE, _NOT_EXECUTABLE = 1 << 0, 1 << 1, 1 << 2, 1 << 7, 1 << 63
_ADDRESS = 0x000F_FFFF_FFFF_F000
_ENTRY, _INDEX_BITS, _PAGE_BITS = 8, 9, 12
_LARGE_LEVELS = (1, 2)
"""The levels, counted from the last one, at which an entry may be a page."""


class Paging(enum.Enum):
    """The forms of paging, with how many levels of tables they have."""

    OFF = 0
    FOUR_LEVELS = 4
    FIVE_LEVELS = 5
    OTHER = -1


class Translation(NamedTuple):
    """Where a byte is in physical memory, how many bytes the page has from there on, and what may be done with it."""

    physical: int
    size: int
    is_writable: bool
    is_user: bool
    is_executable: bool


class Region(NamedTuple):
    """Linear addresses one after the other that the same may be done with."""

    start: int
    end: int
    is_writable: bool
    is_executable: bool


ReadEntry = "Callable[[int], int | None]"
"""What returns an entry of a table by its physical address, None if it cannot be read."""


def paging_of(cr0: int, cr4: int, efer: int) -> Paging:
    """Return how a processor finds memory."""
    if not cr0 & _PAGING:
        return Paging.OFF
    if not efer & _LONG_MODE_ACTIVE:
        return Paging.OTHER
    return Paging.FIVE_LEVELS if cr4 & _FIVE_LEVELS else Paging.FOUR_LEVELS


def _is_canonical(address: int, levels: int) -> bool:
    bits = _PAGE_BITS + _INDEX_BITS * levels
    upper = address >> (bits - 1)
    return upper in (0, (1 << (65 - bits)) - 1)


def translate(entry_at: Callable[[int], int | None], root: int, paging: Paging, address: int) -> Translation | None:
    """
    Return where a linear address is, None if it is nowhere; ``root`` is cr3.

    ``entry_at`` returns 8 bytes of physical memory, None if they cannot be read.
    """
    if paging is Paging.OFF:
        return Translation(address, (1 << _PAGE_BITS) - address % (1 << _PAGE_BITS), True, True, True)
    if not _is_canonical(address, paging.value):
        return None
    table, rights = root & _ADDRESS, _WRITABLE | _USER
    is_executable = True
    for level in reversed(range(paging.value)):
        shift = _PAGE_BITS + _INDEX_BITS * level
        index = address >> shift & (1 << _INDEX_BITS) - 1
        entry = entry_at(table + index * _ENTRY)
        if entry is None or not entry & _PRESENT:
            return None
        rights &= entry
        is_executable &= not entry & _NOT_EXECUTABLE
        if not level or (level in _LARGE_LEVELS and entry & _LARGE):
            size = 1 << shift
            physical = (entry & _ADDRESS & -size) + address % size
            left = size - address % size
            return Translation(physical, left, bool(rights & _WRITABLE), bool(rights & _USER), is_executable)
        table = entry & _ADDRESS
    return None


def regions(
    entry_at: Callable[[int], int | None], root: int, paging: Paging, start: int, end: int, step: int
) -> Iterator[Region]:
    """Iterate over what is mapped from ``start`` to ``end``; what is not is looked at in steps."""
    at, begun = start, None
    while at < end:
        found = translate(entry_at, root, paging, at)
        kind = None if found is None else (found.is_writable, found.is_executable)
        if begun is not None and begun[1:] != (kind or ()):
            yield Region(begun[0], at, *begun[1:])
            begun = None
        if begun is None and kind is not None:
            begun = (at, *kind)
        at += step if found is None else found.size
        if found is None:
            at &= -step
    if begun is not None:
        yield Region(begun[0], min(at, end), *begun[1:])
