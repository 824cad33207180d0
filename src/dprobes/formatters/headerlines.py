"""
The header line of encoded records, without decoding them: a format string for each flag word that occurs.

It says the same as ``text.header_line`` in a fifth of the time. What varies in length, the process name and whatever
comes behind it, is left to that.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.escapes import escaped
from dprobes.lazynamedtuple import NamedTuple
from dprobes.record.codec import flag_word
from dprobes.record.layout import FIXED_ITEMS, Item, header_struct

if TYPE_CHECKING:
    from dprobes.record.layout import ByteOrder

__all__ = ["HeaderLine", "HeaderLines", "header_line_of"]

_NANOSECONDS = 1_000_000_000

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


class HeaderLines:
    """Make the header lines of encoded records."""

    def __init__(self) -> None:
        self._lines: dict[bytes, HeaderLine | None] = {}

    def split(self, record: bytes, wall_offset: int, function: str) -> tuple[str, int] | None:
        """Return the header line of a record, and where its data starts; None if it has to be decoded."""
        flags = record[:4]
        try:
            line = self._lines[flags]
        except KeyError:
            line = self._lines[flags] = header_line_of(*flag_word(record))
        if line is None or len(record) < line.layout.size:
            return None
        values = line.layout.unpack_from(record)
        if line.has_time:
            seconds, nanoseconds = divmod(values[-1] + wall_offset, _NANOSECONDS)
            values = (*values[:-1], seconds, nanoseconds // 1000)
        header = line.template % values
        return f"{header} function={escaped(function, blanks=True)}" if function else header, line.layout.size
