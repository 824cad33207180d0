"""
Columns of the items of many records.

A block of records is cut into ``BlockRows``: records whose flag words are the same. For a table these are its parts.
Adjacent records mostly have the same size, so that an item has one offset in all of them, and a single
``struct.iter_unpack`` extracts its column. Slices with a stride compare sizes and flag words. All this costs a small
part of what decoding all records does.
"""

from __future__ import annotations

import operator
import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from dprobes.errors import FormatError
from dprobes.escapes import escaped
from dprobes.record.log_record import PROCESS_NAME_MAX, Item, decode_record, flag_word, header_struct
from dprobes.record.record_table import ITEM_COLUMNS, PROBE_SIZE, Rows, RowShape
from dprobes.trace.trace_content import RecordBlock, TraceRecord
from dprobes.trace.trace_frames import RECORD_HEAD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.record.log_record import ByteOrder
    from dprobes.record.record_origin import Place
    from dprobes.record.record_table import Column, Strings
    from dprobes.trace.packed_blocks import Block

__all__ = ["ITEM_COLUMNS", "TEXT_COLUMNS", "BlockRows", "RaggedRows", "ragged_rows_of", "rows_of"]

TEXT_COLUMNS = ("name", "module", "program", "host", "symbol", "function")
"""
The columns of strings: the process name, then the file's attributes of the program and the probepoint.

All output formats print these items like this, with the same escapes.
"""

_FIRST_WINDOW, _LAST_WINDOW = 32, 1 << 16
_RAGGED = 1024
"""Maximum number of rows of various sizes that are processed together."""
_FEW = 16
"""Minimum number of rows of one size that are processed as a run of their own."""

_HEAD = RECORD_HEAD.size
_SAME = slice(4, 12)
"""The slice of a row with its size and its flag word."""
_FLAGS = 4
_ROW = struct.Struct("<4xII")
"""The structure of size and flag word, the flag word read as little-endian."""


class BlockRows:
    """Records of a block with the same flag word: their ``rows``, with the attributes of the program and the place."""

    def __init__(self, block: Block, rows: Rows) -> None:
        self.block = block
        self.rows = rows
        self._columns: dict[str, Column | Strings | None] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, row: int) -> TraceRecord:
        """Return the record with number ``row``."""
        block = self.block
        probe, record = self.rows.pair(row)
        written = self.rows.written_at(row) if isinstance(self.rows, RaggedRows) else block.written
        return TraceRecord(block.program, probe, record, block.wall_offset, written)

    def written(self) -> list[int] | int:
        """Return the time of writing of each record; a single number if all have the same."""
        if not isinstance(self.rows, RaggedRows) or self.rows.block.joints is None:
            return self.block.written
        return list(map(self.rows.written_at, range(len(self))))

    def place(self, probe: int) -> Place:
        """Return the place of a probepoint, with the program's current module."""
        program = self.block.program
        return program.place(probe).in_module(program.source.module)

    def column(self, name: str) -> Column | Strings | None:
        """
        Return a column, with unprintable characters escaped; None if no record has it.

        Raise ``FormatError`` if a record is too short for it.
        """
        if name not in self._columns:
            self._columns[name] = self._make(name)
        return self._columns[name]

    def _make(self, name: str) -> Column | Strings | None:
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
            case "name":
                return _escaped(self.rows.column("name"))
        return self.rows.column(name)

    def _places(self, *, is_symbol: bool) -> Strings:
        probes, program = self.rows.probes(), self.block.program
        places = {probe: program.place(probe) for probe in ({probes} if isinstance(probes, int) else set(probes))}
        known = {n: escaped(place.where if is_symbol else place.routine) for n, place in places.items()}
        return known[probes] if isinstance(probes, int) else [known[probe] for probe in probes]


def _escaped(column: Column | Strings | None) -> Strings | None:
    match column:
        case list():
            known = {text: escaped(str(text)) for text in set(column)}
            return [known[text] for text in column]
        case None:
            return None
        case text:
            return escaped(str(text))


class RaggedRows(Rows):
    """
    Adjacent records of a block.

    If all have one size, ``starts`` is a range, otherwise a list of their offsets in ``block.body``.
    """

    def __init__(self, block: RecordBlock, starts: Sequence[int], flags: int, byte_order: ByteOrder) -> None:
        self.block: RecordBlock = block
        self._starts = starts
        self._items: dict[Item, list[int]] = {}
        self._names: list[bytes] | None = None
        self._bounds: tuple[bytes, list[int], list[int]] | None = None
        try:
            self.shape = RowShape.of(flags, byte_order)
        except FormatError:
            self._refuse()
            raise
        self._header = header_struct(flags, byte_order).size
        self._check()

    def __len__(self) -> int:
        return len(self._starts)

    def pair(self, row: int) -> tuple[int, bytes]:
        """Return the probepoint of a record, and the encoded record."""
        probe, begin, end = self.block.bounds(self._starts[row])
        return probe, self.block.body[begin:end]

    def written_at(self, row: int) -> int:
        """Return the time of writing of a record."""
        return self.block.written_at(self._starts[row])

    def item(self, item: Item) -> list[int] | None:
        """
        Return the column of a header item; None if records lack it.

        Raise ``FormatError`` if a record is too short.
        """
        if not self.shape.flags & item:
            return None
        if item not in self._items:
            self._items[item] = self._tids() if item is Item.TID else self._fixed(item)
        return self._items[item]

    def _fixed(self, item: Item) -> list[int]:
        place = self.shape.place(item)
        assert place is not None, "the flag word has the item"
        offset, size = place[0] - PROBE_SIZE, place[1]
        sign = "<" if self.shape.byte_order == "little" else ">"
        code = "Q" if size == 8 else "I"
        if isinstance(self._starts, range):
            layout = _padded(f"{sign}{_HEAD + offset}x{code}", self._starts.step)
            return [value for (value,) in layout.iter_unpack(self._view())]
        unpack, at = struct.Struct(sign + code).unpack_from, _HEAD + offset
        body = self.block.body
        return [unpack(body, start + at)[0] for start in self._starts]

    def probes(self) -> list[int]:
        """Return the column of probepoint numbers."""
        unpack, body = RECORD_HEAD.unpack_from, self.block.body
        return [unpack(body, start)[0] for start in self._starts]

    def start(self, row: int) -> int:
        """Return the offset in the block of a record's head (``trace_frames.RECORD_HEAD``)."""
        return self._starts[row]

    def data_bounds(self) -> tuple[bytes, list[int], list[int]]:
        """Return the bytes of the block, and the offsets in them where the data of each record start and end."""
        if self._bounds is None:
            self._bounds = self._find_bounds()
        return self._bounds

    def _find_bounds(self) -> tuple[bytes, list[int], list[int]]:
        body, starts = self.block.body, self._starts
        at = _HEAD + self._header
        if isinstance(starts, range):
            ends = [start + starts.step for start in starts]
        else:
            unpack = _ROW.unpack_from
            ends = [start + _HEAD + unpack(body, start)[0] for start in starts]
        data = [start + at for start in starts]
        if self.shape.flags & Item.PROCESS_NAME:
            find = body.find
            names, data = data, [find(0, start) + 1 for start in data]
            if any(not 0 < end - start <= PROCESS_NAME_MAX + 1 for start, end in zip(names, data, strict=True)):
                self._refuse()
        if self.shape.flags & Item.TID:
            data = [start + 4 for start in data]
        if any(map(operator.gt, data, ends)):
            self._refuse()
        return body, data, ends

    def _view(self) -> memoryview:
        assert isinstance(self._starts, range)
        return memoryview(self.block.body)[self._starts.start : self._starts.stop]

    def _tails(self, size: int) -> list[bytes]:
        """Return up to ``size`` bytes after the fixed items of each record."""
        at = _HEAD + self._header
        if isinstance(self._starts, range):
            layout = _padded(f"{at}x{min(size, self._starts.step - at)}s", self._starts.step)
            return [tail for (tail,) in layout.iter_unpack(self._view())]
        unpack, body = _ROW.unpack_from, self.block.body
        return [body[start + at : start + min(at + size, _HEAD + unpack(body, start)[0])] for start in self._starts]

    def names(self) -> list[bytes] | None:
        """Return the process names; None if records lack them."""
        if not self.shape.flags & Item.PROCESS_NAME:
            return None
        if self._names is None:
            try:
                self._names = [tail[: tail.index(0)] for tail in self._tails(PROCESS_NAME_MAX + 1)]
            except ValueError:
                self._refuse()
                raise
        return self._names

    def _tids(self) -> list[int]:
        order = self.shape.byte_order
        if not self.shape.flags & Item.PROCESS_NAME:
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
        """Raise ``FormatError`` if a record is too short for its fixed items."""
        needed = self._header
        unpack, body = _ROW.unpack_from, self.block.body
        if isinstance(self._starts, range):
            least = self._starts.step - _HEAD
        else:
            least = min([unpack(body, start)[0] for start in self._starts])
        if least < needed:
            self._refuse()

    def _refuse(self) -> None:
        """Raise the error that decoding the first invalid record raises."""
        for row in range(len(self)):
            _check_record(self.block, self._starts[row])


def rows_of(block: Block) -> Iterator[BlockRows]:
    """Cut a block into rows, in order, but tables by their shapes; raise ``FormatError`` at an invalid record."""
    if isinstance(block, RecordBlock):
        return (BlockRows(block, rows) for rows in ragged_rows_of(block))
    return (BlockRows(block, part) for part in block.records.parts if part)


def ragged_rows_of(block: RecordBlock) -> Iterator[RaggedRows]:
    """Cut adjacent records into rows, in order; raise ``FormatError`` at an invalid record."""
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
        yield RaggedRows(block, starts, flags, byte_order)


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
    """Return the number of rows from ``at`` on with size and flag word of the first, at most ``limit``."""
    end = at + limit * stride
    same = limit
    for place in range(at + _SAME.start, at + _SAME.stop):
        column = body[place:end:stride]
        same = min(same, len(column) - len(column.lstrip(column[:1])))
    return same


def _ragged(block: RecordBlock, at: int) -> tuple[list[int], int]:
    """Return the offsets of rows from ``at`` on with the first one's flag word, at most ``_RAGGED``, and the end."""
    starts: list[int] = []
    body, last = block.body, len(block.body) - _ROW.size
    _, first = _ROW.unpack_from(body, at)
    while at <= last and len(starts) < _RAGGED:
        size, flags = _ROW.unpack_from(body, at)
        end = at + _HEAD + size
        if flags != first or size < _FLAGS or end > len(body):
            break  # damage is found at the beginning of the next rows
        starts.append(at)
        at = end
    return starts, at


@lru_cache(1024)
def _padded(layout: str, stride: int) -> struct.Struct:
    """Return a structure padded to ``stride`` bytes."""
    padding = stride - struct.calcsize(layout)
    return struct.Struct(f"{layout}{padding}x")
