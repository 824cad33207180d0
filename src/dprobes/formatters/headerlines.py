"""
The header line of encoded records, without decoding them: a format string for each flag word that occurs.

It says the same as ``text.header_line`` in a fifth of the time. What varies in length, the process name and whatever
comes behind it, is left to that.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from dprobes.record.layout import FIXED_ITEMS, Item, header_struct

if TYPE_CHECKING:
    from dprobes.record.layout import ByteOrder

__all__ = ["HeaderLine", "header_line_of"]

_PARTS = {
    Item.CPU: " cpu=%d",
    Item.PID: " pid=%d",
    Item.UID: " uid=%d",
    Item.CS: " cs=%x",
    Item.IP: " eip=%08x",
    Item.SS: " ss=%x",
    Item.SP: " esp=%08x",
    Item.TIME: " tsc=%08x:%08x",
}
_WIDE_PARTS = {Item.IP: " rip=%016x", Item.SP: " rsp=%016x"}

_KNOWN = Item.WIDE | Item.STACK_TRACE | sum(item for item, _ in FIXED_ITEMS)


class HeaderLine(NamedTuple):
    """
    Hold how records with one flag word begin.

    ``layout`` gives the values of ``template``; with ``has_time`` the last one stands for two: seconds, microseconds.
    """

    layout: struct.Struct
    template: str
    has_time: bool


def header_line_of(flags: int, byte_order: ByteOrder) -> HeaderLine | None:
    """Return how records with a flag word begin; None if they have to be decoded."""
    if flags & ~_KNOWN:
        return None
    template = "DProbes({},{})".format(
        "%d" if flags & Item.MAJOR else "0",
        "%d" if flags & Item.MINOR else "0",
    )
    parts = _PARTS | _WIDE_PARTS if flags & Item.WIDE else _PARTS
    template += "".join(part for item, part in parts.items() if flags & item)
    # The flag word itself is no item of the line.
    layout = struct.Struct(header_struct(flags, byte_order).format.replace("I", "4x", 1))
    return HeaderLine(layout, template, bool(flags & Item.TIME))
