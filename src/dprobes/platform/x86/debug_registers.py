"""
Debug registers of x86: the assignment of watches to the four slots, and the encoding in DR6 and DR7.

This module accesses no process and makes no system call. Intel SDM, volume 3, chapter 18 ("Debug, Branch Profile ..."),
section 2: DR0 to DR3 hold an address each, DR6 has a bit for each slot that was hit, and DR7 what each slot watches:

    bit   31 30 29 28 27 26 25 24 23 22 21 20 19 18 17 16 15 ...  8  7  6  5  4  3  2  1  0
         |LEN 3|R/W 3|LEN 2|R/W 2|LEN 1|R/W 1|LEN 0|R/W 0| -        |G3 L3|G2 L2|G1 L1|G0 L0|

R/W is 00 for execution, 01 for writes, 11 for reads and writes; LEN is 00, 01, 11, 10 for 1, 2, 4, 8 bytes. L enables a
slot; G does the same, and is not used because the kernel treats both alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dprobes.arch.x86_processors import WATCHPOINT_LENGTHS, WATCHPOINTS
from dprobes.rpn.rpn_program import Access

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "CONTROL",
    "SLOTS",
    "STATUS",
    "Watch",
    "assign",
    "control_bits",
    "decode",
    "is_enabled",
    "slot_mask",
    "slots_hit",
]

SLOTS = range(WATCHPOINTS)
STATUS = 6
"""The number of DR6."""
CONTROL = 7
"""The number of DR7."""

_ACCESS_BITS = {Access.EXECUTE: 0b00, Access.WRITE: 0b01, Access.READ_WRITE: 0b11}
_LENGTH_BITS = dict(zip(WATCHPOINT_LENGTHS, (0b00, 0b01, 0b11, 0b10), strict=True))

_ACCESSES = {bits: access for access, bits in _ACCESS_BITS.items()}
_LENGTHS = {bits: length for length, bits in _LENGTH_BITS.items()}

_T = TypeVar("_T")


class Watch(NamedTuple):
    """
    Setting of an x86 debug register: the watched bytes and the kind of access.

    Size and alignment must be those that the processor supports.
    """

    address: int
    length: int
    access: Access

    def is_touched(self, address: int, size: int, *, writes: bool) -> bool:
        """
        Return True if an access to ``size`` bytes of data at ``address`` hits the watch.

        ``writes`` tells a store from a load.
        """
        if self.access is Access.EXECUTE or not (writes or self.access is Access.READ_WRITE):
            return False
        return address < self.address + self.length and self.address < address + size


def control_bits(slot: int, watch: Watch) -> int:
    """Return the bits of DR7 that enable ``slot`` with the access and length of ``watch``."""
    return _LENGTH_BITS[watch.length] << 18 + 4 * slot | _ACCESS_BITS[watch.access] << 16 + 4 * slot | 1 << 2 * slot


def decode(control: int, slot: int, address: int) -> Watch | None:
    """
    Return the setting of debug register ``slot``, given DR7 and the address in it.

    Return None if disabled, or for I/O ports.
    """
    if not is_enabled(control, slot):
        return None
    access, length = control >> 16 + 4 * slot & 0b11, control >> 18 + 4 * slot & 0b11
    if access not in _ACCESSES:
        return None
    return Watch(address, _LENGTHS[length], _ACCESSES[access])


def slot_mask(slot: int) -> int:
    """Return the mask of all bits of DR7 that belong to the debug register ``slot``: L, G, R/W and LEN."""
    return 0xF << 16 + 4 * slot | 0b11 << 2 * slot


def is_enabled(control: int, slot: int) -> bool:
    """Return True if DR7 (``control``) enables the debug register ``slot``, locally or globally."""
    return bool(control & 0b11 << 2 * slot)


def slots_hit(status: int) -> list[int]:
    """Return the numbers of the debug registers whose watches DR6 (``status``) reports as hit."""
    return [slot for slot in SLOTS if status & 1 << slot]


def assign(current: Mapping[int, _T], wanted: Sequence[_T], taken: Iterable[int]) -> tuple[dict[int, _T], list[_T]]:
    """
    Assign ``wanted`` watches to debug registers that others have not ``taken``.

    Return the watches by register number, and the watches for which no register is left. A watch of ``current`` that is
    still wanted keeps its register. So a pending report of an earlier hit stays correct.
    """
    slots = {slot: item for slot, item in current.items() if item in wanted}
    free = [slot for slot in SLOTS if slot not in slots and slot not in set(taken)]
    # A slot that was free before is better, because no report of a hit can be pending for it.
    free.sort(key=lambda slot: slot in current)
    waiting = [item for item in wanted if item not in slots.values()]
    slots.update(zip(free, waiting, strict=False))
    return slots, waiting[len(free) :]
