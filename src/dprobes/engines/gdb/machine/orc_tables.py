"""
Tables by which a kernel of x86-64 unwinds its own stacks (ORC), read from the memory of a machine.

The kernel and each module have two arrays, sorted by address. An element of the first array is the distance from the
element itself to the code. An element of the second is a ``struct orc_entry`` (``arch/x86/include/asm/orc_types.h``)::

    s16 sp_offset │ s16 bp_offset │ u16 sp_reg:4 bp_reg:4 type … flags

The bits of the type and the set of types differ between versions. The kernel's type information (BTF) shows them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import TargetError
from dprobes.target.btf import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.target.btf import Btf

__all__ = ["OrcEntry", "OrcKind", "OrcLayout", "OrcRegister", "OrcTable"]

_ENTRY = struct.Struct("<hhH")
_WORD = 4
_MASK = (1 << 64) - 1


class OrcRegister(IntEnum):
    """Registers that an entry in the kernel's ORC tables names (ORC_REG_*)."""

    UNDEFINED = 0
    PREV_SP = 1
    DX = 2
    DI = 3
    BP = 4
    SP = 5
    R10 = 6
    R13 = 7
    BP_INDIRECT = 8
    SP_INDIRECT = 9


class OrcKind(IntEnum):
    """Types of entries in the kernel's ORC tables, numbered as since Linux 6.4."""

    UNDEFINED = 0
    END_OF_STACK = 1
    CALL = 2
    REGS = 3
    REGS_PARTIAL = 4


_FORMER_KINDS = (OrcKind.CALL, OrcKind.REGS, OrcKind.REGS_PARTIAL)
"""
Types of entries, numbered as when the end of a stack was a separate bit.

Linux kernel commit fb799447ae29 ("x86,objtool: Split UNWIND_HINT_EMPTY in two") (in v6.4).
"""


class OrcEntry(NamedTuple):
    """Entry of the kernel's ORC tables: the rule by which the caller's frame is found from the frame of the code."""

    sp_register: int
    sp_offset: int
    bp_register: int
    bp_offset: int
    kind: OrcKind


@dataclass(frozen=True, slots=True)
class OrcLayout:
    """
    Position of the type in an ORC entry, and of the bit for the end of a stack.

    ``end_place`` is None if the end of a stack is a type of its own.
    """

    type_place: int
    type_width: int
    end_place: int | None

    @classmethod
    def of(cls, types: Btf) -> OrcLayout | None:
        """Return the layout from a kernel's types, None if it has no such tables."""
        try:
            entry = types.find(Kind.STRUCT, "orc_entry")
        except TargetError:
            return None
        kind, end = types.member(entry, "type"), types.member(entry, "end")
        if kind is None or not kind.width:
            return None
        return cls(kind.bits - 8 * _WORD, kind.width, None if end is None else end.bits - 8 * _WORD)

    def entry(self, data: bytes) -> OrcEntry | None:
        """Return the decoded ORC entry in ``data``, of the size of struct orc_entry, or None if its type is unknown."""
        sp_offset, bp_offset, bits = _ENTRY.unpack(data)
        number = bits >> self.type_place & (1 << self.type_width) - 1
        if self.end_place is None:
            kinds: tuple[OrcKind, ...] = tuple(OrcKind)
        elif bits >> self.end_place & 1:
            kinds, number = (OrcKind.END_OF_STACK,), 0
        else:
            kinds = _FORMER_KINDS
        if number >= len(kinds):
            return None
        return OrcEntry(bits & 0xF, sp_offset, bits >> 4 & 0xF, bp_offset, kinds[number])


class OrcTable:
    """
    Unwind table of some code: ``count`` elements at ``addresses``, and as many at ``entries``.

    ``read`` returns memory, or fewer bytes if some cannot be read. The tables do not change, so their contents are
    cached.
    """

    def __init__(
        self, read: Callable[[int, int], bytes], layout: OrcLayout, addresses: int, entries: int, count: int
    ) -> None:
        self._read, self._layout = read, layout
        self._addresses, self._entries, self._count = addresses, entries, count
        self._starts: dict[int, int] = {}
        self._found: dict[int, OrcEntry | None] = {}

    def _start(self, number: int) -> int:
        if number not in self._starts:
            place = self._addresses + number * _WORD
            data = self._read(place, _WORD)
            if len(data) < _WORD:
                raise TargetError(f"an unwind table of the kernel at {place:#x} cannot be read")
            self._starts[number] = place + int.from_bytes(data, "little", signed=True) & _MASK
        return self._starts[number]

    def entry_at(self, address: int) -> OrcEntry | None:
        """Return the entry for an address, None if there is none; raise ``TargetError`` if it cannot be read."""
        if address not in self._found:
            low, high = 0, self._count
            while low < high:
                middle = (low + high) // 2
                low, high = (middle + 1, high) if self._start(middle) <= address else (low, middle)
            self._found[address] = None if not low else self._layout.entry(self._bytes(low - 1))
        return self._found[address]

    def _bytes(self, number: int) -> bytes:
        place = self._entries + number * _ENTRY.size
        data = self._read(place, _ENTRY.size)
        if len(data) < _ENTRY.size:
            raise TargetError(f"an unwind table of the kernel at {place:#x} cannot be read")
        return data
