"""
Places outside a program's own code where its probed instructions are executed (``relocate`` says how).

A slot is 32 bytes. The jump at its end leads a thread back even if the tracer dies while it is in there::

    copy of the instruction | jmp rel32 to the instruction behind the original one
    repeated string instruction | int3 | jmp rel32 ...

This module holds the data; ``slotmaking`` finds the memory.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

__all__ = ["SLOT_SIZE", "Placement", "Slot", "SlotArea", "Slots"]

SLOT_SIZE = 32


class Placement(enum.Enum):
    """Say where a probed instruction is executed."""

    EMULATED = "emulated"
    PAGE = "in a page of its own"
    PADDING = "in padding of the module"
    IN_PLACE = "in place, with all other threads stopped"


@dataclass(frozen=True, slots=True)
class Slot:
    """
    Hold one slot.

    ``site`` is the address of the original instruction, ``end`` that behind the copy. ``is_free`` says that threads run
    through it without a stop, because the instruction cannot fault. ``trap`` is the address of the int3, or 0.
    """

    address: int
    site: int
    end: int
    placement: Placement
    is_free: bool = False
    pushes_return: bool = False
    trap: int = 0

    @property
    def following(self) -> int:
        """The address behind the original instruction."""
        return self.site + self.end - self.address


@dataclass(slots=True)
class SlotArea:
    """Hold memory for slots; ``former`` is what padding held before, and None for a page of ours."""

    start: int
    end: int
    former: bytes | None = None
    used: int = 0
    free: list[int] = field(default_factory=list)
    """Slots whose module is gone."""

    @property
    def has_room(self) -> bool:
        """Whether another slot can be had."""
        return bool(self.free) or self.end - self.start - self.used >= SLOT_SIZE

    def next_address(self) -> int:
        """Return the address that ``take`` will return."""
        return self.free[-1] if self.free else self.start + self.used

    def take(self) -> int:
        """Take a slot and return its address."""
        if self.free:
            return self.free.pop()
        self.used += SLOT_SIZE
        return self.start + self.used - SLOT_SIZE


@dataclass(slots=True)
class Slots:
    """Hold the slots of one address space."""

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
                    area.free.append(address)
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

    def holding(self, address: int) -> Slot | None:
        """Return the slot in which an address lies."""
        start = address & ~15
        return self.by_address.get(start) or self.by_address.get(start - 16)
