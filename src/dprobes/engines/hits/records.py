"""The records of one run: which header items they carry, and their bytes (``record.layout``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.record.layout import PROCESS_NAME_MAX, Item, header_struct

if TYPE_CHECKING:
    from dprobes.arch import ByteOrder
    from dprobes.engines.hits.hitcontext import HitContext
    from dprobes.vm import Outcome

__all__ = ["Header", "RecordBuilder"]

Header = tuple[int, list[int], bytes]
"""The flag word of a record, its items up to the process name, and the bytes of the rest."""


_IP = int(Item.IP)


class RecordBuilder:
    """
    Build records that carry ``items``, in a target's byte order.

    An item costs time at each hit, so only what is asked for is looked up.
    """

    def __init__(self, items: int, byte_order: ByteOrder = "little") -> None:
        self._order: ByteOrder = byte_order
        # Plain numbers and truth values: operations on enum members are an order slower, and this runs at each hit.
        self._flags = int(items | Item.MAJOR | Item.MINOR)
        self._wide_flags = self._flags | int(Item.WIDE)
        self._cpu, self._pid, self._uid, self._time, self._name, self._tid = (
            bool(items & item) for item in (Item.CPU, Item.PID, Item.UID, Item.TIME, Item.PROCESS_NAME, Item.TID)
        )
        self._cs, self._ip, self._ss, self._sp = (bool(items & item) for item in (Item.CS, Item.IP, Item.SS, Item.SP))
        self._pointers = self._cs or self._ip or self._ss or self._sp

    def header(self, context: HitContext, word_size: int, *, keep_ip: bool = False) -> Header:
        """
        Return flags, items and tail of a record for the state before the probed instruction.

        The first two items, major and minor, are zeros to be filled in by ``record``. ``keep_ip`` adds the instruction
        pointer to what was asked for.
        """
        values = [0, 0]
        if self._cpu:
            values.append(context.cpu())
        if self._pid:
            values.append(context.pid())
        if self._uid:
            values.append(context.uid())
        if self._pointers or keep_ip:
            cs, ip, ss, sp = context.pointers()
            if self._cs:
                values.append(cs)
            if self._ip or keep_ip:
                values.append(ip)
            if self._ss:
                values.append(ss)
            if self._sp:
                values.append(sp)
        if self._time:
            values.append(context.time())
        tail = context.process_name()[:PROCESS_NAME_MAX] + b"\0" if self._name else b""
        if self._tid:
            tail += context.tid().to_bytes(4, self._order)
        flags = self._wide_flags if word_size == 8 else self._flags
        return flags | _IP if keep_ip else flags, values, tail

    def record(self, header: Header, outcome: Outcome) -> bytes:
        """Return the record of a handler's log buffer."""
        flags, values, tail = header
        if outcome.is_cut:
            flags |= int(Item.CUT)
        values[0], values[1] = outcome.major, outcome.minor
        return header_struct(flags, self._order).pack(flags, *values) + tail + outcome.log

    def stack_trace(self, header: Header, outcome: Outcome) -> bytes:
        """Return the record of a handler's stack trace; its major and minor codes stay 0."""
        flags, values, tail = header
        flags |= int(Item.STACK_TRACE)
        values[0] = values[1] = 0
        return header_struct(flags, self._order).pack(flags, *values) + tail + outcome.trace
