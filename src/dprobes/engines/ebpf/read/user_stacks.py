"""
User-space call stacks: from the snapshots that handlers take to the addresses in records and keys of tables.

In the ring, a snapshot precedes its record or key. The stack is unwound when the snapshot is read (``copied_stacks``).
"""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING, Literal

from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.bpf.map_layouts import KEY_POSITION, SNAPSHOT, SNAPSHOT_REGISTERS, TALLY
from dprobes.engines.copied_stacks import CopiedStacks
from dprobes.platform.linux.thread_stack import COLUMNS_OF
from dprobes.record.log_record import decode_record
from dprobes.rpn.instruction_set import ITEM_PREFIX_SIZE, StackEnd, Token
from dprobes.rpn.keyed_tables import KeyKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping as MappingOf

    from dprobes.keyed.table_entries import TableStore
    from dprobes.target.process_images import ProcessImages

__all__ = ["UserStacks"]

_WORDS = struct.Struct(f"={SNAPSHOT_REGISTERS}Q")


class UserStacks:
    """
    Stacks whose records have not arrived yet, by the number of the handler's state and the offset in the log.

    ``images`` has the mappings of processes that have ended; ``look`` updates it. ``stores`` has the keyed tables with
    call stacks, by number.
    """

    def __init__(
        self,
        images: ProcessImages | None = None,
        look: Callable[[], None] | None = None,
        stores: MappingOf[int, TableStore] | None = None,
    ) -> None:
        self._stores = stores or {}
        self._copies = CopiedStacks(images, look)
        self._waiting: dict[int, dict[int, tuple[int, ...]]] = {}
        self._is_given_up = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def close(self) -> None:
        """Close the files and descriptors that are open for the processes whose stacks were unwound."""
        self._copies.close()

    def give_up(self) -> None:
        """Unwind no more stacks: later ones get NO_COPY in place of their frames."""
        self._is_given_up = True

    def take(self, data: bytes, start: int, stop: int) -> None:
        """
        Unwind the stack copy in the ring entry ``data[start:stop]``, and keep the frames for the next entry.

        That is the record or the update of a keyed table to which the call stack belongs.
        """
        pid, number, position, size = SNAPSHOT.unpack_from(data, start)
        if self._is_given_up:
            self._keep(number, position, (StackEnd.NO_COPY,))
            return
        word_size: Literal[4, 8] = 8 if size == 8 else 4
        first = start + SNAPSHOT.size
        copied = first + 8 * SNAPSHOT_REGISTERS
        words = _WORDS.unpack_from(data, first)
        mask = (1 << 8 * word_size) - 1
        registers = {
            column: words[REGISTER_OFFSETS[name] // 8] & mask for column, name in enumerate(COLUMNS_OF[word_size].names)
        }
        self._keep(number, position, self._copies.follow(pid, word_size, registers, data[copied:stop]))

    def _keep(self, number: int, position: int, stack: tuple[int, ...]) -> None:
        places = self._waiting.setdefault(number, {})
        # A previous handler with the same number has written no record.
        for place in [place for place in places if place >= position]:
            del places[place]
        places[position] = stack

    def change(self, data: bytes, start: int, stop: int, *, is_removal: bool = False) -> None:
        """
        Apply the ring entry ``data[start:stop]``, which refers to a call stack, to its keyed table.

        TALLY tallies a number or stores bytes under its key. UNTALLY, with ``is_removal``, deletes the key.
        """
        number, state, value = TALLY.unpack_from(data, start)
        store = self._stores[number]
        places = self._waiting.get(state, {})
        stack = places.pop(KEY_POSITION, None)
        if not places:
            self._waiting.pop(state, None)
        table = store.table
        parts = bytearray(data[start + TALLY.size : stop])
        position = 0
        for part in table.keys if is_removal else table.parts:
            if part.kind is KeyKind.USER_STACK:
                frames = (StackEnd.NO_COPY,) if stack is None else stack[: part.size]
                words = b"".join(frame.to_bytes(8, sys.byteorder) for frame in frames)
                parts[position + 8 : position + part.bytes] = words.ljust(part.bytes - 8, b"\0")
            position += part.bytes
        key, kept = bytes(parts[: table.key_size]), bytes(parts[table.key_size :])
        if is_removal:
            store.delete(key)
        elif table.keeps_bytes:
            store.keep(key, kept)
        else:
            store.tally(key, value)

    def completed(self, record: bytes) -> bytes:
        """Return a record in which its handler's unwound stacks replace their placeholders."""
        decoded = decode_record(record)
        if decoded.is_stack_trace:
            return record
        head, order, word_size = len(record) - len(decoded.data), decoded.byte_order, decoded.word_size
        data = decoded.data
        for number, places in list(self._waiting.items()):
            if not all(_is_place(data, position, number, word_size) for position in places):
                continue
            del self._waiting[number]
            for position, stack in sorted(places.items(), reverse=True):
                start = position + ITEM_PREFIX_SIZE
                room = int.from_bytes(data[position + 1 : start], order)
                kept = stack[:room]
                words = b"".join(word.to_bytes(word_size, order) for word in kept)
                prefix = bytes([Token.USER_STACK]) + len(kept).to_bytes(2, order)
                data = data[:position] + prefix + words + data[start + room * word_size :]
        return record[:head] + data


def _is_place(data: bytes, position: int, number: int, word_size: int) -> bool:
    """Return whether a log has a placeholder with the number ``number`` at the offset ``position``."""
    start = position + ITEM_PREFIX_SIZE
    return data[position : position + 1] == bytes([Token.USER_STACK]) and data[
        start : start + word_size
    ] == number.to_bytes(word_size, sys.byteorder)
