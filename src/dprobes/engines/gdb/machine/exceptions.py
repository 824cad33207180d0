"""
Where a processor goes on when an instruction faults: the first entries of its interrupt descriptor table.

A gate of 64-bit mode has 16 bytes (AMD64 APM, volume 2, section 4.8.4)::

    0..1 offset 0-15 │ 2..3 selector │ 4 IST │ 5 type, present │ 6..7 offset 16-31 │ 8..11 offset 32-63 │ 12..15
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["fault_entries"]

_GATE = struct.Struct("<HHBBHII")
_PRESENT = 0x80
_EXCEPTIONS = 32
_TRAPS = frozenset({1, 2, 3, 4, 18})
"""What comes behind an instruction, of it or of something else: debug traps, NMI, int3, into, machine checks."""


def fault_entries(read: Callable[[int, int], bytes], table: int, limit: int) -> frozenset[int]:
    """Return the addresses at which the handlers of faults begin; ``read`` reads memory."""
    count = min(_EXCEPTIONS, (limit + 1) // _GATE.size)
    data = read(table, count * _GATE.size)
    found = set()
    for number in range(len(data) // _GATE.size):
        low, _, _, kind, middle, high, _ = _GATE.unpack_from(data, number * _GATE.size)
        if number not in _TRAPS and kind & _PRESENT:
            found.add(low | middle << 16 | high << 32)
    return frozenset(found)
