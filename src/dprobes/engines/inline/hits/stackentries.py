"""
The entries of rings that have a copy of the program's stack in them, with the call stacks in their places.

Copies are followed as soon as they are read, one by one: that takes longer than all else that is done for a record.
"""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING

from dprobes.bpf.layout import ENTRY_HEAD, SNAPSHOT_REGISTERS, STACK_COPY, TALLY
from dprobes.bpf.lower.hosts.ptregs import REGISTER_OFFSETS
from dprobes.engines.copiedstacks import CopiedStacks
from dprobes.engines.linux.threadstack import COLUMNS_OF
from dprobes.errors import FormatError
from dprobes.record.codec import decode_record
from dprobes.rpn.isa import ITEM_PREFIX_SIZE, USER_FRAMES_MAX, Token
from dprobes.rpn.needs import takes_user_stacks
from dprobes.rpn.tables import KeyKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.engines.inline.memory.tablestores import SharedStore
    from dprobes.rpn.program import Program
    from dprobes.target.processimages import ProcessImages

__all__ = ["StackEntries"]

_WORD = 8
_REGISTERS_SIZE = _WORD * SNAPSHOT_REGISTERS
_PLACES = tuple(REGISTER_OFFSETS[name] for name in COLUMNS_OF[8].names)
_REGISTER = struct.Struct("=Q")


class StackEntries:
    """What follows the stacks of a program whose handlers take some, and takes them into its ``tables`` as keys."""

    def __init__(self, tables: Sequence[SharedStore], images: ProcessImages | None = None) -> None:
        self._tables = tables
        self._copies = CopiedStacks(images)

    @classmethod
    def of(
        cls, program: Program, tables: Sequence[SharedStore], images: ProcessImages | None = None
    ) -> StackEntries | None:
        """Return it for a program; None if that takes no stacks."""
        return cls(tables, images) if takes_user_stacks(program) else None

    def record(self, data: bytes, canonical: Callable[[bytes], bytes]) -> bytes:
        """Return the record of a STACKED entry; ``canonical`` is its form for records as handlers write them."""
        pid, last, size, _ = _copy_of(data)
        record = canonical(data[ENTRY_HEAD.size : size])
        log = decode_record(record).data
        head, stack = len(record) - len(log), self._stack(pid, data)
        before = len(log) + 1
        while 0 < last < before and last <= len(log) - ITEM_PREFIX_SIZE - _WORD and log[last - 1] == Token.USER_STACK:
            position = last - 1
            start = position + ITEM_PREFIX_SIZE
            room = int.from_bytes(log[position + 1 : start], sys.byteorder)
            last = int.from_bytes(log[start : start + _WORD], sys.byteorder)
            kept = stack[:room]
            words = b"".join(word.to_bytes(_WORD, sys.byteorder) for word in kept)
            prefix = bytes([Token.USER_STACK]) + len(kept).to_bytes(2, sys.byteorder)
            log = log[:position] + prefix + words + log[start + room * _WORD :]
            before = position + 1
        return record[:head] + log

    def tally(self, data: bytes) -> None:
        """Take the number of a TALLY entry into its table."""
        pid, _, size, _ = _copy_of(data)
        if size < ENTRY_HEAD.size + TALLY.size:
            raise FormatError(f"a key ends at {size} in an entry", offset=size)
        number, _, value = TALLY.unpack_from(data, ENTRY_HEAD.size)
        if number >= len(self._tables):
            raise FormatError(f"there is no table {number}", offset=ENTRY_HEAD.size)
        store = self._tables[number]
        key = bytearray(data[ENTRY_HEAD.size + TALLY.size : size])
        if len(key) != store.table.key_size or not store.table.has_user_stack:
            raise FormatError(f"a key of {len(key)} bytes for table {number}", offset=ENTRY_HEAD.size)
        frames = max(part.size for part in store.table.keys if part.kind is KeyKind.USER_STACK)
        stack = self._stack(pid, data, frames)
        position = 0
        for part in store.table.keys:
            if part.kind is KeyKind.USER_STACK:
                words = b"".join(frame.to_bytes(_WORD, sys.byteorder) for frame in stack[: part.size])
                key[position + _WORD : position + part.bytes] = words.ljust(part.bytes - _WORD, b"\0")
            position += part.bytes
        store.tally(bytes(key), value)

    def _stack(self, pid: int, data: bytes, frames: int = USER_FRAMES_MAX) -> tuple[int, ...]:
        """Follow the stack whose copy is at the end of an entry."""
        _, _, size, copied = _copy_of(data)
        first = -(-size // _WORD) * _WORD
        start = first + _REGISTERS_SIZE
        registers = {column: int(_REGISTER.unpack_from(data, first + place)[0]) for column, place in enumerate(_PLACES)}
        return self._copies.follow(pid, 8, registers, data[start : start + copied], frames)

    def close(self) -> None:
        """Let go of all processes."""
        self._copies.close()


def _copy_of(data: bytes) -> tuple[int, int, int, int]:
    """Return what the end of an entry says; raise ``FormatError`` if the parts that it names are not in the entry."""
    end = len(data) - STACK_COPY.size
    if end < ENTRY_HEAD.size:
        raise FormatError(f"an entry with a copy of a stack has {len(data)} bytes", offset=0)
    pid, last, size, copied = STACK_COPY.unpack_from(data, end)
    needed = -(-size // _WORD) * _WORD + _REGISTERS_SIZE + copied
    if size < ENTRY_HEAD.size or needed > end:
        raise FormatError(f"an entry of {len(data)} bytes names {needed} bytes of registers and stack", offset=end)
    return pid, last, size, copied
