"""
Out-of-line slots: places outside a program's own code where copies of its probed instructions are executed.

A slot is one or two times 16 bytes. The jump at its end leads a thread back, even if the tracer dies meanwhile::

    copy of the instruction | jmp rel32 to the instruction behind the original one
    repeated string instruction | int3 | jmp rel32 ...

This module holds the data; ``single_steps`` finds the memory.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.ptrace.breakpoint_sites import Site

__all__ = ["GRANULE", "JUMP_SIZE", "NOP", "Placement", "Slot", "SlotArea", "Slots"]

NOP = 0x90
"""What the crash restorer puts in the place of an int3 in a slot."""

GRANULE = 16
"""What the size and address of a slot are multiples of, in bytes."""


class Placement(enum.Enum):
    """Where a probed instruction is executed."""

    EMULATED = "emulated"
    """By the tracer, on the thread's registers and stack."""
    PAGE = "in a page"
    """In a page that the process mapped for us."""
    PADDING = "in padding"
    """In the unused end of the last page of a module's code."""
    IN_PLACE = "in place"
    """With all other threads of the address space stopped."""


JUMP_SIZE = 5
"""The bytes of jmp rel32."""


@dataclass(frozen=True, slots=True)
class Slot:
    """
    A slot.

    ``site`` is the address of the original instruction, ``end`` that behind the copy. ``is_free`` says that threads run
    through it without a stop, because the instruction cannot fault; ``leads_on`` that they may, if somebody looks later
    whether it has. ``trap`` is the address of the int3, or 0.
    """

    address: int
    site: int
    end: int
    placement: Placement
    is_free: bool = False
    leads_on: bool = False
    pushes_return: bool = False
    trap: int = 0
    size: int = 2 * GRANULE

    @property
    def following(self) -> int:
        """The address behind the original instruction."""
        return self.site + self.end - self.address


@dataclass(slots=True)
class SlotArea:
    """Memory for slots; ``former`` is what padding held before, and None for a page of ours."""

    start: int
    end: int
    former: bytes | None = None
    used: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)
    """Address and size of slots whose module is gone."""

    def find(self, size: int) -> int | None:
        """Return the address that ``take`` will return, or None if there is no room."""
        for address, free in self.free:
            if free == size:
                return address
        return self.start + self.used if self.end - self.start - self.used >= size else None

    def take(self, address: int, size: int) -> None:
        """Take the slot that was found."""
        if (address, size) in self.free:
            self.free.remove((address, size))
        else:
            self.used += size


@dataclass(slots=True)
class Slots:
    """The slots of one address space."""

    areas: list[SlotArea] = field(default_factory=list)
    by_address: dict[int, Slot] = field(default_factory=dict)
    by_site: dict[tuple[int, bytes], Slot | None] = field(default_factory=dict)
    """By address and bytes of the original instruction; None for one that is stepped in place."""
    padding: list[tuple[int, int]] = field(default_factory=list)
    """Start and end of the unused ends of code pages, not yet made areas of."""
    refused: set[int] = field(default_factory=set)
    """The regions of memory for which no page could be had."""

    def copy(self) -> Slots:
        """Return the slots of a forked child, whose memory holds the same."""
        return Slots(
            [replace(area, free=list(area.free)) for area in self.areas],
            dict(self.by_address),
            dict(self.by_site),
            list(self.padding),
            set(self.refused),
        )

    def forget(self, start: int, end: int) -> None:
        """Forget what was in memory that is gone: padding, and the slots in it or for its sites."""
        self.padding = [area for area in self.padding if not start < area[1] <= end]
        self.areas = [area for area in self.areas if not start < area.end <= end]
        for address, slot in self.by_address.items():
            for area in self.areas:
                if start <= slot.site < end and area.start <= address < area.end:
                    area.free.append((address, slot.size))
        self.by_address = {
            address: slot
            for address, slot in self.by_address.items()
            if not start <= address < end and not start <= slot.site < end
        }
        self.by_site = {
            key: slot
            for key, slot in self.by_site.items()
            if not start <= key[0] < end and not (slot and start <= slot.address < end)
        }

    def keep(self, is_same: Callable[[int, int], bool], is_mapped: Callable[[int], bool]) -> None:
        """
        Forget what the memory of a forked child does not hold: what was made after the kernel had copied it.

        ``is_same`` says whether memory between two addresses is as in the parent, ``is_mapped`` whether there is any.
        """
        missing = {a for a, slot in self.by_address.items() if not is_same(a, slot.end + JUMP_SIZE)}
        if not missing:
            return
        self.by_address = {a: slot for a, slot in self.by_address.items() if a not in missing}
        self.by_site = {
            site: slot for site, slot in self.by_site.items() if slot is None or slot.address not in missing
        }
        self.areas = [area for area in self.areas if is_mapped(area.start)]

    def known(self, address: int, site: Site) -> Slot | None:
        """Return the slot that the instruction at an address has already."""
        return None if site.copy is None else self.by_site.get((address, site.original))

    def way_on(self, address: int, site: Site) -> int:
        """Return where a thread could execute by itself the instruction at an address, as far as that is known."""
        slot = None if site.copy is None else self.by_site.get((address, site.original))
        return address if slot is None else slot.address

    def traps(self) -> list[tuple[int, int]]:
        """Return the address of each int3 in a slot, and what may stand in its place."""
        return [(slot.trap, NOP) for slot in self.by_address.values() if slot.trap]

    def holding(self, address: int) -> Slot | None:
        """Return the slot in which an address lies."""
        start = address & -GRANULE
        return self.by_address.get(start) or self.by_address.get(start - GRANULE)
