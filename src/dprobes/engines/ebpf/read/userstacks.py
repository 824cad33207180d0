"""
The call stacks of programs: from the snapshots that handlers take to the addresses in their records.

A stack is followed as soon as its snapshot is read from the ring, while the process is likely to be there still: its
mappings and unwind tables are read from its memory. The stack itself is read from the copy only. Of a process that has
ended before, the files that it had mapped are read instead; older kernels (6.1) let the memory of one that waits for
its parent be opened all the same, and it is seen by its mappings that there is none.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Literal

from dprobes.bpf.layout import KEY_POSITION, SNAPSHOT, SNAPSHOT_REGISTERS, TALLY
from dprobes.bpf.lower.hosts.ptregs import REGISTER_OFFSETS
from dprobes.engines.linux.threadstack import COLUMNS_OF, logged_stack
from dprobes.errors import TargetError
from dprobes.record.codec import decode_record
from dprobes.rpn.isa import USER_FRAMES_MAX, StackEnd, Token
from dprobes.rpn.tables import KeyKind
from dprobes.target.processmaps import parse_maps, read_maps
from dprobes.target.unwind.filespace import FileSpace, MappedFiles
from dprobes.target.unwind.processspace import ProcessSpace

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping as MappingOf

    from dprobes.keyed.store import TableStore
    from dprobes.target.processimages import ProcessImage, ProcessImages
    from dprobes.target.processmaps import Mapping

__all__ = ["UserStacks"]

_PROCESSES_MAX = 64
"""How many processes' unwind tables are kept."""

_FRESH = 1.0
"""Seconds for which mappings count as those that a process has."""

_MAPS_MAX = 16 << 20

_CUT = frozenset((StackEnd.NO_TABLE, StackEnd.BAD_TABLE, StackEnd.UNREADABLE))
"""Why a stack ends that has more frames."""

_PREFIX_SIZE = 3
_WORDS = struct.Struct(f"={SNAPSHOT_REGISTERS}Q")


class _Process:
    """A process whose stacks are followed; ``copy`` is what is at ``sp`` at the moment of the snapshot."""

    def __init__(self, pid: int, word_size: Literal[4, 8], files: MappedFiles) -> None:
        self.memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        self._pid = pid
        self.space = ProcessSpace(word_size, self._read, self._mappings, partial(files.frames_at, pid))
        self.sp = 0
        self.copy = b""
        self.looked = time.monotonic()

    def _read(self, address: int, size: int) -> bytes:
        start = address - self.sp
        if 0 <= start <= len(self.copy) - size:
            return self.copy[start : start + size]
        if not self.space.is_of_file(address):
            raise TargetError(f"{size} bytes at {address:#x} are not in the copy of the stack")
        try:
            data = os.pread(self.memory, size, address)
        except (OSError, OverflowError, ValueError):
            data = b""
        if len(data) < size:
            raise TargetError(f"{size} bytes at {address:#x} cannot be read")
        return data

    def _mappings(self) -> list[Mapping]:
        return parse_maps(read_maps(self._pid, _MAPS_MAX))

    def close(self) -> None:
        os.close(self.memory)


class UserStacks:
    """
    The stacks of records that are still to come, by the number of the handler's state and the place in the log.

    ``look`` tells ``images`` what processes have mapped up to now: those that have ended are unwound by their files.
    """

    def __init__(
        self,
        images: ProcessImages | None = None,
        look: Callable[[], None] | None = None,
        stores: MappingOf[int, TableStore] | None = None,
    ) -> None:
        self._stores = stores or {}
        self._images = images
        self._look = look
        self._files = MappedFiles()
        self._ended: OrderedDict[ProcessImage, FileSpace] = OrderedDict()
        self._processes: OrderedDict[int, _Process] = OrderedDict()
        self._waiting: dict[int, dict[int, tuple[int, ...]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def close(self) -> None:
        """Let go of all processes."""
        while self._processes:
            self._processes.popitem()[1].close()

    def take(self, data: bytes, start: int, stop: int) -> None:
        """Follow the stack of the snapshot in bytes from ``start`` to ``stop``."""
        pid, number, position, size = SNAPSHOT.unpack_from(data, start)
        word_size: Literal[4, 8] = 8 if size == 8 else 4
        first = start + SNAPSHOT.size
        copied = first + 8 * SNAPSHOT_REGISTERS
        words = _WORDS.unpack_from(data, first)
        mask = (1 << 8 * word_size) - 1
        registers = {
            column: words[REGISTER_OFFSETS[name] // 8] & mask for column, name in enumerate(COLUMNS_OF[word_size].names)
        }
        stack = self._follow(pid, word_size, registers, data[copied:stop])
        places = self._waiting.setdefault(number, {})
        # A handler that has left no record has used the number before.
        for place in [place for place in places if place >= position]:
            del places[place]
        places[position] = stack

    def _follow(self, pid: int, word_size: Literal[4, 8], registers: dict[int, int], copy: bytes) -> tuple[int, ...]:
        columns = COLUMNS_OF[word_size]
        try:
            process = self._process(pid, word_size)
            process.sp, process.copy = registers[columns.sp], copy
            if time.monotonic() - process.looked > _FRESH:
                process.space.forget()
                process.looked = time.monotonic()
            stack = tuple(logged_stack(process.space, registers, USER_FRAMES_MAX))
            if stack[-1] not in _CUT or (process.space.is_known and process.space.is_alive()):
                return stack
            # It has ended meanwhile: its tables could not be read to the end, or what it mapped not at all.
        except (TargetError, OSError):
            pass
        self._forget(pid)
        return self._follow_ended(pid, word_size, registers, copy)

    def _follow_ended(
        self, pid: int, word_size: Literal[4, 8], registers: dict[int, int], copy: bytes
    ) -> tuple[int, ...]:
        """Follow the stack of a process that is gone, by what it had mapped."""
        columns = COLUMNS_OF[word_size]
        pc, sp = registers[columns.pc], registers[columns.sp]
        if self._look is not None:
            self._look()
        image = self._images.covering(pid, pc) if self._images is not None else None
        if image is None:
            return pc, StackEnd.GONE

        def read_stack(address: int, size: int) -> bytes:
            start = address - sp
            if not 0 <= start <= len(copy) - size:
                raise TargetError(f"{size} bytes at {address:#x} are not in the copy of the stack")
            return copy[start : start + size]

        space = self._ended.get(image)
        if space is None:
            while len(self._ended) >= _PROCESSES_MAX:
                self._ended.popitem(last=False)
            space = self._ended[image] = FileSpace(word_size, image, self._files)
        space.read_stack = read_stack
        return tuple(logged_stack(space, registers, USER_FRAMES_MAX))

    def _process(self, pid: int, word_size: Literal[4, 8]) -> _Process:
        process = self._processes.get(pid)
        if process is not None and process.space.word_size == word_size and process.space.is_alive():
            return process
        self._forget(pid)
        while len(self._processes) >= _PROCESSES_MAX:
            self._processes.popitem(last=False)[1].close()
        process = self._processes[pid] = _Process(pid, word_size, self._files)
        return process

    def _forget(self, pid: int) -> None:
        if (process := self._processes.pop(pid, None)) is not None:
            process.close()

    def change(self, data: bytes, start: int, stop: int, *, is_removal: bool = False) -> None:
        """Do what the TALLY or UNTALLY entry in bytes from ``start`` to ``stop`` says to its table."""
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
        """Return a record with the stacks in it that its handler has taken snapshots for."""
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
                start = position + _PREFIX_SIZE
                room = int.from_bytes(data[position + 1 : start], order)
                kept = stack[:room]
                words = b"".join(word.to_bytes(word_size, order) for word in kept)
                prefix = bytes([Token.USER_STACK]) + len(kept).to_bytes(2, order)
                data = data[:position] + prefix + words + data[start + room * word_size :]
        return record[:head] + data


def _is_place(data: bytes, position: int, number: int, word_size: int) -> bool:
    """Return whether a stack stands at a position of a log that is to be that of the snapshot with a number."""
    start = position + _PREFIX_SIZE
    return data[position : position + 1] == bytes([Token.USER_STACK]) and data[
        start : start + word_size
    ] == number.to_bytes(word_size, sys.byteorder)
