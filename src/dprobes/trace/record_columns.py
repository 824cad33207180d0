"""
The items of many records at once.

A block of records is cut into ``Rows``: records whose flag words are the same, and mostly their sizes too, so that an
item has one offset in all of them, and a column of it is made by a single ``struct.iter_unpack``. Whether sizes and
flag words are the same is seen by slices with a stride. That costs a small part of what decoding all records does.
Packed records are one ``Rows`` as they are, of mixed ones those of each shape.
"""

from __future__ import annotations

import operator
import struct
from abc import ABC, abstractmethod
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from dprobes.errors import FormatError
from dprobes.escapes import escaped
from dprobes.record.log_record import FIXED_ITEMS, PROCESS_NAME_MAX, Item, decode_record, flag_word, header_struct
from dprobes.trace.packed_blocks import MixedBlock
from dprobes.trace.trace_content import RecordBlock, TraceRecord
from dprobes.trace.trace_frames import RECORD_HEAD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.record.log_record import ByteOrder
    from dprobes.record.packed_records import PackedRecords
    from dprobes.trace.packed_blocks import Block, PackedBlock

__all__ = ["ITEM_COLUMNS", "TEXT_COLUMNS", "Column", "PackedRows", "PlainRows", "Rows", "rows_of"]

ITEM_COLUMNS = {name: int(item) for item, name in FIXED_ITEMS} | {
    "tid": int(Item.TID),
    "stack_trace": int(Item.STACK_TRACE),
    "word_size": int(Item.WIDE),
}
"""The columns of numbers, with their flags."""

TEXT_COLUMNS = ("name", "module", "program", "host", "symbol", "function")
"""
The columns of strings: the process name, then what the file says of the program and the probepoint.

They are what all formats print of these items, with the same escapes.
"""

Column = list[int] | list[str] | int | str | None
"""The values of all rows; one value if they are the same in all; None if none of them has any."""

_FIRST_WINDOW, _LAST_WINDOW = 32, 1 << 16
_RAGGED = 1024
"""Rows of various sizes that are taken together."""
_FEW = 16
"""Fewer rows are not worth a run of their own."""

_HEAD = RECORD_HEAD.size
_SAME = slice(4, 12)
"""Where in a row its size and its flag word are."""
_FLAGS = 4
_ROW = struct.Struct("<4xII")
"""These two, the flag word as if it were little-endian."""


class Rows(ABC):
    """Hold records of a block with the same flag word; ``len`` is how many."""

    block: RecordBlock | PackedBlock

    def __init__(self, flags: int, byte_order: ByteOrder) -> None:
        self.flags = flags
        self.byte_order: ByteOrder = byte_order
        self._columns: dict[str, Column] = {}

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def record(self, row: int) -> TraceRecord:
        """Return one record."""

    @abstractmethod
    def written(self) -> list[int] | int:
        """Return when each record was written; one time if all were together."""

    @abstractmethod
    def probes(self) -> list[int] | int:
        """Return the probepoints of all records, or the one that they have in common."""

    @property
    def word_size(self) -> int:
        """Bytes of a word."""
        return 8 if self.flags & Item.WIDE else 4

    def column(self, name: str) -> Column:
        """Return a column; raise ``FormatError`` if a record has no room for it."""
        if name not in self._columns:
            self._columns[name] = self._make(name)
        return self._columns[name]

    def _make(self, name: str) -> Column:
        if (item := _FIXED.get(name)) is not None:
            return self._fixed(item) if self.flags & item else None
        program = self.block.program
        match name:
            case "program":
                return escaped(program.name)
            case "module":
                return escaped(program.source.module)
            case "host":
                return escaped(program.origin.host)
            case "symbol" | "function":
                return self._places(is_symbol=name == "symbol")
            case "word_size":
                return self.word_size
            case "stack_trace":
                return int(bool(self.flags & Item.STACK_TRACE))
            case "name":
                return self._names() if self.flags & Item.PROCESS_NAME else None
            case "tid":
                return self._tids() if self.flags & Item.TID else None
        raise KeyError(name)

    def _places(self, *, is_symbol: bool) -> Column:
        probes, program = self.probes(), self.block.program
        numbers = {probes} if isinstance(probes, int) else set(probes)
        places = {probe: program.place(probe) for probe in numbers}
        known = {n: escaped(place.where if is_symbol else place.routine) for n, place in places.items()}
        return known[probes] if isinstance(probes, int) else [known[probe] for probe in probes]

    @abstractmethod
    def _fixed(self, item: int) -> list[int] | int: ...

    @abstractmethod
    def _names(self) -> list[str] | str: ...

    @abstractmethod
    def _tids(self) -> list[int] | int: ...


class PackedRows(Rows):
    """Hold the records of a block of packed ones."""

    def __init__(self, block: PackedBlock) -> None:
        self.block: PackedBlock = block
        self.records: PackedRecords = block.records
        super().__init__(self.records.shape.flags, self.records.shape.byte_order)

    def __len__(self) -> int:
        return len(self.records)

    def record(self, row: int) -> TraceRecord:
        """Return one record."""
        probe, record = self.records[row]
        return TraceRecord(self.block.program, probe, record, self.block.wall_offset, self.block.written)

    def written(self) -> int:
        """Return when they were written."""
        return self.block.written

    def probes(self) -> list[int] | int:
        """Return the probepoints."""
        return self.records.probes()

    def _fixed(self, item: int) -> list[int] | int:
        column = self.records.item(Item(item))
        assert column is not None, "the flag word has the item"
        return column

    def _names(self) -> list[str] | str:
        names = self.records.names()
        assert names is not None, "the flag word has the item"
        if isinstance(names, bytes):
            return _name_of(names)
        known = {name: _name_of(name) for name in set(names)}
        return [known[name] for name in names]

    def _tids(self) -> list[int] | int:
        return self._fixed(Item.TID)


def _name_of(name: bytes) -> str:
    return escaped(name.decode("utf-8", "surrogateescape"))


class PlainRows(Rows):
    """
    Hold records of a block that stand one behind the other.

    Either all have one size, and ``starts`` is a range, or it is a list of where they begin in ``block.body``.
    """

    def __init__(self, block: RecordBlock, starts: Sequence[int], flags: int, byte_order: ByteOrder) -> None:
        super().__init__(flags, byte_order)
        self.block: RecordBlock = block
        self._starts = starts
        self._bounds: tuple[bytes, list[int], list[int]] | None = None
        self._check()

    def __len__(self) -> int:
        return len(self._starts)

    def record(self, row: int) -> TraceRecord:
        """Return one record."""
        block, at = self.block, self._starts[row]
        probe, begin, end = block.bounds(at)
        return TraceRecord(block.program, probe, block.body[begin:end], block.wall_offset, block.written_at(at))

    def written(self) -> list[int] | int:
        """Return when each record was written."""
        if self.block.joints is None:
            return self.block.written
        return [self.block.written_at(start) for start in self._starts]

    def _fixed(self, item: int) -> list[int]:
        offset, size = _offset(self.flags, self.byte_order, item)
        sign = "<" if self.byte_order == "little" else ">"
        code = "Q" if size == 8 else "I"
        if isinstance(self._starts, range):
            layout = _padded(f"{sign}{_HEAD + offset}x{code}", self._starts.step)
            return [value for (value,) in layout.iter_unpack(self._view())]
        unpack, at = struct.Struct(sign + code).unpack_from, _HEAD + offset
        body = self.block.body
        return [unpack(body, start + at)[0] for start in self._starts]

    def probes(self) -> list[int]:
        """Return the probepoints."""
        unpack, body = RECORD_HEAD.unpack_from, self.block.body
        return [unpack(body, start)[0] for start in self._starts]

    def start(self, row: int) -> int:
        """Return where in the block a record begins, with what stands before it (``frames.RECORD_HEAD``)."""
        return self._starts[row]

    def data_bounds(self) -> tuple[bytes, list[int], list[int]]:
        """Return the bytes of the block, and where in them the data of each record starts and ends."""
        if self._bounds is None:
            self._bounds = self._find_bounds()
        return self._bounds

    def _find_bounds(self) -> tuple[bytes, list[int], list[int]]:
        body, starts = self.block.body, self._starts
        at = _HEAD + header_struct(self.flags, self.byte_order).size
        if isinstance(starts, range):
            ends = [start + starts.step for start in starts]
        else:
            unpack = _ROW.unpack_from
            ends = [start + _HEAD + unpack(body, start)[0] for start in starts]
        data = [start + at for start in starts]
        if self.flags & Item.PROCESS_NAME:
            find = body.find
            names, data = data, [find(0, start) + 1 for start in data]
            if any(not 0 < end - start <= PROCESS_NAME_MAX + 1 for start, end in zip(names, data, strict=True)):
                self._refuse()
        if self.flags & Item.TID:
            data = [start + 4 for start in data]
        if any(map(operator.gt, data, ends)):
            self._refuse()
        return body, data, ends

    def _view(self) -> memoryview:
        assert isinstance(self._starts, range)
        return memoryview(self.block.body)[self._starts.start : self._starts.stop]

    def _tails(self, size: int) -> list[bytes]:
        """Return up to ``size`` bytes behind the fixed items of each record."""
        at = _HEAD + header_struct(self.flags, self.byte_order).size
        if isinstance(self._starts, range):
            layout = _padded(f"{at}x{min(size, self._starts.step - at)}s", self._starts.step)
            return [tail for (tail,) in layout.iter_unpack(self._view())]
        unpack, body = _ROW.unpack_from, self.block.body
        return [body[start + at : start + min(at + size, _HEAD + unpack(body, start)[0])] for start in self._starts]

    def _names(self) -> list[str]:
        try:
            names = [tail[: tail.index(0)] for tail in self._tails(PROCESS_NAME_MAX + 1)]
        except ValueError:
            self._refuse()
            raise
        strings = {name: escaped(name.decode("utf-8", "surrogateescape")) for name in set(names)}
        return [strings[name] for name in names]

    def _tids(self) -> list[int]:
        order = self.byte_order
        if not self.flags & Item.PROCESS_NAME:
            ids = self._tails(4)
        else:
            tails = self._tails(PROCESS_NAME_MAX + 1 + 4)
            try:
                ends = [tail.index(0, 0, PROCESS_NAME_MAX + 1) + 1 for tail in tails]
            except ValueError:
                self._refuse()
                raise
            ids = [tail[end : end + 4] for tail, end in zip(tails, ends, strict=True)]
        if min(map(len, ids)) < 4:
            self._refuse()
        return [int.from_bytes(each, order) for each in ids]

    def _check(self) -> None:
        """Raise ``FormatError`` unless all records have room for their fixed items."""
        if self.flags & ~_KNOWN:
            self._refuse()
        needed = header_struct(self.flags, self.byte_order).size
        unpack, body = _ROW.unpack_from, self.block.body
        if isinstance(self._starts, range):
            least = self._starts.step - _HEAD
        else:
            least = min([unpack(body, start)[0] for start in self._starts])
        if least < needed:
            self._refuse()

    def _refuse(self) -> None:
        """Raise what decoding raises about the first record that is none."""
        for row in range(len(self)):
            _check_record(self.block, self._starts[row])


_KNOWN = sum(Item)
_FIXED = {name: int(item) for item, name in FIXED_ITEMS}


def rows_of(block: Block) -> Iterator[Rows]:
    """Cut a block into rows, in order, but mixed ones by their shapes; raise ``FormatError`` where a record is none."""
    if isinstance(block, RecordBlock):
        return _cut(block)
    blocks = block.blocks() if isinstance(block, MixedBlock) else [block]
    return (PackedRows(each) for each in blocks if each.records)


def _cut(block: RecordBlock) -> Iterator[Rows]:
    at, window = block.start, _FIRST_WINDOW
    body, end = block.body, len(block.body)
    while at < end:
        _, begin, stop = block.bounds(at)
        if stop - begin < _FLAGS:
            _check_record(block, at)
        flags, byte_order = flag_word(body[begin : begin + _FLAGS])
        stride = stop - at
        limit = min((end - at) // stride, window)
        same = _same(body, at, stride, limit) if limit >= _FEW else 0
        if same >= _FEW:
            starts: Sequence[int] = range(at, at + same * stride, stride)
            at += same * stride
            window = min(window * 2, _LAST_WINDOW) if same == limit else _FIRST_WINDOW
        else:
            starts, at = _ragged(block, at)
            window = _FIRST_WINDOW
        yield PlainRows(block, starts, flags, byte_order)


def _check_record(block: RecordBlock, at: int) -> None:
    _, begin, end = block.bounds(at)
    try:
        decode_record(block.body[begin:end])
    except FormatError as error:
        file = block.program.origin.file
        raise FormatError(
            f"a frame of '{file}' holds a damaged record: {error.message}", offset=block.position_at(at)
        ) from None


def _same(body: bytes, at: int, stride: int, limit: int) -> int:
    """Return how many rows from ``at`` on have the size and the flag word of the first, at most ``limit``."""
    end = at + limit * stride
    same = limit
    for place in range(at + _SAME.start, at + _SAME.stop):
        column = body[place:end:stride]
        same = min(same, len(column) - len(column.lstrip(column[:1])))
    return same


def _ragged(block: RecordBlock, at: int) -> tuple[list[int], int]:
    """Return where rows with the flag word of the first are from ``at`` on, at most ``_RAGGED``, and where they end."""
    starts: list[int] = []
    body, last = block.body, len(block.body) - _ROW.size
    _, first = _ROW.unpack_from(body, at)
    while at <= last and len(starts) < _RAGGED:
        size, flags = _ROW.unpack_from(body, at)
        end = at + _HEAD + size
        if flags != first or size < _FLAGS or end > len(body):
            break  # if that is damage, it is found at the beginning of the next rows
        starts.append(at)
        at = end
    return starts, at


@cache
def _offset(flags: int, byte_order: ByteOrder, item: int) -> tuple[int, int]:
    """Return where in a record with a flag word one of the fixed items is, and its size."""
    width = flags & int(Item.WIDE)
    before = header_struct(flags & (item - 1) | width, byte_order).size
    return before, header_struct(item | width, byte_order).size - _FLAGS


@lru_cache(1024)
def _padded(layout: str, stride: int) -> struct.Struct:
    """Return a structure with padding behind it, up to ``stride`` bytes."""
    padding = stride - struct.calcsize(layout)
    return struct.Struct(f"{layout}{padding}x")
