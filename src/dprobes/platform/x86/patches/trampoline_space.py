"""
Addresses for trampolines, in the gaps between the mappings of a process.

Most trampolines may be anywhere within reach of their site, and share *blocks*. A punned jump has few possible targets,
sometimes a single one. It gets the page with one of them, and may share this page with other punned jumps. A jump over
several instructions needs a displacement that has trapping bytes (``TRAPS``) where displaced instructions began.

No trampoline is in a range into which the heap or the stack of the process may grow (``process_maps.Growth``). None is
in the low 4 GiB, unless the module itself is there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

from dprobes.target.process_maps import PAGE_SIZE, Growth, free_ranges

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from dprobes.target.process_maps import Mapping

__all__ = ["TRAPS", "AddressSpace"]

TRAPS = bytes.fromhex("06 07 0e 16 17 1e 1f 27 2f 37 3f 60 61 82 9a ce d4 d6 ea f4 fa fb")
"""
Bytes that begin a trapping instruction, whatever bytes follow: invalid in 64-bit code, or privileged.

Excluded are bytes with another meaning under APX (d5), port instructions (in, out), which a permission allows, and
breakpoints.
"""

_LOW = 1 << 32
_LOWEST = 1 << 20
"""The lowest address for a trampoline. The addresses below catch accesses through null pointers."""
_HIGH = (1 << 47) - 2 * PAGE_SIZE
"""The end of user addresses (TASK_SIZE_MAX of arch/x86/include/asm/page_64_types.h), minus a page."""
_NOWHERE = 1 << 64
_BLOCK = 1 << 16
_ALIGNMENT = 16
_DISTANCE = 16 << 20
"""Distance in bytes between a mapping and a block if there is room, so that the neighbouring mapping can grow."""
_SHORT_DISTANCE = 1 << 20
"""Distance in bytes if there is less room."""
_SHARED_FROM = PAGE_SIZE
"""Minimum number of possible targets with which a punned jump may share a page in use."""
_LOOKED_AT = 8
"""Maximum number of pages with room that are tried before a new one is taken."""
_HOLES_LOOKED_AT = 64
"""Maximum number of holes in blocks that are tried before a new block is begun."""
_SMALLEST_HOLE = 64
_BYTE = 8
_AHEAD = 64 << 20
_ORIGINS = tuple(
    each << 20 for each in (0, 112, 368, 496, -16, -80, -96, -192, -352, -480, 624, 752, 880, 1008, -816, -1632, 1552)
)
"""Offsets from the module from which blocks with certain upper bytes of the distance are searched, nearest first."""


class AddressSpace:
    """
    Allocator of addresses for trampolines near a module, which is mapped from ``start`` to ``end`` (excluded).

    Ranges of the ``growth`` of the process are left out. At most ``regions_max`` regions are begun, because the kernel
    limits mappings (vm.max_map_count).
    """

    def __init__(
        self, mappings: Iterable[Mapping], start: int, end: int, *, growth: Growth | None = None,
        regions_max: int = 30_000,
    ) -> None:  # fmt: skip
        gaps = free_ranges(mappings, growth or Growth(), _LOW if start >= _LOW else _LOWEST, _HIGH)
        self._gap_starts, self._gap_ends = [first for first, _ in gaps], [last for _, last in gaps]
        self._near = start, end
        self._regions_left = regions_max
        self._used: list[tuple[int, int]] = []
        self._blocks: list[list[int]] = []  # cursor and end; the latest last
        self._holes: list[tuple[int, int]] = []
        """Free ranges in blocks, before the cursor or where displacements trap. The latest range is the last item."""
        self._pages: list[int] = []
        self._cursors: dict[int, int] = {}
        self._searched: dict[int, int] = {}
        """Page of the latest claim, by the number of the 16 MiB in which the range of the claim begins."""

    def allocate(self, first: int, last: int, size: int, base: int = 0, landings: Collection[int] = ()) -> int | None:
        """
        Return an address from ``first`` to ``last`` (included) for ``size`` bytes in a block, or None without room.

        A jump that ends at ``base`` then has trapping bytes at the indices ``landings`` of its displacement.
        """
        if landings:
            return self._allocate_trapping(first, last, size, _Distances(base, frozenset(landings)))
        for block in reversed(self._blocks):
            cursor, end = block
            if first <= cursor <= last and cursor + size <= end:
                block[0] = _aligned(cursor + size)
                return cursor
        start = self._room_for_block(first, last, max(_BLOCK, _page_end(size)))
        if start is None or not self._begin_region():
            return None
        end = start + max(_BLOCK, _page_end(size))
        insort(self._used, (start, end))
        self._blocks.append([_aligned(start + size), end])
        return start

    def _allocate_trapping(self, first: int, last: int, size: int, distances: _Distances) -> int | None:
        for number in range(len(self._holes) - 1, max(-1, len(self._holes) - 1 - _HOLES_LOOKED_AT), -1):
            start, end = self._holes[number]
            address = distances.next_address(max(first, start))
            if address <= last and address + size <= end:
                del self._holes[number]
                self._add_holes((start, address), (address + size, end))
                return address
        for origin in _ORIGINS:
            found = self._trapping_block(first, last, size, distances, self._near[0 if origin < 0 else 1] + origin)
            if found is not None:
                return found
        return None

    def _trapping_block(self, first: int, last: int, size: int, distances: _Distances, origin: int) -> int | None:
        """Begin a block for an address a little above ``origin``; return the address, or None if there is no room."""
        limit = min(last, origin + _AHEAD)
        address = distances.next_address(max(first, origin))
        while address <= limit:
            start = address & -PAGE_SIZE
            length = max(_BLOCK, _page_end(address + size) - start)
            if not self._is_free(start, length):
                after = max(start + PAGE_SIZE, self._next_gap(start))
            elif (end := self._end_of_use(start, length)) is not None:
                after = _page_end(end)
            elif self._begin_region():
                insort(self._used, (start, start + length))
                self._add_holes((start, address), (address + size, start + length))
                return address
            else:
                return None
            address = distances.next_address(after)
        return None

    def _end_of_use(self, address: int, size: int) -> int | None:
        """Return the end of the used range that overlaps the bytes, or None if there is none."""
        i = bisect_left(self._used, (address + size, 0))
        return self._used[i - 1][1] if i and self._used[i - 1][1] > address else None

    def _add_holes(self, *holes: tuple[int, int]) -> None:
        self._holes += [(start, end) for start, end in holes if end - start >= _SMALLEST_HOLE]

    def claim(self, first: int, last: int, size: int) -> int | None:
        """
        Return an address from ``first`` to ``last`` (included) for ``size`` bytes outside of blocks.

        Return None without room.
        """
        if last - first >= _SHARED_FROM:
            found = self._in_shared_page(first, last, size)
            return found if found is not None else self._in_new_page(first, last, size)
        i = max(0, bisect_right(self._used, (first, _HIGH)) - 1)
        address = first
        while address <= last:
            while i < len(self._used) and self._used[i][1] <= address:
                i += 1
            if i < len(self._used) and self._used[i][0] < address + size:
                address = self._used[i][1]
            elif not self._is_free(address, size):
                address = self._next_gap(address)
            else:
                return address if self._take(address, size) else None
        return None

    def release(self, address: int, size: int) -> None:
        """Release claimed bytes. Bytes of a block are not reused."""
        i = bisect_left(self._used, (address, address + size))
        if i < len(self._used) and self._used[i] == (address, address + size):
            del self._used[i]

    def regions(self) -> list[tuple[int, int]]:
        """Return start and end (excluded) of all ranges that must be mapped, in whole pages, by ascending address."""
        found: list[tuple[int, int]] = []
        for start, end in self._used:
            first, last = start & -PAGE_SIZE, _page_end(end)
            if found and first <= found[-1][1]:
                found[-1] = found[-1][0], max(last, found[-1][1])
            else:
                found.append((first, last))
        return found

    def _is_free(self, address: int, size: int) -> bool:
        """Return True if the process has no mapping in the pages of these bytes."""
        i = bisect_right(self._gap_starts, address) - 1
        return i >= 0 and address + size <= self._gap_ends[i]

    def _next_gap(self, address: int) -> int:
        """Return the start of the first gap after an address."""
        i = bisect_right(self._gap_starts, address)
        return self._gap_starts[i] if i < len(self._gap_starts) else _NOWHERE

    def _take(self, address: int, size: int) -> bool:
        """Mark bytes as used; return False if their page would exceed the limit of regions."""
        interval = address, address + size
        i = bisect_left(self._used, interval)
        page, end = address & -PAGE_SIZE, _page_end(address + size)
        touches = (i > 0 and self._used[i - 1][1] > page) or (i < len(self._used) and self._used[i][0] < end)
        if not touches and not self._begin_region():
            return False
        self._used.insert(i, interval)
        return True

    def _begin_region(self) -> bool:
        self._regions_left -= 1
        return self._regions_left >= 0

    def _in_shared_page(self, first: int, last: int, size: int) -> int | None:
        i = bisect_right(self._pages, last)
        for page in reversed(self._pages[max(0, i - _LOOKED_AT) : i]):
            cursor = self._cursors[page]
            if first <= cursor <= last and cursor + size <= page + PAGE_SIZE and self._is_unused(cursor, size):
                self._cursors[page] = _aligned(cursor + size)
                insort(self._used, (cursor, cursor + size))
                return cursor
        return None

    def _is_unused(self, address: int, size: int) -> bool:
        i = bisect_left(self._used, (address, 0))
        return not (i and self._used[i - 1][1] > address) and not (
            i < len(self._used) and self._used[i][0] < address + size
        )

    def _in_new_page(self, first: int, last: int, size: int) -> int | None:
        """
        Return an address in an unused page, or None if there is none.

        The search starts at the page that was found last.
        """
        key, start = first >> 24, _page_end(first)
        found = None
        for begin in (max(start, self._searched.get(key, 0)), start):
            found = self._unused_page(begin, last, _page_end(size))
            if found is not None or begin == start:
                break
        if found is None or not self._take(found, size):
            return None
        self._searched[key] = found
        insort(self._pages, found)
        self._cursors[found] = _aligned(found + size)
        return found

    def _unused_page(self, page: int, last: int, size: int) -> int | None:
        """Return the first page from ``page`` to ``last`` with ``size`` unused bytes, or None if there is none."""
        while page <= last:
            if not self._is_free(page, size):
                page = _page_end(self._next_gap(page))
            elif not self._is_unused(page, size):
                page += PAGE_SIZE
            else:
                return page
        return None

    def _room_for_block(self, first: int, last: int, size: int) -> int | None:
        """Return an address for a block, near the module and away from mappings if possible, or None without room."""
        for distance in (_DISTANCE, _SHORT_DISTANCE, 0):
            places = [
                place
                for start, end in zip(self._gap_starts, self._gap_ends, strict=True)
                if (place := self._in_gap(max(first, start + distance), min(last, end - distance - size), size))
                is not None
            ]
            if places:
                return min(places, key=self._away)
        return None

    def _away(self, address: int) -> int:
        start, end = self._near
        return address - end if address >= end else start - address

    def _in_gap(self, first: int, last: int, size: int) -> int | None:
        """
        Return the free address from ``first`` to ``last`` for a block that is nearest to the module.

        Return None without room.
        """
        low, high = _page_end(first), last & -PAGE_SIZE
        if low > high:
            return None
        return self._beside_used(low, high, size, 1 if low >= self._near[1] else -1)

    def _beside_used(self, low: int, high: int, size: int, direction: int) -> int | None:
        """
        Return the first free address for ``size`` bytes, or None without room.

        The search goes from ``low`` upwards if ``direction`` is 1, and from ``high`` downwards if it is -1.
        """
        start = low if direction > 0 else high
        while low <= start <= high:
            i = bisect_left(self._used, (start + size, 0))
            before = self._used[i - 1] if i else None
            if before is None or before[1] <= start:
                return start
            start = _page_end(before[1]) if direction > 0 else (before[0] - size) & -PAGE_SIZE
        return None


class _Distances:
    """Displacements from an address in which some bytes, given by index, are instructions that trap."""

    def __init__(self, base: int, landings: frozenset[int]) -> None:
        self._base = base
        self._landings = sorted(landings, reverse=True)

    def next_address(self, address: int) -> int:
        """Return the first address with such a displacement that is not below ``address``."""
        distance = address - self._base
        for number in self._landings:
            unit = 1 << _BYTE * number
            byte = distance // unit & 0xFF
            i = bisect_left(TRAPS, byte)
            if i == len(TRAPS):  # carry into the next higher byte, which may not trap then
                above = unit << _BYTE
                return self.next_address(self._base + (distance // above + 1) * above)
            if TRAPS[i] != byte:
                distance = (distance // unit - byte + TRAPS[i]) * unit
        return self._base + distance


def _aligned(address: int) -> int:
    return address + _ALIGNMENT - 1 & -_ALIGNMENT


def _page_end(address: int) -> int:
    """Return the first page boundary that is not below an address."""
    return address + PAGE_SIZE - 1 & -PAGE_SIZE
