"""
The calls of one process that have not returned, where handlers run in the process: layout and places.

The table is memory of that process alone, which its children do not inherit; ``MapName.ENTRIES`` names it. It consists
of slots of one size, a power of two, and is addressed by hashing::

     0 u64 key         the address of the return address, and from bit 48 on the probepoint; 0: the slot is free
     8 u64 time        when the call began; 0 while the slot is free, or being filled
    16 u64 ...         registers

A call is in one of the WINDOW slots from its place on. No two calls of a function that go on have the same key, so none
but their own threads write to their slots; a free slot is taken by an atomic exchange. A call that is left without a
return leaves its slot behind, until the same key is entered again, or a call that finds no other room takes the one
whose time is the oldest.
"""

from __future__ import annotations

from dprobes.bpf.layout import power_of_two
from dprobes.lazydataclass import dataclass

__all__ = ["KEY", "MULTIPLIER", "PROBE_SHIFT", "REGISTERS", "SLOTS_SHIFT", "TIME", "WINDOW", "CallTable", "call_key"]

KEY, TIME, REGISTERS = 0, 8, 16
PROBE_SHIFT = 48
"""Addresses of programs have less than 48 bits (Documentation/arch/x86/x86_64/mm.rst in the kernel)."""
SLOTS_SHIFT = 15
WINDOW = 16
MULTIPLIER = 0x9E37_79B9_7F4A_7C15
"""2**64 divided by the golden ratio: what lies close together is far apart afterwards (Knuth, volume 3, 6.4)."""
_WORD, _MASK, _LINE = 8, (1 << 64) - 1, 64


def call_key(probe: int, frame: int) -> int:
    """Return the key of a call."""
    return (frame | probe << PROBE_SHIFT) & _MASK


@dataclass(frozen=True, slots=True)
class CallTable:
    """Say how many bytes each slot has, of ``1 << SLOTS_SHIFT`` and what the last window needs."""

    slot: int

    @classmethod
    def of(cls, registers: int) -> CallTable:
        """Return a table for so many registers."""
        return cls(max(_LINE, power_of_two(REGISTERS + _WORD * registers)))

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return ((1 << SLOTS_SHIFT) + WINDOW) * self.slot

    def window(self, key: int) -> range:
        """Return where the slots begin in which a call may be."""
        first = (key * MULTIPLIER & _MASK) >> 64 - SLOTS_SHIFT
        return range(first * self.slot, (first + WINDOW) * self.slot, self.slot)
