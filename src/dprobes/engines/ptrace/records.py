"""The records of one run: which header items they carry, and their bytes (``record.layout``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.ptrace.syscalls import Register
from dprobes.record.layout import PROCESS_NAME_MAX, Item, header_struct

if TYPE_CHECKING:
    import ctypes

    from dprobes.engines.ptrace.context import ThreadContext
    from dprobes.vm import Outcome

__all__ = ["RecordBuilder"]


class RecordBuilder:
    """Build records that carry ``items``; an item costs time at each hit, so only what is asked for is looked up."""

    def __init__(self, items: int) -> None:
        self._items = Item(items) | Item.MAJOR | Item.MINOR

    def header(
        self, context: ThreadContext, registers: ctypes.Array[ctypes.c_ulong], word_size: int
    ) -> tuple[int, list[int], bytes]:
        """
        Return flags, items and tail of a record for the state before the probed instruction.

        The first two items, major and minor, are zeros to be filled in by ``record``.
        """
        items = self._items
        values = [0, 0]
        if items & Item.CPU:
            values.append(context.cpu())
        if items & Item.PID:
            values.append(context.pid())
        if items & Item.UID:
            values.append(context.uid())
        if items & Item.CS:
            values.append(registers[Register.CS])
        if items & Item.IP:
            values.append(registers[Register.RIP])
        if items & Item.SS:
            values.append(registers[Register.SS])
        if items & Item.SP:
            values.append(registers[Register.RSP])
        if items & Item.TIME:
            values.append(context.time())
        tail = b""
        if items & Item.PROCESS_NAME:
            tail = context.process_name()[:PROCESS_NAME_MAX] + b"\0"
        if items & Item.TID:
            tail += context.tid().to_bytes(4, "little")
        return int(items | Item.WIDE if word_size == 8 else items), values, tail

    def record(self, header: tuple[int, list[int], bytes], outcome: Outcome) -> bytes:
        """Return the record of a handler's log buffer."""
        flags, values, tail = header
        values[0], values[1] = outcome.major, outcome.minor
        return header_struct(flags, "little").pack(flags, *values) + tail + outcome.log

    def stack_trace(self, header: tuple[int, list[int], bytes], outcome: Outcome) -> bytes:
        """Return the record of a handler's stack trace; its major and minor codes stay 0."""
        flags, values, tail = header
        flags |= Item.STACK_TRACE
        values[0] = values[1] = 0
        return header_struct(flags, "little").pack(flags, *values) + tail + outcome.trace
